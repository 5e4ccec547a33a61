"""The layers of a stack.

Each kind of layer has a structure, and arrays stacked along a leading axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.nn import randomness, variables
from axlearn_plugins_transformer.alternate import Plan

Written = dict[int, variables.Values]
"""Kind -> variables that its layers wrote, stacked like the state of the kind."""


class MixedLayers(nnx.Module):
    """Layers of several kinds.

    Attribute `0` contains all layers of the first kind, stacked, and attribute `1` all layers of the second kind.

    Attributes:
        kinds: Kind of each layer. The layer's row in the stack is the number of earlier layers of that kind.
    """

    def __init__(self, stacked: Sequence[Any], kinds: Sequence[int]):
        self.kinds = tuple(kinds)
        for kind, layers in enumerate(stacked):
            setattr(self, str(kind), layers)

    def of_kind(self, kind: int) -> Any:
        """Return the stacked layers of a kind."""
        return getattr(self, str(kind))


@attrs.frozen(eq=False)
class Layers:
    """Layers, split into structures and arrays.

    Attributes:
        kinds: Index of each layer's structure.
        graphs: Structure of each kind.
        states: Stacked arrays of each kind. For separate layers (`nnx.List`), the arrays of each layer.
        separate: Whether each layer is its own kind and nothing is stacked.
    """

    kinds: tuple[int, ...]
    graphs: tuple[Any, ...]
    states: tuple[Any, ...]
    separate: bool = False

    @classmethod
    def of(cls, module: Any, num_layers: int | None = None) -> "Layers":
        """Split the module of a stack.

        It has stacked arrays, or is a `MixedLayers` or a list of separate layers.
        """
        if isinstance(module, nnx.List):
            graphs, states = zip(*map(nnx.split, module), strict=True)
            return cls(tuple(range(len(states))), graphs, states, separate=True)
        if isinstance(module, MixedLayers):
            parts = [nnx.split(module.of_kind(kind)) for kind in range(max(module.kinds) + 1)]
            return cls(module.kinds, tuple(g for g, _ in parts), tuple(s for _, s in parts))
        graph, state = nnx.split(module)
        return cls((0,) * (num_layers or jax.tree.leaves(state)[0].shape[0]), (graph,), (state,))

    def all_variables(self) -> Written:
        """Return all variables of each kind."""
        return {kind: variables.values_of(state) for kind, state in enumerate(self.states)}

    def replaced(self, written: Mapping[int, variables.Values]) -> "Layers":
        """Return the layers with new values for some of their variables."""
        states = [variables.replaced(state, written.get(kind, {})) for kind, state in enumerate(self.states)]
        return attrs.evolve(self, states=tuple(states))

    def folded(self, index: Any) -> "Layers":
        """Fold `index`, such as a microbatch index, into the keys of the layers' random streams."""
        return attrs.evolve(self, states=tuple(randomness.fold_in(state, index) for state in self.states))

    def runs(self, plan: Plan) -> list["Run"]:
        """Group the layers by a plan.

        The groups are the layers before the repeats, the repeats, and the layers after them.
        """
        if self.separate:
            return [Run(list(enumerate(self.states)))]
        kinds = self.kinds
        middle = plan.lead + plan.period * plan.repeats if plan.repeats > 1 else plan.lead
        period = kinds[plan.lead : plan.lead + plan.period]
        leading, repeated, trailing = [], [], []
        for kind, state in enumerate(self.states):
            counts = [part.count(kind) for part in (kinds[: plan.lead], kinds[plan.lead : middle], kinds[middle:])]
            pieces = [state] * 3 if sum(counts) in counts else rows_of(state, 3, counts)
            repeated.append(_group_layers(pieces[1], plan.repeats) if counts[1] else None)
            leading.append(iter(rows_of(pieces[0], counts[0]) if counts[0] else ()))
            trailing.append(iter(rows_of(pieces[2], counts[2]) if counts[2] else ()))
        return [
            Run([(kind, next(leading[kind])) for kind in kinds[: plan.lead]]),
            Run(kinds=period, scanned=repeated if middle > plan.lead else None),
            Run([(kind, next(trailing[kind])) for kind in kinds[middle:]]),
        ]


def write_variables(module: Any, written: Written) -> None:
    """Write the variables to the module that `Layers.of` split."""
    for kind, values in written.items():
        if isinstance(module, nnx.List):
            variables.write(module[kind], values)
        else:
            variables.write(module.of_kind(kind) if isinstance(module, MixedLayers) else module, values)


@attrs.frozen(eq=False)
class Run:
    """Unrolled layers, or repeats of several kinds over stacked arrays.

    Attributes:
        layers: Kind and arrays of each unrolled layer.
        kinds: Kinds of the layers in one repeat.
        scanned: Arrays of each kind, [repeats, rows, ...].
    """

    layers: Sequence[tuple[int, Any]] = ()
    kinds: Sequence[int] = ()
    scanned: Any = None

    def rows(self, states: Sequence[Any]) -> list[Iterator[Any]]:
        """Return, for each kind, the arrays of its layers within one repeat."""
        counts = [self.kinds.count(kind) for kind in range(len(states))]
        return [iter([s] if n == 1 else rows_of(s, n)) for s, n in zip(states, counts, strict=True)]


class Record:
    """The variables that the layers of a stack wrote, in layer order."""

    def __init__(self, separate: bool):
        self.separate = separate
        self.rows: dict[int, list[variables.Values]] = {}

    def add(self, kind: int, values: variables.Values) -> None:
        """Add the variables of one layer."""
        if values:
            stacked = values if self.separate else {path: value[None] for path, value in values.items()}
            self.rows.setdefault(kind, []).append(stacked)

    def add_repeats(self, kinds: Sequence[int], values: Sequence[variables.Values]) -> None:
        """Add the variables of a scan over repeats: for each of `kinds`, arrays [repeats, ...]."""
        for kind in dict.fromkeys(kinds):
            of_kind = [v for k, v in zip(kinds, values, strict=True) if k == kind]
            if of_kind[0]:
                joined = {p: jnp.stack([v[p] for v in of_kind], axis=1) for p in of_kind[0]}
                self.rows.setdefault(kind, []).append({p: x.reshape(-1, *x.shape[2:]) for p, x in joined.items()})

    def written(self) -> Written:
        """Return the variables, stacked by kind."""
        return {
            kind: rows[0] if len(rows) == 1 else {p: jnp.concatenate([r[p] for r in rows]) for p in rows[0]}
            for kind, rows in self.rows.items()
        }


def rows_of(state: Any, count: int, sizes: Sequence[int] | None = None) -> list[Any]:
    """Split stacked arrays along their first axis.

    Split them into `count` single layers, or into parts of the given sizes.
    """
    # The gradient of lax.split is one concatenation; the gradient of indexing is a padded sum per layer.
    leaves, tree = jax.tree.flatten(state)
    split = [randomness.split_leading(leaf, tuple(sizes or (1,) * count)) for leaf in leaves]
    return [tree.unflatten([p[i] if sizes else _squeeze(p[i]) for p in split]) for i in range(count)]


def _squeeze(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[1:]) if randomness.is_key(array) else jax.lax.squeeze(array, (0,))


def _group_layers(state: Any, repeats: int) -> Any:
    """Reshape [repeats * n, ...] to [repeats, n, ...], or to [repeats, ...] if n is 1."""
    leaves = jax.tree.leaves(state)
    if leaves[0].shape[0] == repeats:
        return state
    return jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), state)
