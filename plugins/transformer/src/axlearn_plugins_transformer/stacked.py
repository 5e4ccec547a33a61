"""Layers as a stack holds them: the structure of each kind of layer, and its arrays stacked along a leading axis."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.nn import randomness, variables
from axlearn_plugins_transformer.alternate import Plan

Written = dict[int, variables.Values]
"""Kind -> the variables that its layers wrote, stacked as the kind's state is."""


class MixedLayers(nnx.Module):
    """Layers of several kinds: the attribute `0` holds all layers of the kind that comes first, stacked, and so on.

    Attributes:
        kinds: of each layer, which attribute holds it; its row there is the number of layers of that kind before it.
    """

    def __init__(self, stacked: Sequence[Any], kinds: Sequence[int]):
        self.kinds = tuple(kinds)
        for kind, layers in enumerate(stacked):
            setattr(self, str(kind), layers)

    def of_kind(self, kind: int) -> Any:
        """The stacked layers of a kind."""
        return getattr(self, str(kind))


@attrs.frozen(eq=False)
class Layers:
    """Layers taken apart.

    Attributes:
        kinds: of each layer, the index of its structure.
        graphs: the structure of each kind.
        states: the arrays of each kind, stacked; of separate layers (`nnx.List`) those of one layer each.
        separate: whether each layer is a kind of its own, and nothing is stacked.
    """

    kinds: tuple[int, ...]
    graphs: tuple[Any, ...]
    states: tuple[Any, ...]
    separate: bool = False

    @classmethod
    def of(cls, module: Any, num_layers: int | None = None) -> "Layers":
        """Of what a stack made: one module with stacked arrays, `MixedLayers`, or a list of separate layers."""
        if isinstance(module, nnx.List):
            graphs, states = zip(*map(nnx.split, module), strict=True)
            return cls(tuple(range(len(states))), graphs, states, separate=True)
        if isinstance(module, MixedLayers):
            parts = [nnx.split(module.of_kind(kind)) for kind in range(max(module.kinds) + 1)]
            return cls(module.kinds, tuple(g for g, _ in parts), tuple(s for _, s in parts))
        graph, state = nnx.split(module)
        return cls((0,) * (num_layers or jax.tree.leaves(state)[0].shape[0]), (graph,), (state,))

    def all_variables(self) -> Written:
        """All variables of each kind."""
        return {kind: variables.values_of(state) for kind, state in enumerate(self.states)}

    def replaced(self, written: Mapping[int, variables.Values]) -> "Layers":
        """The same layers with other values in some of their variables."""
        states = [variables.replaced(state, written.get(kind, {})) for kind, state in enumerate(self.states)]
        return attrs.evolve(self, states=tuple(states))

    def folded(self, index: Any) -> "Layers":
        """The same layers with `index`, such as that of a microbatch, folded into the keys of their random streams."""
        return attrs.evolve(self, states=tuple(randomness.fold_in(state, index) for state in self.states))

    def runs(self, plan: Plan) -> list["Run"]:
        """The layers as a plan takes them: those before the repeats, the repeats, those after."""
        if self.separate:
            return [Run(list(enumerate(self.states)))]
        kinds = self.kinds
        middle = plan.lead + plan.period * plan.repeats if plan.repeats > 1 else plan.lead
        period = kinds[plan.lead : plan.lead + plan.period]
        before, repeated, after = [], [], []
        for kind, state in enumerate(self.states):
            counts = [part.count(kind) for part in (kinds[: plan.lead], kinds[plan.lead : middle], kinds[middle:])]
            pieces = [state] * 3 if sum(counts) in counts else rows_of(state, 3, counts)
            repeated.append(_group_layers(pieces[1], plan.repeats) if counts[1] else None)
            before.append(iter(rows_of(pieces[0], counts[0]) if counts[0] else ()))
            after.append(iter(rows_of(pieces[2], counts[2]) if counts[2] else ()))
        return [
            Run([(kind, next(before[kind])) for kind in kinds[: plan.lead]]),
            Run(kinds=period, scanned=repeated if middle > plan.lead else None),
            Run([(kind, next(after[kind])) for kind in kinds[middle:]]),
        ]


def write_variables(module: Any, written: Written) -> None:
    """Puts what layers wrote into the module that `Layers.of` took apart."""
    for kind, values in written.items():
        if isinstance(module, nnx.List):
            variables.write(module[kind], values)
        else:
            variables.write(module.of_kind(kind) if isinstance(module, MixedLayers) else module, values)


@attrs.frozen(eq=False)
class Run:
    """Some of the layers: unrolled ones, or repeats of the `kinds` over what each kind has, [repeats, rows, ...]."""

    layers: Sequence[tuple[int, Any]] = ()
    kinds: Sequence[int] = ()
    scanned: Any = None

    def rows(self, states: Sequence[Any]) -> list[Iterator[Any]]:
        """Of each kind, the arrays of its layers within one repeat."""
        counts = [self.kinds.count(kind) for kind in range(len(states))]
        return [iter([s] if n == 1 else rows_of(s, n)) for s, n in zip(states, counts, strict=True)]


class Record:
    """What the layers of a stack wrote, in the order of the layers."""

    def __init__(self, separate: bool):
        self.separate = separate
        self.rows: dict[int, list[variables.Values]] = {}

    def add(self, kind: int, values: variables.Values) -> None:
        """Of one layer."""
        if values:
            stacked = values if self.separate else {path: value[None] for path, value in values.items()}
            self.rows.setdefault(kind, []).append(stacked)

    def add_repeats(self, kinds: Sequence[int], values: Sequence[variables.Values]) -> None:
        """Of a scan over repeats of these kinds: of each of them, [repeats, ...]."""
        for kind in dict.fromkeys(kinds):
            of_kind = [v for k, v in zip(kinds, values, strict=True) if k == kind]
            if of_kind[0]:
                joined = {p: jnp.stack([v[p] for v in of_kind], axis=1) for p in of_kind[0]}
                self.rows.setdefault(kind, []).append({p: x.reshape(-1, *x.shape[2:]) for p, x in joined.items()})

    def written(self) -> Written:
        """Stacked as the kinds are."""
        return {
            kind: rows[0] if len(rows) == 1 else {p: jnp.concatenate([r[p] for r in rows]) for p in rows[0]}
            for kind, rows in self.rows.items()
        }


def rows_of(state: Any, count: int, sizes: Sequence[int] | None = None) -> list[Any]:
    """Stacked arrays cut along their first axis: into `count` single layers, or parts of these sizes."""
    # lax.split and not indexing: its gradient is one concatenation instead of a padded sum per layer.
    leaves, tree = jax.tree.flatten(state)
    split = [randomness.split_leading(leaf, tuple(sizes or (1,) * count)) for leaf in leaves]
    return [tree.unflatten([p[i] if sizes else _squeeze(p[i]) for p in split]) for i in range(count)]


def _squeeze(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[1:]) if randomness.is_key(array) else jax.lax.squeeze(array, (0,))


def _group_layers(state: Any, repeats: int) -> Any:
    """[repeats * n, ...] -> [repeats, n, ...], or [repeats, ...] where n is 1."""
    leaves = jax.tree.leaves(state)
    if leaves[0].shape[0] == repeats:
        return state
    return jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), state)
