"""Compare the time of saves and restores with an earlier version of axlearn-core, in jobs of several processes.

    git archive COMMIT axlearn_core | tar x -C /tmp
    python benchmarks/checkpoint_versions.py /tmp/axlearn_core/src --processes 1 2 4 --megabytes 128 --rounds 9

Both versions run as jobs that wait for commands, and alternate within each round. Prints the median seconds of each version, and
the median of the ratios within a round. The first round does not count.
"""

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORKER = """
import sys, time
address, count, index, directory, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
import jax
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, index)
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from axlearn_core.checkpoint import ShardedCheckpointer
mesh = jax.make_mesh((count,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
rows = np.random.default_rng(0).standard_normal((4096, 1024), np.float32)
number = max(1, megabytes * 2**20 // rows.nbytes)
make = lambda: jax.make_array_from_callback(rows.shape, sharding, lambda i: rows[i])
half = number // 2
state = {"params": {f"w{i}": make() for i in range(half)}, "learner": {f"w{i}": make() for i in range(number - half)}}
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
one = ShardedCheckpointer.Config(keep_last=1).build(directory=directory)
def timed(call):
    if count > 1:
        multihost_utils.sync_global_devices("begin")
    begin = time.perf_counter()
    jax.block_until_ready(call())
    if count > 1:
        multihost_utils.sync_global_devices("end")
    return time.perf_counter() - begin
def save(step):
    one.save(step, state)
    one.wait()
print("ready", flush=True)
for step, line in enumerate(sys.stdin, 1):
    saved = timed(lambda: save(step))
    print(saved, timed(lambda: one.restore(step, like)[0]), flush=True)
one.close()
"""


class Job:
    """A job whose processes save and restore once for each command."""

    def __init__(self, source, processes, megabytes, directory):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        path = {"PYTHONPATH": str(source)} if source else {}
        env = os.environ | {"JAX_PLATFORMS": "cpu"} | path
        words = [sys.executable, "-c", WORKER, address, str(processes)]
        self.workers = [
            subprocess.Popen(
                [*words, str(index), str(directory), str(megabytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=env,
            )
            for index in range(processes)
        ]
        for worker in self.workers:
            self._read(worker, "ready")

    def measure(self):
        """Return the seconds of a save and of a restore."""
        for worker in self.workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        rows = [self._read(worker, "") for worker in self.workers]
        return tuple(float(text) for text in rows[0].split())

    def close(self):
        """End the processes."""
        for worker in self.workers:
            worker.stdin.close()
        for worker in self.workers:
            worker.wait(60)

    def _read(self, worker, start):
        while line := worker.stdout.readline():
            if "Gloo" not in line and line.startswith(start):
                return line
        raise SystemExit("a process ended")


def compare(source, processes, megabytes, rounds):
    """Print the medians of both versions for one number of processes."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        jobs = [
            Job(path, processes, megabytes, Path(directory) / name) for name, path in (("old", source), ("new", None))
        ]
        for job in jobs:
            stack.callback(job.close)
        results = []
        for number in range(rounds + 1):
            order = jobs if number % 2 else jobs[::-1]
            measured = {id(job): job.measure() for job in order}
            results.append([measured[id(job)] for job in jobs])
        for kind, name in enumerate(("save", "restore")):
            pairs = [(old[kind], new[kind]) for old, new in results[1:]]
            old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(
                f"{processes} processes  {name:7}  before {old:.3f} s  now {new:.3f} s  ratio {ratio:.3f}", flush=True
            )
        shutil.rmtree(directory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Folder src/ of the earlier axlearn_core.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for processes in options.processes:
        compare(options.source, processes, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
