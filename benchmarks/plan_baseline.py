"""Compare our compiled Llama2-70B step for tpu-v5p-1024 with the hand-written one: FLOPs, memory, collectives.

    uv run python benchmarks/plan_baseline.py [--layers N] [--json]

Both have the same dimensions, layout (FSDP over 512 chips), attention kernel and remat. Both are compiled for TPUs that
do not need to be present, and are analyzed by the same code. Memory comes from libtpu's own buffer layout
(docs/plan.md). The goals, relative to the baseline: FLOPs 1.00, arguments plus temporaries at most 1.02, collective
bytes at most 1.00. `--layers` compares smaller models, which takes less time.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

TARGET = "tpu-v5p-1024"


def described(compiled, buffers, jaxpr, places, seconds):
    from axlearn_plugins_plan.collectives import collectives, sum_by_axes
    from axlearn_plugins_plan.flops import works
    from axlearn_plugins_plan.hlo import parse
    from axlearn_plugins_plan.traffic import hbm_bytes

    module = parse(compiled.as_text())
    traffic = collectives(module, places)
    kinds, each = {}, {}
    for c in traffic:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.bytes
        size = f"{c.kind} of {c.operand_bytes / 2**20:.4g} MiB x {c.times:.0f}"
        each[size] = each.get(size, 0) + c.bytes
    return {
        "flops": sum(w.flops for w in works(jaxpr.jaxpr)),
        "argument_bytes": buffers.arguments,
        "temporary_bytes": buffers.temporaries,
        "bytes": buffers.arguments + buffers.temporaries,
        "collective_bytes": sum(sum_by_axes(traffic).values()),
        "collectives": kinds,
        "each_collective": each,
        "hbm_traffic_bytes": hbm_bytes(module),
        "compile_seconds": seconds,
    }


def ours(layers):
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_plan.buffers import open_dump
    from axlearn_plugins_plan.groups import Places, find_domains
    from axlearn_plugins_plan.plan import compose_program

    start = time.perf_counter()
    sets = {
        "mesh.targets": {},
        **({"model.decoder.num_layers": layers} if layers else {}),
    }  # the mesh rule of the backend: FSDP
    program, batch = compose_program(resolve("llama2-70b", target=TARGET, set=sets))
    with open_dump(program.compiler_options) as dump:
        compiled = program.compile("train", batch, **dump.options)
        buffers = dump.read()
    seconds = time.perf_counter() - start
    mesh = program.layout.mesh
    places = Places(dict(mesh.shape), find_domains(list(mesh.devices.flat), mesh.size))
    return described(compiled, buffers, program.trace("train", batch).jaxpr, places, seconds)


def baseline(layers):
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    import handwritten_llama as handwritten
    import jax
    import numpy as np

    from axlearn_core.compose.devices import topology_devices
    from axlearn_core.plugins.targets import find_machine
    from axlearn_plugins_plan.buffers import open_dump
    from axlearn_plugins_plan.groups import Places

    start = time.perf_counter()
    dims = handwritten.MODELS["70b"]
    dims = dataclasses.replace(dims, layers=layers) if layers else dims
    mesh = jax.sharding.Mesh(np.array(topology_devices(find_machine(TARGET))).reshape(-1, 1), ("fsdp", "tensor"))
    remat = ("qkv", "context", "attention_out")
    step, state, batch, _ = handwritten.build(
        dims, 1024, 4096, dtype="bfloat16", attention="splash", remat=remat, mesh=mesh
    )
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*state, batch)
    with open_dump({}) as dump:
        compiled = traced.lower(lowering_platforms=("tpu",)).compile(compiler_options=dict(dump.options) or None)
        buffers = dump.read()
    seconds = time.perf_counter() - start
    places = Places({"fsdp": mesh.size, "tensor": 1}, np.zeros(mesh.size, int))
    return described(compiled, buffers, traced.jaxpr, places, seconds)


def differences(ours, baseline):
    """Return the collectives that only one of them has, by kind, size and count."""
    for size in sorted(ours.keys() | baseline.keys(), key=lambda s: -abs(ours.get(s, 0) - baseline.get(s, 0))):
        more = ours.get(size, 0) - baseline.get(size, 0)
        if abs(more) > 1e6:
            yield f"{'ours' if more > 0 else 'baseline'} sends {abs(more) / 1e9:.3f} GB more by {size}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="layers of both models (default: 80)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=("ours", "baseline"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.one:
        print(json.dumps((ours if args.one == "ours" else baseline)(args.layers)))
        return
    results = {}
    for name in ("baseline", "ours"):  # separate processes, so that neither warms up the other
        command = [sys.executable, __file__, "--one", name]
        command += ["--layers", str(args.layers)] if args.layers else []
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if process.returncode:
            sys.exit(f"{name} failed with exit code {process.returncode}")
        results[name] = json.loads(process.stdout.splitlines()[-1])
    if args.json:
        print(json.dumps(results, indent=1))
        return
    for key in ("flops", "bytes", "argument_bytes", "temporary_bytes", "collective_bytes", "hbm_traffic_bytes"):
        a, b = results["ours"][key], results["baseline"][key]
        print(f"{key:18} ours {a:.6g}  baseline {b:.6g}  ratio {a / b:.4f}")
    for line in differences(results["ours"]["each_collective"], results["baseline"]["each_collective"]):
        print(line)
    for name, figures in results.items():
        traffic = ", ".join(f"{k} {v / 2**30:.3g} GiB" for k, v in sorted(figures["collectives"].items()))
        print(f"{name:9} sends {traffic}; compiled in {figures['compile_seconds']:.0f} s")


if __name__ == "__main__":
    main()
