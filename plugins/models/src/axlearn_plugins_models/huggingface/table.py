"""The table of a family: which parameter is which tensor of a Hugging Face file, and how its axes lie there.

What is said here of parameters holds for the model's other variables too, such as the bias of a sigmoid router.

    Rule("decoder.layer.attention.query.weight", "model.layers.{layer}.self_attn.q_proj.weight", "(n h) d -> d n h")

Left of the arrow are the axes in the file, right of it those of the parameter, without its stacked axis `layers`. Axes in
parentheses are one axis in the file. A leading axis of the parameter that the file does not have (the experts) is a
placeholder in the tensor's name. Where several parameters are one tensor in the file, the rule names them all, and a star
marks the axis along which they follow one another there: `"d (n* h) -> d n h"` for the fused queries, keys and values of
GPT-2.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.errors import ConfigError, Problem, nearest
from axlearn_plugins_transformer.stacked import MixedLayers

LAYER = "layer"
"""The placeholder of the layer's number in names of tensors."""


@attrs.frozen
class Axes:
    """A parsed pattern: the axes of a tensor in the file and of the parameter.

    Attributes:
        theirs: for each axis in the file, the axes that it is made of.
        ours: the axes of the parameter that the file has, in its order.
        indexed: leading axes of the parameter that are numbers in the tensor's name.
        joined: the axis along which several parameters follow one another, or "".
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    indexed: tuple[str, ...]
    joined: str

    @classmethod
    def of(cls, pattern: str) -> "Axes":
        """Parses `"(n h) d -> d n h"`."""
        before, _, right = pattern.partition("->")
        groups = re.findall(r"\(([^)]*)\)|(\S+)", before)
        parts = [tuple((inside or alone).split()) for inside, alone in groups]
        joined = [a.rstrip("*") for group in parts for a in group if a.endswith("*")]
        theirs = tuple(tuple(a.rstrip("*") for a in group) for group in parts)
        axes = {a for group in theirs for a in group}
        names = right.split()
        indexed = tuple(a for a in names if a not in axes)
        ours = tuple(names[len(indexed) :])
        if set(ours) != axes or names[: len(indexed)] != list(indexed) or len(joined) > 1:
            raise ValueError(
                f"{pattern!r}: the axes on both sides have to be the same, but for leading ones on the right"
            )
        return cls(theirs, ours, indexed, joined[0] if joined else "")

    @property
    def flat(self) -> tuple[str, ...]:
        """The single axes in the order of the file."""
        return tuple(a for group in self.theirs for a in group)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in the file."""
        return tuple(math.prod(sizes[a] for a in group) for group in self.theirs)


@attrs.frozen
class Rule:
    """One line of a table; see the top of this file.

    Attributes:
        ours: the path of a parameter, or of several that are one tensor in the file.
        theirs: the tensor's name, with `{layer}` in it where the parameter is one of a stack, and the indexed axes.
        pattern: the axes. Without one they are the same on both sides.
    """

    ours: str | tuple[str, ...]
    theirs: str
    pattern: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def rank(self) -> int | None:
        """Of the parameters without stacked axes; None fits any. So experts and a dense layer can have one path."""
        return len(self.pattern.partition("->")[2].split()) or None

    def axes(self, rank: int) -> Axes:
        """The parsed pattern, for parameters of this rank without stacked axes."""
        return _axes(self.pattern or (lambda names: f"{names} -> {names}")(" ".join(f"a{i}" for i in range(rank))))


_axes = functools.cache(Axes.of)


@attrs.frozen
class Part:
    """Where a tensor of a file, or a piece of it along the joined axis, lies in a parameter: `parameter[index]`."""

    path: str
    index: tuple[int, ...]
    sizes: Mapping[str, int]
    offset: int = 0


