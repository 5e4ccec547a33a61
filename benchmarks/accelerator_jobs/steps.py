"""Part 3: our training steps, and the effect of precision, stack mode and rematerialization."""

import functools
import gc
import statistics
import time
from typing import Any

import numpy as np

from accelerator_jobs.context import Context
from accelerator_jobs.models import settings_of, shape_of
from accelerator_jobs.timing import check_fits, largest_batch

WARMUPS, STEPS = 2, 8
FIRST = "bfloat16, scan"
"""Variant to compare PyTorch and the other variants with."""

VARIANTS = (
    ("fp8, scan", ("quantization:format=fp8",), {}),
    ("bfloat16, no rematerialisation", (), {"model.decoder.stack.remat": None}),
    ("bfloat16, unrolled", (), {"model.decoder.stack.mode": "unrolled"}),
    ("fp8, no rematerialisation", ("quantization:format=fp8",), {"model.decoder.stack.remat": None}),
    ("bfloat16, full rematerialisation", ("remat:policy=full",), {}),
    ("bfloat16, products kept", ("remat:policy=dots",), {}),
)
"""Name, features and settings of each variant, the most important first."""


def measure(context: Context, name: str) -> None:
    """Record a row for the shape as the experiment resolves on this machine."""
    device = context.device()
    run = functools.partial(step_figures, context, device, name, (), {"model.decoder.stack.mode": "scan"})
    context.attempt(FIRST, run, seconds=20)


def measure_variants(context: Context, name: str) -> None:
    """Record a row for each variant of a shape."""
    device = context.device()
    for title, features, settings in VARIANTS:
        context.attempt(title, functools.partial(step_figures, context, device, name, features, settings), seconds=25)


def resolve_shape(context: Context, device: Any, name: str, features: Any = (), settings: Any = None) -> Any:
    """Return the experiment of a shape, resolved for this machine. Its mesh rule sets the remat policy."""
    from accelerator_jobs.local import machine_of
    from axlearn_core import resolve

    shape = shape_of(name, rehearsal=context.rehearsal)
    shape_settings = settings_of(shape) | {"input.batch_size": shape.batch, "input.sequence_length": shape.length}
    return resolve("llama2-7b", with_=features, set=shape_settings | (settings or {}), target=machine_of(device).name)


def step_figures(context: Context, device: Any, name: str, features: Any, settings: Any) -> dict[str, Any]:
    """Return step time, tokens per second, utilization and memory of a variant at the largest batch that fits."""
    from axlearn_core.compose import compose

    resolved = resolve_shape(context, device, name, features, settings)
    shape = shape_of(name, rehearsal=context.rehearsal)
    program = compose(resolved.config, [device], machine=resolved.machine)
    figures = largest_batch(
        shape.batch, functools.partial(_measure_batch, program, device, shape), functools.partial(release, device)
    )
    figures |= {
        "parameters": program.functional.num_parameters,
        "features": list(features),
        "settings": {k: str(v) for k, v in (settings or {}).items()},
        "mesh_rule": resolved.rule,
        "kernels": sorted({f"{c.op.name}: {c.name}" for c in program.choices()}),
    }
    release(device)
    return figures


def specs_of(batch: int, length: int) -> dict[str, Any]:
    """Return the shapes of a batch."""
    import jax

    tokens = jax.ShapeDtypeStruct((batch, length), np.int32)
    return {"tokens": tokens, "targets": tokens}


def random_tokens(vocab: int, batch: int, length: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return the training tokens, the same as in PyTorch."""
    return np.random.default_rng(seed).integers(0, vocab, (batch, length), dtype=np.int32)


def _measure_batch(program: Any, device: Any, shape: Any, batch: int) -> dict[str, Any]:
    import jax

    started = time.perf_counter()
    compiled = program.compile("train", specs_of(batch, shape.length))
    compile_seconds = time.perf_counter() - started
    predicted = check_fits(compiled, device)
    state = program.init(0)
    tokens = random_tokens(shape.vocab, batch, shape.length)
    data = program.put({"tokens": tokens, "targets": np.roll(tokens, -1, 1)})
    seconds, losses = [], []
    for step in range(WARMUPS + STEPS):
        start = time.perf_counter()
        state, scalars = compiled(state, data)
        jax.block_until_ready((state, scalars))
        if step >= WARMUPS:
            seconds.append(time.perf_counter() - start)
        losses.append(float(scalars["loss"]))
    median = statistics.median(seconds)
    figures = {
        "step_seconds": median,
        "step_seconds_all": seconds,
        "tokens_per_second": batch * shape.length / median,
        "compile_seconds": compile_seconds,
        "losses": [losses[0], losses[-1]],
        "compiled_bytes": predicted,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }
    return figures | utilisation(program, specs_of(batch, shape.length), median)


def utilisation(program: Any, specs: Any, seconds: float) -> dict[str, Any]:
    """Return model FLOPs and MFU in both conventions. Omits MFU if the target does not define its peak."""
    from axlearn_plugins_plan.flops import model_flops
    from axlearn_plugins_plan.roofline import utilisation as share

    flops = model_flops(program, "train", specs)
    figures = {"model_flops_full": flops.full, "model_flops_causal": flops.causal}
    for name, work in (("mfu_full", flops.full), ("mfu_causal", flops.causal)):
        figures[name] = share(work, seconds, program.target, 1) if program.target else None
    return figures


def release(device: Any) -> None:
    """Free the memory of earlier programs."""
    import jax

    gc.collect()
    for array in jax.live_arrays():
        array.delete()
    jax.clear_caches()
