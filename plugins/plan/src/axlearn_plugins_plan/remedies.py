"""Suggest changes that make a plan fit, and estimate the memory and the cost of each one."""

import re
from collections.abc import Iterator, Sequence

import attrs

from axlearn_core.errors import RequestError, counted
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_plan.plan import FunctionPlan
from axlearn_plugins_plan.roofline import peak


@attrs.frozen(kw_only=True)
class Remedy:
    """A change that saves memory.

    Attributes:
        words: Options to add to the command line.
        total: Estimated bytes per device after the change.
        seconds: Estimated lower bound on the additional time per step. None if unknown.
        chips: Factor by which the number of chips grows.
        why: How the change saves memory.
    """

    words: str
    total: float
    seconds: float | None
    chips: int
    why: str


def remedies(plan: FunctionPlan, features: frozenset[str], most: int = 3) -> list[Remedy]:
    """Return the cheapest changes that are estimated to make a plan fit, or those that come closest if none suffices.

    Args:
        plan: The plan that does not fit.
        features: Names of the installed features. Remedies that need any other feature are omitted.
        most: Maximum number of remedies.
    """
    if plan.memory.fits or plan.memory.capacity is None:
        return []
    trains = plan.function == "train"
    microbatches = [*_accumulation(plan)] if trains and "gradient-accumulation" in features else []
    recomputes = [*_recompute(plan)] if "remat" in features else []
    offloads = [*_offload(plan)] if "remat" in features else []
    narrows = [*_narrow_frozen(plan)] if "lora" in features else []
    alone = [*_shard_copies(plan), *microbatches, *recomputes, *offloads, *_more_chips(plan)]
    fixes = [*narrows, *alone]
    if not _fit(plan, fixes):
        fixes += [_combine(plan, a, b) for a in microbatches for b in recomputes]
    if not _fit(plan, fixes):
        fixes += [_with_narrow(plan, narrow, fix) for narrow in narrows for fix in fixes if fix is not narrow]
    sufficient = [r for r in fixes if r.total <= plan.memory.capacity]
    sufficient.sort(key=lambda r: (r.chips, r.seconds is None, r.seconds or 0.0))
    insufficient = sorted((r for r in fixes if r not in sufficient), key=lambda r: r.total)
    chosen = [*sufficient, *insufficient][:most]
    # A narrow base costs nothing, so suggest it even if another change is enough.
    return chosen if not narrows or narrows[0] in chosen else [*chosen[: most - 1], *narrows]


def _fit(plan: FunctionPlan, fixes: Sequence[Remedy]) -> bool:
    return any(fix.total <= (plan.memory.capacity or 0) for fix in fixes)


def _with_narrow(plan: FunctionPlan, narrow: Remedy, other: Remedy) -> Remedy:
    """Combine a narrow base with another remedy. The frozen weights are sharded over any additional chips, too."""
    saved = (plan.memory.total - narrow.total) / other.chips
    return attrs.evolve(
        other, words=f"{narrow.words} {other.words}", total=other.total - saved, why=f"{narrow.why}; {other.why}"
    )


def _narrow_frozen(plan: FunctionPlan) -> Iterator[Remedy]:
    """Suggest storing the frozen weights of a model with adapters in bfloat16, if it computes in bfloat16 anyway."""
    if "lora" in plan.features and plan.frozen_bytes and plan.compute_dtype == "bfloat16":
        yield Remedy(
            words="--with lora:base_dtype=bfloat16",
            total=plan.memory.total - plan.frozen_bytes // 2,
            seconds=0.0,
            chips=1,
            why="stores the frozen weights in the dtype that the model computes in, which gives the same losses",
        )


def _accumulation(plan: FunctionPlan) -> Iterator[Remedy]:
    """Suggest more microbatches. They shrink the temporaries but need a buffer for the summed gradients."""
    if (measured := _measured_accumulation(plan)) is not None:
        yield measured
        return
    steps, best = plan.accumulate_steps, None
    rows = plan.rows // steps // plan.batch_shards
    factor = 2 * _buffered_microbatches(plan)
    while rows >= factor and rows % factor == 0:
        total = plan.memory.total - plan.memory.temporaries * (1 - 1 / factor) + plan.gradient_bytes
        best = _microbatches(plan, steps * factor, total)
        if plan.memory.capacity is not None and total <= plan.memory.capacity:
            break
        factor *= 2
    if best is not None:
        yield best