@attrs.frozen
class Tensor:
    """One tensor of a file and the parameters that it holds.

    Attributes:
        name: in the file.
        shape: in the file.
        axes: its axes and those of the parameters.
        parts: in the order in which they follow one another along the joined axis.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    parts: tuple[Part, ...]


class Layers:
    """Which layers a stacked parameter holds: all, or those of one kind where `alternate` makes several."""

    def __init__(self, model: Functional):
        modules = nnx.iter_modules(model.describe())
        self.kinds = {".".join(map(str, path)): m.kinds for path, m in modules if isinstance(m, MixedLayers)}

    def of(self, path: str, shape: Sequence[int], axes: Sequence[str | None]) -> tuple[str, list[int] | None]:
        """(the path in the table, the number of the layer in each row), or None for a parameter of no stack."""
        if not axes or axes[0] != "layers":
            return path, None
        for stack, kinds in self.kinds.items():
            if path.startswith(f"{stack}."):
                kind, _, rest = path.removeprefix(f"{stack}.").partition(".")
                return f"{stack}.{rest}", [i for i, k in enumerate(kinds) if k == int(kind)]
        return path, list(range(shape[0]))


def layout(model: Functional, rules: Iterable[Rule]) -> dict[str, Tensor]:
    """Every tensor that a file of this model has, by name: parameters, and the model's other variables.

    Of several rules for a parameter the last one holds.

    Raises:
        ConfigError: parameters or variables of the model that the table does not know.
    """
    layers, by_path = Layers(model), dict[str, list[Rule]]()
    for rule in rules:
        for path in rule.paths:
            by_path.setdefault(path, []).insert(0, rule)
    parts: dict[str, tuple[Rule, Axes, dict[str, Part]]] = {}
    strangers = []
    logical = {**model.axes, **model.variable_axes}
    for path, value in {**model.abstract, **model.variables}.items():
        generic, numbers = layers.of(path, value.shape, logical[path])
        stacked = numbers is not None
        rank = len(value.shape) - stacked
        rule = next((r for r in by_path.get(generic, ()) if r.rank in (None, rank)), None)
        if rule is None:
            strangers.append((generic, nearest(generic, by_path)))
            continue
        axes = rule.axes(rank)
        sizes = dict(zip((*axes.indexed, *axes.ours), value.shape[stacked:], strict=True))
        for index, names in _indices(numbers, axes, sizes):
            name = rule.theirs.format(**names)
            parts.setdefault(name, (rule, axes, {}))[2][generic] = Part(path, index, sizes)
    if strangers:
        raise ConfigError(
            Problem(
                path=f"model ({path})",
                message="this tensor has no counterpart in the Hugging Face format of this family",
                nearest=close,
                fix="leave out the feature that adds it, or merge it into the weights first (`axlearn lora merge`)",
            )
            for path, close in strangers[:8]
        )
    return {name: _tensor(name, *rest) for name, rest in parts.items()}


def _indices(
    numbers: list[int] | None, axes: Axes, sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """(index into the parameter, values of the placeholders) of each tensor that a parameter is made of."""
    rows: list[tuple[tuple[int, ...], dict[str, int]]] = [((), {})]
    if numbers is not None:
        rows = [((row,), {LAYER: layer}) for row, layer in enumerate(numbers)]
    for axis in axes.indexed:
        rows = [((*index, i), {**names, axis: i}) for index, names in rows for i in range(sizes[axis])]
    return iter(rows)


def _tensor(name: str, rule: Rule, axes: Axes, parts: Mapping[str, Part]) -> Tensor:
    ordered, offset = [], 0
    for path in rule.paths:
        if path in parts:
            ordered.append(attrs.evolve(parts[path], offset=offset))
            offset += parts[path].sizes[axes.joined] if axes.joined else 0
    sizes: dict[str, Any] = dict(ordered[0].sizes)
    if axes.joined:
        sizes[axes.joined] = offset
    return Tensor(name, axes.shape(sizes), axes, tuple(ordered))
