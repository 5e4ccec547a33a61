"""Checkpoints on the machines of a job: the feature `local-tier` compared with Orbax's `emergency.p2p`.

    python benchmarks/local_tiers.py [--megabytes 128] [--repeats 3]

Both use the same state and directories. Two processes run on this machine. Each has its own directory, like a machine,
and holds the whole state (two replicas). Every case starts new processes after a save: nothing is damaged, the second
machine is new, one bit of its largest file is flipped, or that file is truncated to half. A restore is correct if each
process has the saved bytes. Processes that hang are stopped after `--limit` seconds.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROCESSES = 2
STEPS = (1, 2, 3)
CASES = ("intact", "new machine", "flipped bit", "truncated file")
SYSTEMS = ("ours", "orbax")


def make_state(megabytes, step):
    """Return arrays of 8 MiB on every device. Their values depend on the step."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((PROCESSES, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = {}
    for number in range(max(1, megabytes // 8)):
        values = np.random.default_rng(number).standard_normal((2048, 1024)).astype(np.float32) + np.float32(step)
        arrays[f"w{number}"] = jax.make_array_from_callback(values.shape, whole, lambda index, x=values: x[index])
    return mesh, {"params": arrays}


class Ours:
    """`TieredCheckpointer` with only its local tier."""

    def __init__(self, root, rank, megabytes):
        from axlearn_plugins_runtime.tiered import LocalTier, TieredCheckpointer

        local = LocalTier.Config(directory=str(root / f"host-{rank}"), every_steps=1, wait_seconds=60.0)
        self.manager = TieredCheckpointer.Config(local=local).build(directory=root / "run")
        self.manager.run = "benchmark"
        self.like = make_state(megabytes, 0)[1]

    def save(self, step, state):
        self.manager.save_local(step, state, extra={}, metrics={})

    def wait(self):
        self.manager._finish_saves(wait=True)

    def restore(self):
        restored = self.manager.restore_newest(self.like)
        return (None, 0) if restored is None else (restored[0], restored[2])

    def close(self):
        self.manager.close()


class Orbax:
    """`emergency.p2p.CheckpointManager` without persistent storage."""

    def __init__(self, root, rank, megabytes):
        import orbax.checkpoint as ocp
        from orbax.checkpoint.experimental.emergency.p2p import args, checkpoint_manager, options

        self.ocp, self.args = ocp, args
        mesh, self.like = make_state(megabytes, 0)
        folder = root / f"host-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        local = options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2)
        self.manager = checkpoint_manager.CheckpointManager(
            mesh, self.like, folder, options=options.CheckpointManagerOptions(local=local)
        )

    def save(self, step, state):
        self.manager.save(step, args=self.args.Composite(state=self.ocp.args.PyTreeSave(state)))

    def wait(self):
        self.manager.wait_until_finished()

    def restore(self):
        step = self.manager.latest_step()
        if step is None:
            return None, 0
        restore_args = self.ocp.checkpoint_utils.construct_restore_args(self.like)
        args = self.ocp.args.PyTreeRestore(self.like, restore_args=restore_args)
        return self.manager.restore(step, args=self.args.Composite(state=args)).state, step

    def close(self):
        self.manager.close()


def work(args):
    """Do the work of one process and print one line of JSON."""
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.address, PROCESSES, args.rank)
    system = {"ours": Ours, "orbax": Orbax}[args.system](args.folder, args.rank, args.megabytes)
    result = {}
    if args.action == "save":
        result = {"blocked": [], "complete": []}
        for step in STEPS:
            state = jax.block_until_ready(make_state(args.megabytes, step)[1])
            begin = time.perf_counter()
            system.save(step, state)
            result["blocked"].append(time.perf_counter() - begin)
            system.wait()
            result["complete"].append(time.perf_counter() - begin)
    else:
        begin = time.perf_counter()
        state, step = system.restore()
        if state is not None:
            jax.block_until_ready(state)
        result = {"seconds": time.perf_counter() - begin, "step": step, "right": None}
        if state is not None:
            expected = jax.tree.leaves(make_state(args.megabytes, step)[1])
            pairs = zip(jax.tree.leaves(state), expected, strict=True)
            same = [np.array_equal(a.addressable_data(0), b.addressable_data(0)) for a, b in pairs]
            result["right"] = all(same)
    print(json.dumps(result), flush=True)
    system.close()


def run_processes(system, action, folder, megabytes, limit):
    """Return the results of all processes. A process that failed or reached the time limit has a text as its result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    words = ["--system", system, "--action", action, "--folder", str(folder), "--megabytes", str(megabytes)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *words, "--address", address, "--rank", str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(PROCESSES)
    ]  # fmt: skip
    end, results = time.monotonic() + limit, []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            results.append(f"did not finish after {limit:g} s")
            continue
        lines = [line for line in out.splitlines() if line.startswith("{")]
        errors = [line for line in err.splitlines() if "Error" in line] or err.splitlines()[-1:]
        results.append(json.loads(lines[-1]) if lines else f"exit code {process.returncode}: {errors[-1][:300]}")
    return results


def damage(case, folder):
    """Damage the second machine between the save and the restore."""
    host = folder / "host-1"
    if case == "new machine":
        shutil.rmtree(host)
        return
    if case == "intact":
        return
    newest = max((p for p in host.rglob("*") if p.is_dir() and p.name == str(STEPS[-1])), key=lambda p: len(p.parts))
    file = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    if case == "truncated file":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def measure(system, megabytes, limit):
    """Run one round: a save, and each case on a copy of its files."""
    result = {}
    with tempfile.TemporaryDirectory(prefix=".local-tiers-", dir=Path.cwd()) as name:
        saved = Path(name) / "saved"
        result["save"] = run_processes(system, "save", saved, megabytes, limit)
        if texts := [r for r in result["save"] if isinstance(r, str)]:
            raise SystemExit(f"{system}: the save failed: {texts[0]}")
        for case in CASES:
            folder = Path(name) / "case"
            shutil.copytree(saved, folder, symlinks=True)
            damage(case, folder)
            result[case] = run_processes(system, "restore", folder, megabytes, limit)
            shutil.rmtree(folder)
    return result


def describe(results):
    """Return one cell of the table."""
    if texts := [f"rank {rank}: {r}" for rank, r in enumerate(results) if isinstance(r, str)]:
        return "; ".join(texts)
    seconds, steps = max(r["seconds"] for r in results), {r["step"] for r in results}
    state = "right" if all(r["right"] for r in results) else "WRONG BYTES" if steps != {0} else "nothing restored"
    return f"{seconds:.2f} s, step {'/'.join(map(str, sorted(steps)))}, {state}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=90.0)
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--json", type=Path)
    for hidden in ("--action", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action:
        work(args)
        return
    everything = {system: [] for system in SYSTEMS if args.system in (None, system)}
    for _ in range(args.repeats):
        for system, rounds in everything.items():
            rounds.append(measure(system, args.megabytes, args.limit) | {"load": os.getloadavg()[0]})
            print(json.dumps({system: rounds[-1]}), file=sys.stderr, flush=True)
    for system, rounds in everything.items():
        saves = [r for one in rounds for r in one["save"] if not isinstance(r, str)]
        for name in ("blocked", "complete"):
            if saves:
                print(f"{system}: save, {name}: median {statistics.median(x for r in saves for x in r[name]):.3f} s")
        for case in CASES:
            print(f"{system}: {case}: " + " | ".join(describe(one[case]) for one in rounds))
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
