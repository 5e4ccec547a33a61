"""Compare the two checkpointers in one process: time, kills and damage.

    python benchmarks/checkpointers.py [--megabytes 1024] [--rounds 5] [--kills 5]

Prints these figures for `sharded` and for `orbax` with and without compression, and writes them to FILE with `--json
FILE`:

- stall: the slowdown of two training steps after a save; the steps donate the state;
- save: the time until the checkpoint is complete, with its files on disk and its manifest written;
- restore: the time to restore and verify every hash, and the time of plain Orbax, which verifies none;
- kills: the number of processes killed during a save whose last checkpoint restores with the correct values;
- damage: the number of flipped bytes, truncated files and missing files that are found before a restore.

The checkpointers alternate within each round, and the figures are medians.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from checkpoint import make_state, timed

from axlearn_core.errors import CheckpointError
from axlearn_core.learn.paths import flatten
from axlearn_core.plugins.registry import registry
from axlearn_plugins_orbax.trees import OrbaxTrees

KINDS = {"sharded": {}, "orbax": {}, "orbax, compressed": {"compression": True}}
"""Config fields by name. The first word of a name is the component."""


def build(name, directory, **fields):
    component = registry().component(name.partition(",")[0])
    return component(**KINDS[name], **fields).build(directory=directory)


def throughput(folder, megabytes, rounds):
    """Return the median seconds of each phase by checkpointer."""
    state = make_state(megabytes)
    like = jax.eval_shape(lambda: state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    checkpointers = {name: build(name, folder / name, keep_last=1) for name in KINDS}
    times = {name: {"stall": [], "call": [], "save": [], "cpu": [], "restore": []} for name in KINDS}
    plain = []
    for number in range(1, rounds + 2):
        for name, one in checkpointers.items():
            # Time two steps without a save, then two steps with one.
            state = jax.block_until_ready(step(jax.block_until_ready(step(state))))
            usual, state = timed(lambda state=state: jax.block_until_ready(step(jax.block_until_ready(step(state)))))
            begin, cpu = time.perf_counter(), time.process_time()
            one.save(number, state)
            call = time.perf_counter() - begin
            state = jax.block_until_ready(step(jax.block_until_ready(step(state))))
            saving = time.perf_counter() - begin
            one.wait()
            measured = {"stall": saving - usual, "call": call, "save": time.perf_counter() - begin}
            measured["cpu"] = time.process_time() - cpu
            measured["restore"], (restored, _) = timed(
                lambda one=one, number=number: jax.block_until_ready(one.restore(number, like))
            )
            again = step(step(restored))
            assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, state)), name
            del restored, again
            if name == "orbax":
                saved = folder / name / str(number)
                plain.append(timed(lambda saved=saved: plain_restore(saved, like))[0])
            if number > 1:  # the first save allocates memory for its copies
                for key, value in measured.items():
                    times[name][key].append(value)
    for one in checkpointers.values():
        one.close()
    sizes = {name: sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file()) for name in KINDS}
    rows = {
        name: {key: statistics.median(values) for key, values in row.items()} | {"bytes": sizes[name], "rounds": row}
        for name, row in times.items()
    }
    rows["plain orbax"] = {"restore": statistics.median(plain[1:])}
    return rows


def plain_restore(step, like):
    """Read the arrays of a checkpoint with plain Orbax, which does not verify hashes."""
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    specs = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for p, x in flatten(like).items()}
    trees = OrbaxTrees.open(str(step / "state"), ["weights", "others"])
    return jax.block_until_ready(trees.read(specs))


def write_forever(directory, name, megabytes):
    """Save steps until the process is killed. The state encodes its step."""
    state = make_state(megabytes)
    one = build(name, directory, keep_last=2)
    for step in range((one.latest_step() or 0) + 1, 10**6):
        state = jax.tree.map(lambda x, step=step: x * 0 + step, state)
        one.save(step, state)
        print("saving", step, flush=True)


def kills(folder, megabytes, count):
    """Count the killed processes whose last checkpoint restores with the correct values."""
    like, dice = jax.eval_shape(lambda: make_state(megabytes)), random.Random(0)
    results = {name: {"killed": 0, "during a save": 0, "restored": 0} for name in KINDS if "," not in name}
    for _ in range(count):
        for name, row in results.items():
            directory = folder / f"kills-{name}"
            command = [sys.executable, __file__, "--write", str(directory), name, "--megabytes", str(megabytes)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for _ in range(2):  # at least one complete checkpoint
                    process.stdout.readline()
                time.sleep(dice.random() * 1.5)
                process.send_signal(signal.SIGKILL)
            row["killed"] += 1
            row["during a save"] += any(p.name.endswith(".partial") for p in directory.iterdir())
            one = build(name, directory)
            step = one.latest_step()
            state, _ = one.restore(step, like)
            row["restored"] += bool(jax.tree.all(jax.tree.map(lambda x, step=step: bool((x == step).all()), state)))
            one.close()
    return results


def plant(file, kind):
    """Damage a file. Return a function that repairs it."""
    if kind == "missing":
        aside = file.with_name(f"{file.name}.aside")
        file.rename(aside)
        return lambda: aside.rename(file)
    size = file.stat().st_size
    begin = size // 2
    with file.open("r+b") as handle:
        handle.seek(begin)
        rest = handle.read() if kind == "truncated" else handle.read(1)
        handle.seek(begin)
        handle.truncate(begin) if kind == "truncated" else handle.write(bytes([rest[0] ^ 1]))

    def repair():
        with file.open("r+b") as handle:
            handle.seek(begin)
            handle.write(rest)

    return repair


def damage(folder, megabytes):
    """Count the damage that is found before a restore, and the outcomes of plain Orbax."""
    state = make_state(megabytes)
    like = jax.eval_shape(lambda: state)
    place = folder.parent / f"{folder.name}-damage"
    results = {}
    for name in ("sharded", "orbax"):
        one = build(name, place / name)
        one.save(1, state)
        one.wait()
        step = place / name / "1"
        files = sorted(
            (f for f in step.rglob("*") if f.is_file() and f.stat().st_size), key=lambda f: -f.stat().st_size
        )
        chosen = [*files[:2], *(f for f in files[2:] if f.stat().st_size < 2**20)]
        row = {"planted": 0, "found": 0}
        plain = {"planted": 0, "error": 0, "wrong values": 0, "no effect": 0}
        for file in chosen:
            for kind in ("flipped", "truncated", "missing"):
                repair = plant(file, kind)
                row["planted"] += 1
                try:
                    one.restore(1, like)
                except CheckpointError:
                    row["found"] += 1
                if name == "orbax" and "state" in file.relative_to(step).parts:
                    plain["planted"] += 1
                    plain[plain_outcome(step, state)] += 1
                repair()
        one.close()
        results[name] = row
        if name == "orbax":
            results["plain orbax"] = plain
    shutil.rmtree(place)
    return results


def plain_outcome(step, state):
    """Read a damaged checkpoint with plain Orbax, and return the name of the outcome."""
    try:
        loaded = plain_restore(step, state)
    except Exception:
        return "error"
    arrays = flatten(state)
    same = all(np.asarray(x).tobytes() == np.asarray(arrays[p]).tobytes() for p, x in loaded.items())
    return "no effect" if same else "wrong values"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--only", choices=["throughput", "kills", "damage"])
    parser.add_argument("--folder", type=Path, help="output folder (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_forever(*args.write, args.megabytes)
    folder = Path(tempfile.mkdtemp(prefix=".checkpointers-", dir=args.folder or Path.cwd()))
    parts = {
        "throughput": lambda: throughput(folder, args.megabytes, args.rounds),
        "kills": lambda: kills(folder, args.megabytes, args.kills),
        "damage": lambda: damage(folder, args.megabytes),
    }
    result = {"megabytes": args.megabytes, "load": os.getloadavg()[0]}
    try:
        for name, part in parts.items():
            if args.only in (None, name):
                result[name] = part()
    finally:
        shutil.rmtree(folder)
    result["load_at_the_end"] = os.getloadavg()[0]
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
