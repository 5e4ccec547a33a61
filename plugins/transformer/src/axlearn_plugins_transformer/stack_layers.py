"""The layers of a stack.

Each kind of layer has a structure, and arrays stacked along a leading axis.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.nn import randomness, variables
from axlearn_plugins_transformer.alternate import LayerPattern, find_pattern

KindVariables = dict[int, variables.Values]
"""Kind -> variables of its layers, stacked like the state of the kind."""


class MixedLayers(nnx.Module):
    """Layers of several kinds.

    Attribute `0` contains all layers of the first kind, stacked, and attribute `1` all layers of the second kind.

    Attributes:
        kinds: Kind of each layer. A layer's row in its stack is the number of earlier layers of the same kind.
    """

    def __init__(self, stacked: Sequence[Any], kinds: Sequence[int]):
        self.kinds = tuple(kinds)
        for kind, layers in enumerate(stacked):
            setattr(self, str(kind), layers)

    def select_kind(self, kind: int) -> Any:
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
    def from_module(cls, module: Any, num_layers: int | None = None) -> "Layers":
        """Split the module of a stack.

        The module has stacked arrays, or is a `MixedLayers` or a list of separate layers.
        """
        if isinstance(module, nnx.List):
            graphs, states = zip(*map(nnx.split, module), strict=True)
            return cls(tuple(range(len(states))), graphs, states, separate=True)
        if isinstance(module, MixedLayers):
            parts = [nnx.split(module.select_kind(kind)) for kind in range(max(module.kinds) + 1)]
            return cls(module.kinds, tuple(g for g, _ in parts), tuple(s for _, s in parts))
        graph, state = nnx.split(module)
        return cls((0,) * (num_layers or jax.tree.leaves(state)[0].shape[0]), (graph,), (state,))

    def all_variables(self) -> KindVariables:
        """Return all variables of each kind."""
        return {kind: variables.get_values(state) for kind, state in enumerate(self.states)}

    def replace_variables(self, updates: Mapping[int, variables.Values]) -> "Layers":
        """Return the layers with new values for some of their variables."""
        states = [variables.replace_values(state, updates.get(kind, {})) for kind, state in enumerate(self.states)]
        return attrs.evolve(self, states=tuple(states))

    def fold_in(self, index: Any) -> "Layers":
        """Fold `index`, such as a microbatch index, into the keys of the layers' random streams."""
        return attrs.evolve(self, states=tuple(randomness.fold_in(state, index) for state in self.states))

    def group(self, pattern: LayerPattern) -> list["LayerGroup"]:
        """Group the layers by a pattern.

        The groups are the layers before the repeats, the repeats, and the layers after them.
        """
        if self.separate:
            return [LayerGroup(list(enumerate(self.states)))]
        kinds = self.kinds
        middle = pattern.lead + pattern.period * pattern.repeats if pattern.repeats > 1 else pattern.lead
        period = kinds[pattern.lead : pattern.lead + pattern.period]
        leading, repeated, trailing = [], [], []
        for kind, state in enumerate(self.states):
            counts = [
                part.count(kind) for part in (kinds[: pattern.lead], kinds[pattern.lead : middle], kinds[middle:])
            ]
            pieces = [state] * 3 if sum(counts) in counts else split_rows(state, 3, counts)
            repeated.append(_group_layers(pieces[1], pattern.repeats) if counts[1] else None)
            leading.append(iter(split_rows(pieces[0], counts[0]) if counts[0] else ()))
            trailing.append(iter(split_rows(pieces[2], counts[2]) if counts[2] else ()))
        return [
            LayerGroup([(kind, next(leading[kind])) for kind in kinds[: pattern.lead]]),
            LayerGroup(kinds=period, scan_states=repeated if middle > pattern.lead else None),
            LayerGroup([(kind, next(trailing[kind])) for kind in kinds[middle:]]),
        ]


def write_variables(module: Any, values_by_kind: KindVariables) -> None:
    """Write the variables to the module that `Layers.from_module` split."""
    for kind, values in values_by_kind.items():
        if isinstance(module, nnx.List):
            variables.write(module[kind], values)
        else:
            variables.write(module.select_kind(kind) if isinstance(module, MixedLayers) else module, values)


@attrs.frozen(eq=False)
class LayerGroup:
    """Unrolled layers, or repeats of several kinds over stacked arrays.

    Attributes:
        layers: Kind and arrays of each unrolled layer.
        kinds: Kinds of the layers in one repeat.
        scan_states: Arrays of each kind, [repeats, rows, ...].
    """

    layers: Sequence[tuple[int, Any]] = ()
    kinds: Sequence[int] = ()
    scan_states: Any = None

    def rows(self, states: Sequence[Any]) -> list[Iterator[Any]]:
        """Return, for each kind, the arrays of its layers within one repeat."""
        counts = [self.kinds.count(kind) for kind in range(len(states))]
        return [iter([s] if n == 1 else split_rows(s, n)) for s, n in zip(states, counts, strict=True)]


