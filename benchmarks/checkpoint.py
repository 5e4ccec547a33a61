"""Time to save and restore a state, compared with a raw parallel write and read of the same bytes.

    python benchmarks/checkpoint.py [--megabytes 1024] [--saves 50]

Prints these figures, and writes them to FILE with `--json FILE`:

- seconds of a save, and of a restore that verifies every hash;
- seconds to write (and fsync) and read the same bytes without hashes, with the same number of threads;
- seconds that `save` blocks, in each round;
- CPU seconds per saved GB;
- resident memory over many saves;
- slowdown of a step that sleeps while saves are in progress, at toy size and at full size.

The variants alternate, and the figures are medians.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint import ShardedCheckpointer

THREADS = min(8, 2 * (os.cpu_count() or 1))
FILE = 64 * 2**20


def make_state(megabytes, seed=0):
    """Return arrays of 16 MiB, half of them parameters and half of them optimizer state."""
    count = max(megabytes // 32, 1)
    dice = np.random.default_rng(seed)
    arrays = {f"w{i}": jnp.asarray(dice.standard_normal((1024, 4096), np.float32)) for i in range(count)}
    state = {"step": jnp.zeros((), jnp.int32), "params": arrays, "learner": {k: x + 1 for k, x in arrays.items()}}
    return jax.block_until_ready(state)


def raw_write(folder, state):
    """Write the bytes of a state to files of 64 MiB, and fsync each file."""
    data = [np.asarray(x).reshape(-1).view(np.uint8) for x in jax.tree.leaves(state)]
    groups = [data[i : i + 4] for i in range(0, len(data), 4)]
    folder.mkdir()

    def write(number):
        with (folder / str(number)).open("wb", buffering=0) as file:
            for part in groups[number]:
                view = part.data
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(len(groups))))


def raw_read(folder):
    """Read the same files into fresh memory, like a restore."""

    def read(path):
        buffer = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            filled = 0
            while filled < buffer.size:
                filled += file.readinto(buffer[filled:].data)
        return buffer

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(read, folder.iterdir()))


def timed(call):
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def throughput(folder, megabytes, rounds):
    """Return the median seconds, alternating between raw access and the checkpointer."""
    state = make_state(megabytes)
    like = jax.eval_shape(lambda: state)
    times = {name: [] for name in ("raw_write", "raw_read", "save", "restore", "blocking", "save_cpu")}
    one = ShardedCheckpointer.Config(keep_last=1).build(directory=folder / "checkpoints")
    for number in range(1, rounds + 2):
        raw = folder / f"raw-{number}"
        measured = {"raw_write": timed(lambda raw=raw: raw_write(raw, state))[0]}
        measured["raw_read"] = timed(lambda raw=raw: raw_read(raw))[0]
        shutil.rmtree(raw)
        begin, cpu = time.perf_counter(), time.process_time()
        one.save(number, state)
        measured["blocking"] = time.perf_counter() - begin
        one.wait()
        measured["save"] = time.perf_counter() - begin
        measured["save_cpu"] = time.process_time() - cpu
        measured["restore"] = timed(lambda number=number: jax.block_until_ready(one.restore(number, like)))[0]
        if number > 1:  # the first save allocates memory for its copies
            for name, value in measured.items():
                times[name].append(value)
    one.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    raw, own = medians["raw_write"] + medians["raw_read"], medians["save"] + medians["restore"]
    return {
        **{f"{name}_seconds": value for name, value in medians.items()},
        "write_ratio": medians["raw_write"] / medians["save"],
        "read_ratio": medians["raw_read"] / medians["restore"],
        "ratio_to_raw": raw / own,
        "blocking_share": medians["blocking"] / medians["save"],
        "blocking_shares": [b / s for b, s in zip(times["blocking"], times["save"], strict=True)],
        "blocking_rounds": times["blocking"],
        "cpu_seconds_per_gb": medians["save_cpu"] / (megabytes * 2**20 / 1e9),
    }


def resident():
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(folder, megabytes, saves):
    """Return the resident memory after each save."""
    state, sizes = make_state(megabytes), []
    one = ShardedCheckpointer.Config(keep_last=2).build(directory=folder / "memory")
    for step in range(1, saves + 1):
        one.save(step, state)
        one.wait()
        sizes.append(resident())
    one.close()
    tenth = max(saves // 10, 1)
    return {"first_rss": max(sizes[tenth : 2 * tenth]), "last_rss": max(sizes[-tenth:])}


def steps(folder, megabytes, *, seconds, every, count, blocks=3):
    """Return the mean time of a sleeping step without saves and with regular saves.

    The figures are medians of alternating blocks. Only the time between saves counts, because `throughput` measures how
    long `save` blocks.
    """
    small = {"params": {f"w{i}": jnp.ones((64, 64)) for i in range(20)}, "step": jnp.zeros((), jnp.int32)}
    state = make_state(megabytes) if megabytes else small
    means = {"alone": [], "saving": []}
    one = ShardedCheckpointer.Config(keep_last=2).build(directory=folder / f"steps-{megabytes}")
    for block in range(blocks):
        for name, values in means.items():
            times = []
            for step in range(1, count + 1):
                if name == "saving" and step % every == 1:
                    one.save(block * count + step, state)
                times.append(timed(lambda: time.sleep(seconds))[0])
            one.wait()
            values.append(statistics.fmean(times))
    one.close()
    alone, saving = (statistics.median(values) for values in means.values())
    return {"alone": alone, "saving": saving, "overhead": saving / alone - 1, "blocks": means}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--memory-megabytes", type=int, help="MB per save of these tests (default: a quarter)")
    parser.add_argument("--folder", type=Path, help="output folder (default: a temporary folder)")
    parser.add_argument("--only-throughput", action="store_true", help="skip the tests of memory and steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=args.folder or Path.cwd()))
    try:
        result = {
            "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
            "load": os.getloadavg()[0],
            "megabytes": args.megabytes,
            "tunables": os.environ.get("GLIBC_TUNABLES", ""),
            **throughput(folder, args.megabytes, args.rounds),
        }
        if not args.only_throughput:
            result |= {
                "steps_toy": steps(folder, 0, seconds=0.02, every=25, count=200),
                "steps_full": steps(folder, args.megabytes, seconds=0.1, every=60, count=120),
                **memory(folder, args.memory_megabytes or max(args.megabytes // 4, 32), args.saves),
            }
        result["load_at_the_end"] = os.getloadavg()[0]
    finally:
        shutil.rmtree(folder)
    for name, value in result.items():
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
