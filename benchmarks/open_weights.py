"""Read the weights of a run onto eight virtual CPU devices: memory, bytes read from the storage, and speed.

    uv run python benchmarks/open_weights.py [--gigabytes 1] [--pairs 5] [--json]

Writes a run with parameters of about this size and their optimizer state. Then it alternates between a plain read (the
same bytes, into fresh memory) and `open_weights(run).read("**", shardings)`, sharded over the eight devices. Reports
the median and range of plain seconds / our seconds, the peak of resident memory above its baseline (compared with
parameters + largest tensor + 10%), and the bytes read from the storage by file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from hf_import import memory

import axlearn_core as ax
from axlearn_core.checkpoint import LocalStorage
from axlearn_core.compose import compose
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.run import open_weights

WIDTH, HIDDEN = 1024, 2816


class CountingStorage(LocalStorage):
    """Counts the bytes read from each file."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.bytes = Counter[str]()

    def read(self, path: str) -> bytes:
        data = super().read(path)
        self.bytes[path] += len(data)
        return data

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        super().read_into(path, begin, buffer)
        self.bytes[path] += len(buffer)


def config_of(gigabytes: float):
    each = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)
    layers = max(1, round((gigabytes * 1e9 - 4 * 2048 * WIDTH) / each))
    settings = {
        "model.decoder.num_layers": layers,
        "model.decoder.hidden_dim": WIDTH,
        "model.decoder.layer.attention.num_heads": 16,
        "model.decoder.layer.feed_forward.hidden_dim": HIDDEN,
        "mesh.shape": {"fsdp": 8},
    }
    return ax.resolve("quickstart", set=settings).config


def write_run(run: Path, gigabytes: float) -> None:
    """Write a run with one checkpoint, in a separate process whose memory does not count."""
    config = config_of(gigabytes)
    state = compose(config).init(0)
    run.mkdir()
    (run / "config.yaml").write_text(write(config, registry()))
    checkpointer = config.checkpointer.build(directory=run / "checkpoints")
    checkpointer.save(1, state, extra={"step": 1}, metrics={})
    checkpointer.close()


def plain(run: Path) -> float:
    """Return the seconds to read every byte of the weight files into fresh memory."""
    start = time.perf_counter()
    arrays = [np.fromfile(file, np.uint8) for file in sorted(run.glob("checkpoints/1/state/weights/*"))]
    seconds = time.perf_counter() - start
    del arrays
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        return write_run(options.write, options.gigabytes)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        subprocess.run([sys.executable, __file__, "--gigabytes", str(options.gigabytes), "--write", run], check=True)
        results = measure(run, options)
    print(json.dumps(results) if options.json else "\n".join(f"{k}: {v}" for k, v in results.items()))
    return None


def measure(run: Path, options: argparse.Namespace) -> dict[str, object]:
    shardings = {p: s.sharding for p, s in compose(open_weights(run).experiment).state.params.items()}
    storage = CountingStorage(run)
    specs = open_weights(run, storage=storage).specs()
    parameters = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in specs.values())
    largest = max(int(np.prod(s.shape)) * s.dtype.itemsize for s in specs.values())
    jax.block_until_ready(open_weights(run).read("decoder.norm.**", shardings))  # initialize JAX
    plain(run)  # warm up: fill the page cache
    ratios, seconds, peaks = [], [], []
    for _ in range(options.pairs):
        before = plain(run)
        storage.bytes.clear()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        baseline, start = memory("VmRSS"), time.perf_counter()
        tensors = jax.block_until_ready(open_weights(run, storage=storage).read("**", shardings))
        seconds.append(time.perf_counter() - start)
        peaks.append(memory("VmHWM") - baseline)
        ratios.append(before / seconds[-1])
        assert all(x.sharding == shardings[p] for p, x in tensors.items())
        del tensors
    weights = sum(n for path, n in storage.bytes.items() if "/state/weights/" in path)
    return {
        "parameters": parameters,
        "largest_tensor": largest,
        "stored_state": sum(f.bytes for f in storage.list("checkpoints/1/state/")),
        "speed_against_plain_read": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "gigabytes_per_second": parameters / 1e9 / statistics.median(seconds),
        "peak_above_baseline": max(peaks),
        "bound": int(1.1 * (parameters + largest)),
        "peak_against_bound": max(peaks) / (1.1 * (parameters + largest)),
        "bytes_of_weights_read": weights,
        "bytes_of_optimizer_read": sum(n for path, n in storage.bytes.items() if "/state/state/" in path),
        "other_bytes_read": {path: n for path, n in sorted(storage.bytes.items()) if "/state/" not in path},
    }


if __name__ == "__main__":
    main()
