"""What to change where a step does not fit, estimated from its plan."""

import re
from collections.abc import Iterator

import attrs

from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_plan.plan import Plan
from axlearn_plugins_plan.roofline import peak


@attrs.frozen(kw_only=True)
class Remedy:
    """One change.

    Attributes:
        words: to add to the command line.
        total: the bytes of one device with it, estimated.
        seconds: what it adds to a step at the least, estimated; None where nothing says.
        chips: how many times as many chips it takes.
        why: what it does.
    """

    words: str
    total: float
    seconds: float | None
    chips: int
    why: str


def remedies(plan: Plan, features: frozenset[str], most: int = 3) -> list[Remedy]:
    """The cheapest changes that make a plan fit by estimate; where none does, those that come closest.

    Args:
        plan: one that does not fit.
        features: the names of what is installed; a remedy that needs another one is left out.
        most: how many.
    """
    if plan.memory.fits or plan.memory.capacity is None:
        return []
    trains = plan.function == "train"
    microbatches = [*_accumulation(plan)] if trains and "gradient-accumulation" in features else []
    fewer = [*_recompute(plan)] if "remat" in features else []
    offloaded = [*_offload(plan)] if "remat" in features else []
    both = [_combine(plan, a, b) for a in microbatches for b in fewer]
    fixes = [*_other_mesh(plan), *microbatches, *fewer, *offloaded, *_more_chips(plan)]
    if not any(r.total <= plan.memory.capacity for r in fixes):
        fixes += both
    fits = [r for r in fixes if r.total <= plan.memory.capacity]
    fits.sort(key=lambda r: (r.chips, r.seconds is None, r.seconds or 0.0))
    rest = sorted((r for r in fixes if r not in fits), key=lambda r: r.total)
    return [*fits, *rest][:most]


def _accumulation(plan: Plan) -> Iterator[Remedy]:
    """Microbatches: temporaries shrink with them, and one more sum of gradients is held."""
    shards = 1
    for axis in ("data", "fsdp", "expert"):
        shards *= plan.mesh.get(axis, 1)
    steps, best = plan.accumulate_steps, None
    rows = plan.rows // steps // shards
    # Where the compiler takes two turns of a loop at a time, one of two turns is none, and both need their room.
    doubled = plan.compiler_options.get("xla_gpu_enable_while_loop_double_buffering")
    factor = 4 if steps == 1 and doubled else 2
    while rows >= factor and rows % factor == 0:
        total = plan.memory.total - plan.memory.temporaries * (1 - 1 / factor) + plan.gradient_bytes
        best = Remedy(
            words=f"--with gradient-accumulation:steps={steps * factor}",
            total=total,
            seconds=_links(plan) * (factor - 1),
            chips=1,
            why=f"{factor} times as many microbatches: activations of fewer rows, weights gathered once for each",
        )
        if plan.memory.capacity is not None and total <= plan.memory.capacity:
            break
        factor *= 2
    if best is not None:
        yield best


def _combine(plan: Plan, microbatches: Remedy, fewer: Remedy) -> Remedy:
    """Both: what is no longer kept was that of one microbatch."""
    share = (microbatches.total - plan.memory.arguments) / max(plan.memory.temporaries, 1)
    costs = [r.seconds for r in (microbatches, fewer)]
    return Remedy(
        words=f"{microbatches.words} {fewer.words}",
        total=microbatches.total - (plan.memory.total - fewer.total) * min(1.0, max(0.0, share)),
        seconds=None if None in costs else sum(c for c in costs if c is not None),
        chips=1,
        why="both",
    )


def _links(plan: Plan) -> float:
    times = [t for t in (plan.roofline.links, plan.roofline.network) if t is not None]
    return max(times, default=0.0)


def _recompute(plan: Plan) -> Iterator[Remedy]:
    """Keep fewer tags, those first that give back most memory for each FLOP."""
    candidates = [t for t in plan.tags if t.kept in ("saved", "free")]
    if not candidates:
        return
    if any(t.kept == "free" for t in candidates):  # no policy at all: then one that keeps nothing
        yield _drop_tags(plan, candidates, [], "--with remat:policy=full")
        return
    order = sorted(candidates, key=lambda t: t.flops / max(t.bytes, 1.0))
    for count in range(1, len(order) + 1):
        gone, rest = order[:count], [t.name for t in candidates if t not in order[:count]]
        remedy = _drop_tags(plan, gone, rest, f"--with remat:save=[{','.join(rest)}]")
        if remedy.total <= (plan.memory.capacity or 0) or count == len(order):
            yield remedy
            return


def _drop_tags(plan: Plan, gone: list, rest: list[str], words: str) -> Remedy:
    flops = sum(t.flops for t in gone)
    best = peak(plan.machine.target, "bfloat16")
    return Remedy(
        words=words,
        total=plan.memory.total - sum(t.bytes for t in gone),
        seconds=flops / best if best else None,
        chips=1,
        why=f"computes {', '.join(t.name for t in gone)} again" + ("" if rest else "; keeps the inputs of layers only"),
    )


def _offload(plan: Plan) -> Iterator[Remedy]:
    """Keep what is kept in the host's memory."""
    candidates = [t for t in plan.tags if t.kept == "saved"]
    if not candidates or plan.machine.target.platform == "cpu":
        return
    order = sorted(candidates, key=lambda t: -t.bytes)
    gone: list = []
    for tag in order:
        gone.append(tag)
        if plan.memory.total - sum(t.bytes for t in gone) <= (plan.memory.capacity or 0):
            break
    rest = ",".join(t.name for t in candidates if t not in gone)
    yield Remedy(
        words=f"--with 'remat:save=[{rest}],offload=[{','.join(t.name for t in gone)}]'",
        total=plan.memory.total - sum(t.bytes for t in gone),
        seconds=None,
        chips=1,
        why=f"keeps {', '.join(t.name for t in gone)} in the host's memory",
    )


def _other_mesh(plan: Plan) -> Iterator[Remedy]:
    """Shard the state over more devices, where some hold copies of it."""
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
        why="splits parameters and optimizer state over the devices that hold copies of them",
    )


def _more_chips(plan: Plan) -> Iterator[Remedy]:
    """The same on more of it: state and rows are split further."""
    name, target = plan.machine.name, plan.machine.target
    size = re.fullmatch(r"(.*?)(\d+)", name) if target.size == "hosts" else re.fullmatch(r"(.*?-)(\d+)(x\d+)?", name)
    if not size or target.platform == "cpu":  # more virtual devices are no more memory
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
            why="splits state and rows over more chips",
        )
        if best.total <= (plan.memory.capacity or 0):
            break
    if best is not None:
        yield best


def _model_parallel(plan: Plan) -> int:
    size = 1
    for axis in ("pipeline", "seq", "tensor"):
        size *= plan.mesh.get(axis, 1)
    return size