def _measured_accumulation(plan: FunctionPlan) -> Remedy | None:
    """Suggest microbatches as large as the largest compiled batch that fits. Returns None if there is no such batch."""
    largest, capacity = plan.largest_batch, plan.memory.capacity or 0
    if largest is None or largest.rows is None or largest.bytes is None or largest.rows >= plan.rows:
        return None
    measured = largest.rows // plan.accumulate_steps
    temporaries = largest.bytes - plan.memory.arguments
    buffered = _buffered_microbatches(plan)
    for rows in range(measured, 0, -1):
        total = plan.memory.arguments + temporaries * buffered * rows / measured + plan.gradient_bytes
        if plan.rows % rows == 0 and rows % plan.batch_shards == 0 and total <= capacity:
            return _microbatches(plan, plan.rows // rows, total)
    return None


def _buffered_microbatches(plan: FunctionPlan) -> int:
    """Return how many microbatches are in memory at once, in units of the plan's microbatches.

    Double buffering unrolls the loop over microbatches by two. Without microbatches, the plan has no such loop yet.
    """
    doubled = plan.compiler_options.get("xla_gpu_enable_while_loop_double_buffering")
    return 2 if plan.accumulate_steps == 1 and doubled else 1


def _microbatches(plan: FunctionPlan, steps: int, total: float) -> Remedy:
    return Remedy(
        words=f"--with gradient-accumulation:steps={steps}",
        total=total,
        seconds=_links(plan) * (steps // plan.accumulate_steps - 1),
        chips=1,
        why=f"keeps the batch, but computes it in {steps:,} microbatches of {counted(plan.rows // steps, 'row')}"
        + (", which gathers weights more often" if _links(plan) else ""),
    )


def _combine(plan: FunctionPlan, microbatches: Remedy, recompute: Remedy) -> Remedy:
    """Combine two remedies. Each activation that is no longer saved belonged to one microbatch."""
    share = (microbatches.total - plan.memory.arguments) / max(plan.memory.temporaries, 1)
    costs = [r.seconds for r in (microbatches, recompute)]
    return Remedy(
        words=f"{microbatches.words} {recompute.words}",
        total=microbatches.total - (plan.memory.total - recompute.total) * min(1.0, max(0.0, share)),
        seconds=None if None in costs else sum(c for c in costs if c is not None),
        chips=1,
        why="combines both",
    )


def _links(plan: FunctionPlan) -> float:
    times = [t for t in (plan.roofline.links, plan.roofline.network) if t is not None]
    return max(times, default=0.0)


def _recompute(plan: FunctionPlan) -> Iterator[Remedy]:
    """Suggest saving fewer tags. Drop the tags that free the most memory per recomputed FLOP first."""
    candidates = [t for t in plan.tags if t.kept in ("saved", "free")]
    if not candidates:
        return
    if any(t.kept == "free" for t in candidates):  # the model has no policy, so suggest the policy that saves nothing
        yield _drop_tags(plan, candidates, [], "--with remat:policy=full")
        return
    order = sorted(candidates, key=lambda t: t.flops / max(t.bytes, 1.0))
    for count in range(1, len(order) + 1):
        dropped, saved = order[:count], [t.name for t in candidates if t not in order[:count]]
        remedy = _drop_tags(plan, dropped, saved, f"--with remat:save=[{','.join(saved)}]")
        if remedy.total <= (plan.memory.capacity or 0) or count == len(order):
            yield remedy
            return


def _drop_tags(plan: FunctionPlan, dropped: list, saved: list[str], words: str) -> Remedy:
    flops = sum(t.flops for t in dropped)
    best = peak(plan.machine.target, "bfloat16")
    return Remedy(
        words=words,
        total=plan.memory.total - sum(t.bytes for t in dropped),
        seconds=flops / best if best else None,
        chips=1,
        why=f"recomputes {', '.join(t.name for t in dropped)}" + ("" if saved else "; saves only the inputs of layers"),
    )


def _offload(plan: FunctionPlan) -> Iterator[Remedy]:
    """Suggest offloading saved tags to host memory, largest first."""
    candidates = [t for t in plan.tags if t.kept == "saved"]
    if not candidates or plan.machine.target.platform == "cpu":
        return
    order = sorted(candidates, key=lambda t: -t.bytes)
    offloaded: list = []
    for tag in order:
        offloaded.append(tag)
        if plan.memory.total - sum(t.bytes for t in offloaded) <= (plan.memory.capacity or 0):
            break
    saved = ",".join(t.name for t in candidates if t not in offloaded)
    yield Remedy(
        words=f"--with 'remat:save=[{saved}],offload=[{','.join(t.name for t in offloaded)}]'",
        total=plan.memory.total - sum(t.bytes for t in offloaded),
        seconds=None,
        chips=1,
        why=f"offloads {', '.join(t.name for t in offloaded)} to host memory",
    )


def _shard_copies(plan: FunctionPlan) -> Iterator[Remedy]:
    """Suggest FSDP in place of the `data` axis, which replicates the state."""
    copies = plan.mesh.get("data", 1)
    if copies == 1 or plan.machine.domains > 1:
        return
    shape = {a: n for a, n in plan.mesh.items() if a not in ("data", "fsdp")} | {"fsdp": -1}
    text = ", ".join(f"{a}: {n}" for a, n in shape.items())
    saved = (plan.memory.arguments + plan.gradient_bytes) * (1 - 1 / copies)
    yield Remedy(
        words=f"--set 'mesh.shape={{{text}}}'",
        total=plan.memory.total - saved,
        seconds=0.0,
        chips=1,
        why="shards parameters and optimizer state over the devices that hold copies",
    )


def _more_chips(plan: FunctionPlan) -> Iterator[Remedy]:
    """Suggest a larger machine with the same target, which shards the state and the rows further."""
    name, target = plan.machine.name, plan.machine.target
    size = re.fullmatch(r"(.*?)(\d+)", name) if target.size == "hosts" else re.fullmatch(r"(.*?-)(\d+)(x\d+)?", name)
    if not size or target.platform == "cpu":  # virtual CPU devices share one memory
        return
    factor, best = 1, None
    while factor < 64:
        factor *= 2
        if plan.rows // plan.accumulate_steps % (plan.machine.devices * factor // _model_parallel(plan)):
            break
        bigger = f"{size[1]}{int(size[2]) * factor}{(size[3] or '') if target.size != 'hosts' else ''}"
        try:
            machine = find_machine(bigger)
        except RequestError:
            break
        best = Remedy(
            words=f"--target {machine.name}",
            total=plan.memory.code + (plan.memory.arguments + plan.memory.temporaries) / factor,
            seconds=0.0,
            chips=factor,
            why="shards state and rows over more chips",
        )
        if best.total <= (plan.memory.capacity or 0):
            break
    if best is not None:
        yield best


def _model_parallel(plan: FunctionPlan) -> int:
    size = 1
    for axis in ("pipeline", "seq", "tensor"):
        size *= plan.mesh.get(axis, 1)
    return size
