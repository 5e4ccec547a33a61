"""Measure how an engine takes over the weights of a training program in the same process: bytes copied, and time.

    python benchmarks/weight_sync.py [--devices 1] [--width 640] [--layers 7] [--rounds 5]

The training program holds a dense float32 model (58 million parameters by default), on one device or sharded over virtual
devices with `fsdp`. The engine runs on the same devices, with the same mesh or, with `--tensor`, with weights that are split by
outputs. Times are medians of rounds, beside a compiled copy of all parameters and a compiled sum, which reads each of them once.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import Node, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import serving_program
from axlearn_plugins_serving.runner import ModelRunner


def experiment(width: int, layers: int, devices: int) -> Any:
    """Return the config of a dense model whose parameters are sharded over `devices`."""
    sizes: dict[str, Any] = {
        "model.vocab_size": 9216,
        "model.decoder.num_layers": layers,
        "model.decoder.hidden_dim": width,
        "model.decoder.layer.attention.num_heads": width // 64,
        "model.decoder.layer.attention.num_kv_heads": width // 64,
        "model.decoder.layer.feed_forward.hidden_dim": 4 * width,
        "mesh": Mesh(shape={"fsdp": devices} if devices > 1 else {}),
    }
    return patch(resolve("quickstart", target="none").config, sizes)


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a call, after one call that may compile."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def update(runner: ModelRunner, weights: ModelWeights, share: bool) -> int:
    """Update the weights, wait until they are there, and return the number of bytes that were copied."""
    copied = runner.update_weights(weights, share=share)
    jax.block_until_ready(runner.weights.arrays)
    return copied


def open_runner(cfg: Node[Any], program: Any, model: Any, mode: str, layers: str) -> ModelRunner:
    """Build a runner with a small cache. The functions of steps are compiled when they are first called."""
    sizes: dict[str, Any] = {"block_size": 16, "max_rows": 4, "max_context": 256, "mode": mode, "layers": layers}
    return patch(ModelRunner.Config(), sizes).build(model=model, program=program)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="virtual devices of the training program (default: 1)")
    parser.add_argument("--tensor", action="store_true", help="let the engine split weights by outputs instead")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    cfg = experiment(args.width, args.layers, args.devices)
    program = compose(cfg, jax.devices())
    state = program.init(0)
    weights = program.weights(state)
    total = sum(x.nbytes for x in weights.params.values())
    copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
    baseline = median_seconds(lambda: copy(weights.params), args.rounds)
    sums = jax.jit(lambda params: jax.tree.map(jnp.sum, params))
    read = median_seconds(lambda: sums(weights.params), args.rounds)
    print(f"{program!r}: {total / 1e6:.0f} MB; a copy takes {1e3 * baseline:.0f} ms, a read {1e3 * read:.0f} ms\n")
    print("| engine | layers | weights | bytes copied | share | ms | of a copy | of a read |")
    print("|---|---|---|---|---|---|---|---|")
    served: Any = program
    if args.tensor:
        served = serving_program(cfg.model, Mesh(), ServingEngine.Config(tensor_parallel=args.devices))
    modes = ("fast", "parity") if args.devices == 1 else ("fast",)
    for mode, layers in [(mode, layers) for mode in modes for layers in ("separate", "stacked")]:
        runner = open_runner(cfg.model, served, program.model(state), mode, layers)
        for share in (False, True):
            copied = update(runner, weights, share)
            seconds = median_seconds(lambda r=runner, s=share: update(r, weights, s), args.rounds)
            ratios = f"{seconds / baseline:.2f} | {seconds / read:.2f}"
            row = f"{copied / 1e6:.0f} MB | {copied / total:.2f} | {1e3 * seconds:.0f} | {ratios} |"
            print(f"| {mode} | {layers} | {'shared' if share else 'copied'} | {row}", flush=True)


if __name__ == "__main__":
    main()
