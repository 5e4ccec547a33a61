"""Format a serving plan as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from axlearn_plugins_plan.render import kernel_lines, kernels_json, seconds, size
from axlearn_plugins_serving.plan.serving_plan import ServingPlan
from axlearn_plugins_serving.plan.steps import StepPlan


def text(plan: ServingPlan, *, verbose: bool = False) -> str:
    """Format a plan as text, section by section."""
    machine = plan.machine
    lines = [f"serving {plan.title} on {machine.name}: {machine.chips} chips, {plan.parameters:,} parameters"]
    sections = (
        ("memory of one device", _memory(plan)),
        ("to make it fit", _remedies(plan)),
        ("cache", _cache(plan)),
        (f"time at the roofline, {plan.context:,} tokens of context each", _times(plan)),
        ("kernels", kernel_lines(plan.kernels, verbose=verbose)),
        ("mesh", _mesh(plan)),
    )
    for heading, section in sections:
        if body := list(section):
            lines += ["", heading, *(f"  {line}" for line in body)]
    return "\n".join([*lines, "", f"compiled in {plan.compile_seconds:.1f} s"])


def _memory(plan: ServingPlan) -> Iterator[str]:
    yield f"{'fits' if plan.fits else 'does not fit'}: {size(plan.total)} of {size(plan.capacity)}"
    yield f"weights      {size(plan.weights)}"
    yield f"cache        {size(plan.cache)}"
    if plan.states:
        yield f"states       {size(plan.states)}"
    yield f"tables       {size(plan.tables)}"
    yield f"working      {size(plan.working_bytes)}"


def _remedies(plan: ServingPlan) -> Iterator[str]:
    if plan.fits or plan.capacity is None:
        return
    most = plan.most_tokens or 0
    if most >= plan.runner.max_context:
        yield f"--set serving.runner.num_blocks={most // plan.runner.block_size}"
        yield f"    a cache of {most:,} tokens, which uses the remaining memory"
    else:
        yield "more chips, or weights of fewer bits"
        yield f"    weights and temporaries alone take {size(plan.weights + plan.working_bytes)} of {size(plan.capacity)}"


def _cache(plan: ServingPlan) -> Iterator[str]:
    runner = plan.runner
    yield f"{plan.cache_tokens:,} tokens in {plan.blocks:,} blocks of {runner.block_size}"
    yield f"{size(plan.token_bytes)} a token on each device, in {plan.dtype}"
    if plan.states:
        yield f"{size(plan.state_bytes)} of recurrent states per request on each device"
    if plan.most_tokens is not None:
        rows = plan.most_tokens // plan.context
        yield f"room for {plan.most_tokens:,} tokens: {rows:,} requests of {plan.context:,} (max_rows is {runner.max_rows})"


def _times(plan: ServingPlan) -> Iterator[str]:
    rows = (
        ("TPOT, 1 request", plan.single),
        (f"TPOT, {plan.full.requests} requests", plan.full),
        (f"step with {plan.mixed.prompt:,} prompt tokens", plan.mixed),
    )
    width = max(len(name) for name, _ in rows)
    yield f"{'':{width}} {'least':>9} {'compute':>9} {'memory':>9} {'links':>9}  bound by"
    for name, step in rows:
        line = step.roofline
        parts = f"{seconds(line.compute):>9} {seconds(line.hbm):>9} {seconds(line.links):>9}"
        yield f"{name:{width}} {seconds(line.step):>9} {parts}  {line.bound if line.step is not None else '?'}"
    if plan.full.roofline.step is None:
        yield "this target's peak FLOP/s is unknown"
        return
    yield f"output  {plan.full.requests / plan.full.roofline.step:,.0f} tokens/s, while nothing is prefilled"
    yield f"prefill {plan.mixed.prompt / (plan.mixed.roofline.step or 1):,.0f} tokens/s, together with decoding requests"


def _mesh(plan: ServingPlan) -> Iterator[str]:
    yield ", ".join(f"{a}={n}" for a, n in plan.mesh.items()) or "one device"
    if plan.layers_compiled:
        depths = " and ".join(map(str, plan.layers_compiled))
        yield f"note: compiled with {depths} of {plan.layers} identical layers; temporaries and traffic are extrapolated linearly"
    if caveat := plan.machine.target.stand_in:
        yield f"note: compiled with a stand-in for the program that runs there: {caveat}"
    for note in plan.notes:
        yield f"note: {note}"


def as_json(plan: ServingPlan) -> dict[str, Any]:
    """Return the plan as a JSON object. Bytes are per device."""
    return {
        "name": plan.title,
        "function": "serve",
        "target": plan.machine.name,
        "chips": plan.machine.chips,
        "devices": plan.machine.devices,
        "parameters": plan.parameters,
        "fits": plan.fits,
        "weight_bytes": plan.weights,
        "cache_bytes": plan.cache,
        "table_bytes": plan.tables,
        "working_bytes": plan.working_bytes,
        "hbm_bytes": plan.capacity,
        "cache_dtype": plan.dtype,
        "cache_tokens": plan.cache_tokens,
        "cache_tokens_most": plan.most_tokens,
        "cache_bytes_per_token": plan.token_bytes,
        "state_bytes": plan.states,
        "state_bytes_per_request": plan.state_bytes,
        "context": plan.context,
        "tpot_seconds_alone": plan.single.roofline.step,
        "tpot_seconds_full": plan.full.roofline.step,
        "requests_full": plan.full.requests,
        "steps": {n: _step(s) for n, s in (("alone", plan.single), ("full", plan.full), ("mixed", plan.mixed))},
        "layers": plan.layers,
        "layers_compiled": plan.layers_compiled,
        "kernels": kernels_json(plan.kernels),
        "mesh": plan.mesh,
        "notes": list(plan.notes),
        "compile_seconds": plan.compile_seconds,
    }


def _step(step: StepPlan) -> dict[str, Any]:
    return {
        "requests": step.requests,
        "prompt_tokens": step.prompt,
        "flops": step.flops,
        "hbm_traffic_bytes": step.traffic,
        "temporary_bytes": step.compiled.temporaries,
        "code_bytes": step.compiled.code,
        "link_bytes": step.compiled.links,
        "network_bytes": step.compiled.network,
        "roofline_seconds": {n: getattr(step.roofline, n) for n in ("compute", "hbm", "links", "network", "step")},
        "roofline_bound": step.roofline.bound,
    }
