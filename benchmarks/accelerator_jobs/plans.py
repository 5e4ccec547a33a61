"""Part 4: compare the plan of a step with the measured step."""

import functools
import glob
import tempfile
import time
from collections import defaultdict
from typing import Any

import numpy as np

from accelerator_jobs.context import Context
from accelerator_jobs.models import shape_of
from accelerator_jobs.steps import random_tokens, resolve_shape, specs_of
from accelerator_jobs.timing import check_fits

STEPS = 5
LISTED = 25
"""Number of the slowest kernels in the breakdown."""


def measure(context: Context, name: str) -> None:
    """Record rows `plan`, `machine`, `comparison`, and one for each of the slowest kernels."""
    device = context.device()
    earlier = context.earlier("1b").get("bfloat16, scan", {})
    settings = {"input.batch_size": earlier["batch"]} if earlier.get("batch") else {}
    resolved = resolve_shape(context, device, name, (), settings)
    plan = context.attempt("plan", functools.partial(_plan_figures, resolved))
    ran = context.attempt("machine", functools.partial(_machine_figures, context, device, resolved, name), seconds=10)
    if plan and ran:
        context.attempt("comparison", functools.partial(_comparison, plan, ran))


def _plan_figures(resolved: Any) -> dict[str, Any]:
    from axlearn_plugins_plan.plan import make_plan

    started = time.perf_counter()
    plan = make_plan(resolved)
    line = plan.roofline
    return {
        "memory_bytes": plan.memory.total,
        "arguments_bytes": plan.memory.arguments,
        "temporaries_bytes": plan.memory.temporaries,
        "roofline_seconds": line.step,
        "compute_seconds": line.compute,
        "memory_seconds": line.hbm,
        "bound": line.bound,
        "mfu_full_at_roofline": plan.mfu(),
        "rows": plan.rows,
        "kernels": sorted({f"{c.op.name}: {c.name}" for c in plan.kernels}),
        "notes": list(plan.notes),
        "plan_seconds": time.perf_counter() - started,
    }


def _machine_figures(context: Context, device: Any, resolved: Any, name: str) -> dict[str, Any]:
    import jax

    from axlearn_core.compose import compose

    shape, batch = shape_of(name, rehearsal=context.rehearsal), resolved.config.input.batch_size
    program = compose(resolved.config, [device], machine=resolved.machine)
    compiled = program.compile("train", specs_of(batch, shape.length))
    check_fits(compiled, device)
    state = program.init(0)
    tokens = random_tokens(shape.vocab, batch, shape.length)
    data = program.put({"tokens": tokens, "targets": np.roll(tokens, -1, 1)})
    before = device.memory_stats() or {}
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, scalars = compiled(state, data)
        jax.block_until_ready((state, scalars))
        seconds.append(time.perf_counter() - start)
    stats = device.memory_stats() or {}
    figures = {
        "step_seconds": sorted(seconds[1:])[len(seconds[1:]) // 2],
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "peak_bytes_before_steps": before.get("peak_bytes_in_use"),
        "kernels": sorted({f"{c.op.name}: {c.name}" for c in program.choices()}),
    }
    context.attempt("profile", functools.partial(_profile, context, compiled, state, data))
    return figures


def _comparison(plan: dict[str, Any], ran: dict[str, Any]) -> dict[str, Any]:
    """Return measured over predicted values. A value is None if the machine or its target does not report it."""
    peak, least = ran["peak_bytes"], plan["roofline_seconds"]
    return {
        "memory_ratio": peak / plan["memory_bytes"] if peak else None,
        "memory_note": None if peak else "this device does not report its memory",
        "roofline_share": least / ran["step_seconds"] if least else None,
        "roofline_note": None if least else "the target does not define its peak",
        "same_kernels": plan["kernels"] == ran["kernels"],
    }


def _profile(context: Context, compiled: Any, state: Any, data: Any) -> dict[str, Any]:
    """Record the slowest kernels of one step. Donates `state`."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(state, data))
        files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        if not files:
            return {"skipped": "the profiler wrote no trace"}
        totals, counts = _kernel_times(files[0])
    if not totals:
        return {"skipped": "the trace has no events of the device"}
    total = sum(totals.values())
    for name, nanoseconds in sorted(totals.items(), key=lambda t: -t[1])[:LISTED]:
        context.record(
            f"kernel {name[:80]}",
            microseconds=nanoseconds / 1e3,
            calls=counts[name],
            share=nanoseconds / total,
        )
    return {"kernel_seconds": total / 1e9, "kernels_listed": min(LISTED, len(totals)), "kernels": len(totals)}


def _kernel_times(path: str) -> tuple[dict[str, float], dict[str, int]]:
    """Return nanoseconds and calls by kernel name, from a GPU's streams or a CPU's XLA threads."""
    import jax

    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    planes = list(jax.profiler.ProfileData.from_file(path).planes)
    devices = [p for p in planes if p.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and "Stream" not in line.name and line.name != "XLA Ops":
                continue  # other lines aggregate the same time by step and module
            for event in line.events:
                if devices or any(key == "hlo_op" for key, _ in event.stats):
                    totals[event.name] += event.duration_ns
                    counts[event.name] += 1
    return totals, counts