@runtime_checkable
class SelectsLayer(Protocol):
    """Cache slots (`Context.slots`) of layers whose pages are in one array."""

    def select_layer(self, layer: jax.Array, layers: int) -> Any:
        """Return the slots in the pages of a layer.

        Args:
            layer: Index of the layer, int32 [].
            layers: Number of layers. The array has all pages of layer 0, then those of layer 1, and so on.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedCache:
    """The caches of a stack's layers for a scan over the repeats of its pattern (see `LayerPattern`).

    Attributes:
        leading: Cache of each layer before the repeats.
        repeated: For each layer of a repeat, its caches in all repeats, arrays [repeats, P, ...] of P pages per repeat.
        trailing: Cache of each layer after the repeats.
    """

    leading: tuple[Any, ...]
    repeated: tuple[Any, ...]
    trailing: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepeatCache:
    """The caches of a layer in all repeats, of which one repeat is active.

    Attributes:
        pages: Arrays [repeats * P, ...]. They have this shape throughout the scan, because XLA copies arrays that a loop reshapes.
        index: Index of the repeat, int32 [].
        repeats: Number of repeats.
    """

    pages: Any
    index: jax.Array
    repeats: int = dataclasses.field(metadata={"static": True})

    def select(self, slots: Any) -> Any:
        """Return the slots of the repeat in the pages.

        Raises:
            RequestError: The slots are not paged.
        """
        if not isinstance(slots, SelectsLayer):
            raise RequestError(
                f"a scan with caches needs paged slots\n    got: {type(slots).__name__}\n    fix: use separate layers"
            )
        return slots.select_layer(self.index, self.repeats)


def stack_cache_spec(layers: Any, spec: Sequence[Any]) -> StackedCache:
    """Return the entries of a `StackedCache`.

    Args:
        layers: Stacked layers, or a `MixedLayers`.
        spec: The entries of each layer's cache.

    Raises:
        RequestError: Repeated layers do not cache pages of tokens.
    """
    pattern = find_pattern(layers.kinds if isinstance(layers, MixedLayers) else (0,) * len(spec))
    end = pattern.lead + pattern.period * pattern.repeats if pattern.repeats > 1 else pattern.lead
    repeated = tuple(spec[pattern.lead : pattern.lead + pattern.period] if end > pattern.lead else ())
    if not all(jax.tree.leaves(part) for part in repeated) or any(e.per != "page" for e in jax.tree.leaves(repeated)):
        raise RequestError(
            "steps cannot read the stacked weights of this model, because some of its layers do not cache pages of tokens\n"
            "    expected: attention with a cache in every layer of a repeat\n    fix: set runner.layers=separate"
        )
    return StackedCache(
        leading=tuple(spec[: pattern.lead]),
        repeated=jax.tree.map(lambda entry: attrs.evolve(entry, layers=pattern.repeats), repeated),
        trailing=tuple(spec[end:]),
    )


class VariableRecord:
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
            kind_values = [v for k, v in zip(kinds, values, strict=True) if k == kind]
            if kind_values[0]:
                joined = {p: jnp.stack([v[p] for v in kind_values], axis=1) for p in kind_values[0]}
                self.rows.setdefault(kind, []).append({p: x.reshape(-1, *x.shape[2:]) for p, x in joined.items()})

    def collect(self) -> KindVariables:
        """Return the variables, stacked by kind."""
        return {
            kind: rows[0] if len(rows) == 1 else {p: jnp.concatenate([r[p] for r in rows]) for p in rows[0]}
            for kind, rows in self.rows.items()
        }


def split_rows(state: Any, count: int, sizes: Sequence[int] | None = None) -> list[Any]:
    """Split stacked arrays along their first axis.

    The result is `count` single layers, or parts of the given sizes.
    """
    # The gradient of lax.split is one concatenation; the gradient of indexing is a padded sum per layer.
    leaves, tree = jax.tree.flatten(state)
    split = [randomness.split_leading(leaf, tuple(sizes or (1,) * count)) for leaf in leaves]
    return [tree.unflatten([p[i] if sizes else _squeeze(p[i]) for p in split]) for i in range(count)]


def split_inputs(inputs: Mapping[str, jax.Array], num_layers: int) -> Iterator[dict[str, jax.Array]]:
    """Split `Context.layer_inputs`, [B, L, ...] by name, into the inputs of each layer, [B, ...] by name.

    Raises:
        RequestError: An array does not have an input for each layer.
    """
    for name, array in inputs.items():
        if array.ndim < 2 or array.shape[1] != num_layers:
            raise RequestError(
                f"layer_inputs[{name!r}] does not have an input for each layer\n"
                f"    got: {list(array.shape)}\n    expected: [rows, {num_layers}, ...]\n"
                f"    fix: set the number of layers of the batch entry 'layers.{name}' in the input"
            )
    return iter([{name: array[:, layer] for name, array in inputs.items()} for layer in range(num_layers)])


def join_inputs(inputs: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Join the inputs of layers; see `split_inputs`."""
    return {name: jnp.stack([row[name] for row in inputs], axis=1) for name in inputs[0]}


def stack_inputs(inputs: Sequence[dict[str, jax.Array]], repeats: int) -> list[dict[str, jax.Array]]:
    """Stack inputs of `repeats` times n layers for a scan. Return n dicts of arrays [repeats, ...]."""
    count = len(inputs) // repeats
    return [{k: jnp.stack([row[k] for row in inputs[i::count]]) for k in inputs[i]} for i in range(count)]


def _squeeze(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[1:]) if randomness.is_key(array) else jax.lax.squeeze(array, (0,))


def _group_layers(state: Any, repeats: int) -> Any:
    """Reshape [repeats * n, ...] to [repeats, n, ...], or to [repeats, ...] if n is 1."""
    leaves = jax.tree.leaves(state)
    if leaves[0].shape[0] == repeats:
        return state
    return jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), state)
