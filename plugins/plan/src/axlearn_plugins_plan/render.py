"""Format a plan as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axlearn_core.config import get_fields
from axlearn_core.errors import counted
from axlearn_core.kernels.selection import Choice, installed
from axlearn_plugins_plan.largest_batch import LargestBatch
from axlearn_plugins_plan.plan import FunctionPlan
from axlearn_plugins_plan.remedies import Remedy

GIB = 2**30


def size(value: float | None) -> str:
    """Format a number of bytes."""
    if value is None:
        return "?"
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:.0f} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """Format a duration given in seconds, with a unit suited to its magnitude."""
    if value is None:
        return "?"
    for unit, scale in (("days", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def count(value: float) -> str:
    """Format a large number with a decimal prefix."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g} "


def share(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "?" if value is None else f"{100 * value:.1f}%"


Section = tuple[str, list[str]]
"""Heading and lines of a section."""


def text(plan: FunctionPlan, remedies: Sequence[Remedy] = (), *, verbose: bool = False) -> str:
    """Format a plan as text, section by section."""
    lines = [title(plan), *batch_lines(plan)]
    for heading, body in sections(plan, remedies, verbose=verbose):
        lines += ["", heading, *(f"  {line}" for line in body)]
    lines += ["", f"compiled in {plan.compile_seconds:.1f} s"]
    return "\n".join(lines)


def title(plan: FunctionPlan) -> str:
    """Return the first line of a plan, which states what was planned and for which machine."""
    machine = plan.machine
    per = f" of {machine.target.devices_per_chip} devices each" if machine.target.devices_per_chip > 1 else ""
    chips = counted(machine.chips, "chip")
    subject = plan.title if plan.function == "train" else f"{plan.function} of {plan.title}"
    trained = f", {plan.trained:,} trained" if plan.function == "train" and plan.trained < plan.parameters else ""
    return f"{subject} on {machine.name}: {chips}{per}, {plan.parameters:,} parameters{trained}"


def batch_lines(plan: FunctionPlan) -> Iterator[str]:
    """Yield the line that describes the batch, if the function takes one."""
    if plan.batch is None:
        return
    rows = counted(plan.rows, "row")
    tokens = f" of {plan.tokens // max(plan.rows, 1):,} tokens ({plan.tokens:,} tokens)" if plan.tokens else ""
    micro = (
        f" in {plan.accumulate_steps:,} microbatches" if plan.function == "train" and plan.accumulate_steps > 1 else ""
    )
    yield f"{rows}{tokens} per {_unit(plan)}{micro}: {plan.batch}"


def _unit(plan: FunctionPlan) -> str:
    return "step" if plan.function == "train" else "call"


def sections(plan: FunctionPlan, remedies: Sequence[Remedy] = (), *, verbose: bool = False) -> list[Section]:
    """Return the non-empty sections of a plan.

    Args:
        plan: The plan.
        remedies: Changes to suggest.
        verbose: Include the kernels that were not considered.
    """
    candidates = (
        ("memory of one device", _memory(plan)),
        ("to make it fit, add one of these to the command (estimates)", _remedies(remedies, plan.memory.capacity)),
        (f"time of one {_unit(plan)} at the roofline", _roofline(plan)),
        ("collectives, bytes sent per device", _collectives(plan)),
        ("kernels", kernel_lines(plan.kernels, verbose=verbose)),
        ("activations, bytes per device to save and FLOPs to recompute (estimates)", _tags(plan)),
        ("mesh", _mesh(plan)),
        ("compiler options", (f"{k}={v}" for k, v in sorted(plan.compiler_options.items()))),
    )
    return [(heading, body) for heading, lines in candidates if (body := list(lines))]


def _memory(plan: FunctionPlan) -> Iterator[str]:
    memory = plan.memory
    verdict = "fits" if memory.fits else "does not fit"
    bound = "at most " if memory.is_upper_bound else ""
    if memory.fits and memory.is_upper_bound:
        verdict = "fits, by the compiler"
    yield f"{verdict}: {bound}{size(memory.total)} of {size(memory.capacity)}"
    yield f"arguments    {size(memory.arguments)}"
    yield f"temporaries  {bound}{size(memory.temporaries)}"
    if memory.code:
        yield f"program      {size(memory.code)}"
    if plan.largest_batch is not None:
        yield from _largest_batch(plan, plan.largest_batch)


def _largest_batch(plan: FunctionPlan, largest: LargestBatch) -> Iterator[str]:
    """Format the result of the search for the largest batch."""
    per_row = plan.tokens // max(plan.rows, 1) if plan.tokens else None

    def rows_of(rows: int) -> str:
        return counted(rows, "row") + (f" ({rows * per_row:,} tokens)" if per_row else "")

    if largest.rows is None:
        smallest = rows_of(largest.too_large or plan.batch_unit)
        yield f"not even the smallest batch fits: {smallest} need {size(largest.too_large_bytes)}"
        return
    bound = f"{rows_of(largest.too_large)} do not fit" if largest.too_large else "larger batches were not tried"
    yield f"largest batch that fits: {rows_of(largest.rows)}, {size(largest.bytes)}; {bound}"
    if largest.rows != plan.rows:
        yield f"    --set input.batch_size={largest.rows} uses it; each update then averages over {rows_of(largest.rows)}"


def _remedies(remedies: Sequence[Remedy], capacity: int | None) -> Iterator[str]:
    for remedy in remedies:
        suffix = " (not enough alone)" if capacity is not None and remedy.total > capacity else ""
        cost = "unknown cost" if remedy.seconds is None else f"+{seconds(remedy.seconds)} per step"
        if remedy.seconds == 0:
            cost = "no added time"
        if remedy.chips > 1:
            cost = f"{remedy.chips} times the chips"
        yield remedy.words
        yield f"    about {size(remedy.total)}{suffix}, {cost}: {remedy.why}"


def _roofline(plan: FunctionPlan) -> Iterator[str]:
    line, devices = plan.roofline, plan.machine.devices
    executed = sum(plan.executed_flops.values())
    rows = (
        ("compute", line.compute, f"{count(executed / devices)}FLOP"),
        ("memory", line.hbm, "?" if plan.hbm_traffic is None else f"{size(plan.hbm_traffic)} read and written"),
        ("links", line.links, _bytes_sent(plan, "link_bytes")),
        ("network", line.network, _bytes_sent(plan, "network_bytes")),
    )
    for name, time, description in rows:
        yield f"{name:8} {seconds(time):>9}  {description}"
    if line.step is None:
        yield "step             ?  this target's peak FLOP/s is unknown"
    else:
        speed = _tokens_per_second(plan, line.step, ", ", "")
        yield f"step     {seconds(line.step):>9}  bound by {line.bound}{speed}; {seconds(line.serial)} without overlap"
    if (prediction := plan.prediction) is not None:
        speed = _tokens_per_second(plan, prediction.seconds, "", "; ")
        high = "an unknown time" if prediction.high is None else seconds(prediction.high)
        within = f"{seconds(prediction.low)} to {high}"
        many = f"{counted(prediction.steps, 'known step')} of {counted(prediction.trainings, 'workload')}"
        yield f"predicted{seconds(prediction.seconds):>9}  {speed}{within}, from {many} on {plan.machine.target.name}:"
        yield from (f"           {source}" for source in prediction.sources)
        if prediction.unknown:
            yield f"           no known step ran {', '.join(prediction.unknown)}, so the step may take much longer"
    full, causal = plan.flops.full, plan.flops.causal
    yield f"MFU      {share(plan.mfu(causal=True)):>9}  of {count(causal)}FLOP, with visible pairs of positions only"
    yield f"         {share(plan.mfu()):>9}  of {count(full)}FLOP, with full attention as in most publications"
    if plan.function == "train" and plan.trained < plan.parameters:
        yield "                    gradients of frozen parameters do not count, because the step does not need them"
    if (reason := plan.mfu_note) is not None:
        yield f"                    {reason}"


def _tokens_per_second(plan: FunctionPlan, step: float, before: str, after: str) -> str:
    return f"{before}{plan.tokens / step:,.0f} tokens/s{after}" if plan.tokens else ""


def _bytes_sent(plan: FunctionPlan, field: str) -> str:
    if plan.collectives is None:
        return "?"
    return f"{size(sum(c.times * get_fields(c)[field] for c in plan.collectives))} sent"


def _collectives(plan: FunctionPlan) -> Iterator[str]:
    grouped: dict[tuple[str, str], list[float]] = {}
    for collective in plan.collectives or ():
        total = grouped.setdefault((collective.axes, collective.kind), [0.0, 0.0, 0.0])
        total[0] += collective.times
        total[1] += collective.bytes
        total[2] += 0 if collective.asynchronous else collective.bytes
    for (axes, kind), (times, num_bytes, waiting) in sorted(grouped.items(), key=lambda item: -item[1][1]):
        blocking = "" if not num_bytes or waiting == 0 else f", {share(waiting / num_bytes)} blocking"
        yield f"{axes:12} {kind:18} {size(num_bytes):>9} in {times:.0f}{blocking}"


def kernel_lines(choices: Sequence[Choice], *, verbose: bool = True) -> Iterator[str]:
    """Format each call site with its chosen kernel and the reasons why other kernels were rejected.

    Unless `verbose` is set, omit kernels that were not tried because they run on other platforms or have a lower priority.
    """
    for choice in choices:
        yield choice.call
        yield f"    {choice.name}"
        for name, reason in (rejection_reasons(choice) if verbose else _refusals(choice)).items():
            yield f"    not {name}: {reason}"


def _refusals(choice: Choice) -> dict[str, str]:
    """Return the reason why each rejected kernel for this platform does not support the call, by kernel name."""
    platform = choice.context.platform
    elsewhere = {k.name for k in installed(type(choice.op)) if k.platforms and platform not in k.platforms}
    return {name: reason for name, reason in dict(choice.rejected).items() if name not in elsewhere}


def rejection_reasons(choice: Choice) -> dict[str, str]:
    """Return the reason why each other implementation of the op was not chosen, by name."""
    reasons, platform = dict(choice.rejected), choice.context.platform
    declared = installed(type(choice.op))
    best = next((k.priority for k in declared if k.name == choice.name), 0)
    for other in sorted(declared, key=lambda k: (-k.priority, k.name)):
        if other.name == choice.name or other.name in reasons:
            continue
        if other.platforms and platform not in other.platforms:
            reasons[other.name] = f"runs on {', '.join(other.platforms)}, not on {platform}"
        else:
            reasons[other.name] = f"not tried, its priority is {other.priority} and the chosen kernel has {best}"
    return reasons


def _tags(plan: FunctionPlan) -> Iterator[str]:
    yield from plan.remat
    if not plan.tags:
        return
    width = max(len(t.name) for t in plan.tags)
    for tag in plan.tags:
        fate = {"free": "saved if the backward pass needs it"}.get(tag.kept, tag.kept)
        yield f"{tag.name:{width}}  {size(tag.bytes):>9}  {count(tag.flops):>9}FLOP  {fate}"


def _mesh(plan: FunctionPlan) -> Iterator[str]:
    yield ", ".join(f"{a}={n}" for a, n in plan.mesh.items()) or "one device"
    yield f"by {plan.rule}" if plan.rule else "no mesh rule matches: all devices on fsdp, or the config's mesh"
    for note in plan.notes:
        yield f"note: {note}"


def as_json(plan: FunctionPlan, remedies: Sequence[Remedy] = ()) -> dict[str, Any]:
    """Return the plan as one JSON object. Bytes and collectives are per chip."""
    per_chip = plan.machine.target.devices_per_chip
    memory, line = plan.memory, plan.roofline
    return {
        "name": plan.title,
        "function": plan.function,
        "target": plan.machine.name,
        "chips": plan.machine.chips,
        "devices": plan.machine.devices,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained,
        "fits": memory.fits,
        "argument_bytes": memory.arguments * per_chip,
        "temporary_bytes": memory.temporaries * per_chip,
        "code_bytes": memory.code * per_chip,
        "memory_at_most": memory.is_upper_bound,
        "hbm_bytes": None if memory.capacity is None else memory.capacity * per_chip,
        "model_flops": plan.flops.full,
        "model_flops_causal": plan.flops.causal,
        "model_flops_per_chip": plan.flops.full / plan.machine.chips,
        "executed_flops_per_chip": {d: f / plan.machine.chips for d, f in plan.executed_flops.items()},
        "hbm_traffic_bytes": None if plan.hbm_traffic is None else plan.hbm_traffic * per_chip,
        "roofline_step_seconds": line.step,
        "roofline_bound": line.bound,
        "roofline_seconds": {
            "compute": line.compute,
            "hbm": line.hbm,
            "links": line.links,
            "network": line.network,
            "serial": line.serial,
        },
        "predicted_step_seconds": _prediction_fields(plan),
        "roofline_mfu": plan.mfu(),
        "roofline_mfu_causal": plan.mfu(causal=True),
        "roofline_mfu_note": plan.mfu_note,
        "rows_per_step": plan.rows if plan.batch is not None else None,
        "tokens_per_step": plan.tokens,
        "batch": plan.batch,
        "largest_batch": _largest_batch_fields(plan.largest_batch, per_chip),
        "collective_bytes": _scale_values(plan.collective_bytes, per_chip),
        "collectives": None if plan.collectives is None else [_collective(c, per_chip) for c in plan.collectives],
        "kernels": kernels_json(plan.kernels),
        "remat": list(plan.remat),
        "activations": [
            {"name": t.name, "kept": t.kept, "bytes": t.bytes * per_chip, "flops": t.flops * per_chip}
            for t in plan.tags
        ],
        "mesh": dict(plan.mesh),
        "mesh_rule": plan.rule,
        "compiler_options": dict(plan.compiler_options),
        "notes": list(plan.notes),
        "compile_seconds": plan.compile_seconds,
        "remedies": [_remedy_fields(remedy, per_chip) for remedy in remedies],
    }


def _remedy_fields(remedy: Remedy, per_chip: int) -> dict[str, Any]:
    return {
        "words": remedy.words,
        "estimated_bytes": remedy.total * per_chip,
        "estimated_extra_seconds": remedy.seconds,
        "times_the_chips": remedy.chips,
        "why": remedy.why,
    }


def _largest_batch_fields(largest: LargestBatch | None, per_chip: int) -> dict[str, Any] | None:
    if largest is None:
        return None
    return {
        "rows": largest.rows,
        "bytes": None if largest.bytes is None else largest.bytes * per_chip,
        "too_large_rows": largest.too_large,
        "too_large_bytes": None if largest.too_large_bytes is None else largest.too_large_bytes * per_chip,
        "compiles": largest.compiles,
    }


def _prediction_fields(plan: FunctionPlan) -> dict[str, Any] | None:
    prediction = plan.prediction
    if prediction is None:
        return None
    return {
        "seconds": prediction.seconds,
        "low": prediction.low,
        "high": prediction.high,
        "steps": prediction.steps,
        "trainings": prediction.trainings,
        "sources": list(prediction.sources),
        "unknown_ops": list(prediction.unknown),
    }


def _scale_values(values: Mapping[str, float] | None, factor: float) -> dict[str, float] | None:
    return None if values is None else {k: v * factor for k, v in values.items()}


def _collective(item: Any, per_chip: int) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "axes": item.axes,
        "group": item.size,
        "times": item.times,
        "link_bytes": item.times * item.link_bytes * per_chip,
        "network_bytes": item.times * item.network_bytes * per_chip,
        "asynchronous": item.asynchronous,
    }


def kernels_json(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return each call site as a JSON object."""
    return [
        {
            "name": c.op.name,
            "kernel": c.name,
            "call": c.call,
            "gradients": c.context.gradients,
            "rejected": rejection_reasons(c),
        }
        for c in choices
    ]
