"""Estimate the memory and recomputation cost of each activation tag."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import jax
from jax.extend.core import Literal

from axlearn_core.compose import Program
from axlearn_core.compose.flops import called
from axlearn_core.nn.sharding import Placement
from axlearn_plugins_plan.flops import Scope, ScopedSelection, works

_HEADS = ("batch", "sequence", "activation_heads", None)
_KEYS = ("batch", "sequence", "activation_kv", None)
_WIDTH = ("batch", "sequence", "activation_embed")
_HIDDEN = ("batch", "sequence", "activation_mlp")
# The tags that `axlearn_core.nn.remat` describes. Other tags are sharded like the constraint next to the tag. Without a
# constraint, they are assumed to be sharded over the batch and the sequence.
_AXES: Mapping[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("query", "context"), _HEADS),
    **dict.fromkeys(("key", "value"), _KEYS),
    **dict.fromkeys(("attention_out", "mlp_out"), _WIDTH),
    **dict.fromkeys(("mlp_gate", "mlp_up", "mlp_hidden"), _HIDDEN),
}


@attrs.frozen(kw_only=True)
class Tag:
    """An activation tag, with its figures summed across all layers that have it.

    Attributes:
        kept: What the enclosing policy does with the activation: `saved`, `offloaded` or `recomputed`. `free` if there is no
            policy, in which case all values that the backward pass needs are saved.
        bytes: Bytes per device to save the activation.
        flops: FLOPs per device to recompute the activation from the layer's input and the preceding tags.
    """

    name: str
    kept: str
    bytes: float
    flops: float


def tags(program: Program, batch: Mapping[str, Any]) -> list[Tag]:
    """Return a model's activation tags, in forward-pass order."""
    mesh, rules = program.layout.mesh, program.layout.rules
    selection = ScopedSelection(platform=program.platform, target=program.selection("train").target)
    with program.tracing("train", selection):
        jaxpr = jax.make_jaxpr(program.function("loss").call)(program.trained.specs, dict(batch)).jaxpr
    placement = Placement(mesh, rules)
    by_name: dict[str, Tag] = {}
    for tag in _tags(jaxpr, selection.scopes, placement, 1.0, None, False):
        before = by_name.get(tag.name)
        by_name[tag.name] = (
            attrs.evolve(tag, bytes=tag.bytes + before.bytes, flops=tag.flops + before.flops) if before else tag
        )
    return list(by_name.values())


def _tags(
    jaxpr: Any, scopes: Sequence[Scope], placement: Placement, times: float, policy: Any, local: bool
) -> Iterator[Tag]:
    producers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "name":
            yield Tag(
                name=params["name"],
                kept=_fate(equation, policy),
                bytes=times * _device_bytes(jaxpr, producers, equation, placement, local),
                flops=times * _slice_flops(producers, scopes, equation) / (1 if local else placement.mesh.size),
            )
            continue
        more = times * params["length"] if name == "scan" else times
        inner_policy = params["policy"] or _save_nothing if name in ("checkpoint", "remat2", "remat") else policy
        for inner in _jaxprs(params):
            yield from _tags(inner, scopes, placement, more, inner_policy, local or name == "shard_map")


def _jaxprs(params: Mapping[str, Any]) -> list[Any]:
    if "branches" in params:
        return [params["branches"][-1].jaxpr]
    inner = params["body_jaxpr"].jaxpr if "body_jaxpr" in params else called(params)
    return [] if inner is None else [inner]


def _save_nothing(*_: Any, **__: Any) -> bool:
    """Save nothing, as `jax.checkpoint` does without a policy."""
    return False


def _fate(equation: Any, policy: Any) -> str:
    if policy is None:
        return "free"
    answer = policy(equation.primitive, *(v.aval for v in equation.invars), **equation.params)
    if isinstance(answer, bool):
        return "saved" if answer else "recomputed"
    kind = type(answer).__name__.lower() + str(answer).lower()
    return "offloaded" if "offload" in kind else "recomputed" if "recompute" in kind else "saved"


def _device_bytes(jaxpr: Any, producers: Mapping[Any, Any], equation: Any, placement: Placement, local: bool) -> float:
    aval = equation.outvars[0].aval
    size = aval.size * aval.dtype.itemsize
    if local:
        return size
    operand = equation.invars[0]
    neighbours = [producers.get(operand)] if not isinstance(operand, Literal) else []  # a literal has no producer
    neighbours += [e for e in jaxpr.eqns if e.invars and e.invars[0] is equation.outvars[0]]
    for neighbour in neighbours:
        if neighbour is not None and neighbour.primitive.name == "sharding_constraint":
            shard = neighbour.params["sharding"].shard_shape(aval.shape)
            break
    else:
        axes = _AXES.get(equation.params["name"], ("batch", "sequence"))
        axes = axes if len(axes) == aval.ndim else ("batch", "sequence")
        axes = (*axes, *(None,) * aval.ndim)[: aval.ndim]
        spec = placement.spec(aval.shape, axes)
        shard = jax.sharding.NamedSharding(placement.mesh, spec).shard_shape(aval.shape)
    for dim, shard_dim in zip(aval.shape, shard, strict=True):
        size = size * shard_dim / max(dim, 1)
    return size


def _slice_flops(producers: Mapping[Any, Any], scopes: Sequence[Scope], equation: Any) -> float:
    """Return the FLOPs of the equations that compute a tag from the preceding tags and the arguments."""
    pending, visited, total = list(equation.invars), set(), 0.0
    while pending:
        var = pending.pop()
        producer = producers.get(var) if not isinstance(var, Literal) else None  # a literal has no producer
        if producer is None or producer.primitive.name == "name" or id(producer) in visited:
            continue
        visited.add(id(producer))
        total += sum(w.flops for w in works(SimpleNamespace(eqns=[producer], outvars=producer.outvars), scopes))
        pending += producer.invars
    return total
