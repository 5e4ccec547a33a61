"""Tables that map parameters to the tensors of Hugging Face files, and their axes.

Here, parameters include the model's other variables, such as the bias of a sigmoid router.

    Rule("decoder.layer.attention.query.weight", "model.layers.{layer}.self_attn.q_proj.weight", "(n h) d -> d n h")

The left side of the pattern lists the axes in the file, and the right side those of the parameter, without its stacked axis
`layers`. Axes in parentheses are one axis in the file. If the file lacks a leading axis of the parameter (the experts),
that axis is a placeholder in the tensor name. If several parameters are stored as one tensor, the rule names them all,
and a star marks the axis along which they are concatenated: `"d (n* h) -> d n h"` for the fused queries, keys and values of
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
from axlearn_plugins_transformer.stack_layers import MixedLayers

LAYER = "layer"
"""Placeholder of the layer number in tensor names."""


@attrs.frozen
class Axes:
    """A parsed pattern, with the axes of a tensor in the file and of the parameter.

    Attributes:
        theirs: For each axis in the file, the axes that it combines.
        ours: Axes of the parameter that the file has, in the parameter's order.
        indexed: Leading axes of the parameter that are numbers in the tensor name.
        joined: Axis along which several parameters are concatenated, or "".
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    indexed: tuple[str, ...]
    joined: str

    @classmethod
    def parse(cls, pattern: str) -> "Axes":
        """Parse a pattern, such as `"(n h) d -> d n h"`."""
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
            raise ValueError(f"{pattern!r}: both sides must have the same axes, except for leading axes on the right")
        return cls(theirs, ours, indexed, joined[0] if joined else "")

    @property
    def flat(self) -> tuple[str, ...]:
        """Single axes, ordered as in the file."""
        return tuple(a for group in self.theirs for a in group)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape in the file."""
        return tuple(math.prod(sizes[a] for a in group) for group in self.theirs)


@attrs.frozen
class Rule:
    """A rule that maps parameters to a tensor; see the module docstring.

    Attributes:
        ours: Path of a parameter, or paths of several parameters that the file stores as one tensor.
        theirs: Tensor name, with the placeholder `{layer}` for stacked parameters, and with placeholders for indexed axes.
        pattern: Axes. Without a pattern, both sides have the same axes.
    """

    ours: str | tuple[str, ...]
    theirs: str
    pattern: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the parameters."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def rank(self) -> int | None:
        """Rank of the parameters without stacked axes, or None for any. Allows experts and a dense layer at the same path."""
        return len(self.pattern.partition("->")[2].split()) or None

    def axes(self, rank: int) -> Axes:
        """Return the parsed pattern, for parameters of this rank without stacked axes."""
        return _axes(self.pattern or (lambda names: f"{names} -> {names}")(" ".join(f"a{i}" for i in range(rank))))


_axes = functools.cache(Axes.parse)


@attrs.frozen
class Part:
    """The location in a parameter, `parameter[index]`, of a tensor or of one piece of it along the joined axis.

    Attributes:
        path: Path of the parameter.
        index: Leading indices into the parameter.
        sizes: Axis -> size.
        offset: First index of the piece along the joined axis of the tensor.
    """

    path: str
    index: tuple[int, ...]
    sizes: Mapping[str, int]
    offset: int = 0


@attrs.frozen
class Tensor:
    """A tensor in a file, and the parameters that it contains.

    Attributes:
        name: Name in the file.
        shape: Shape in the file.
        axes: Axes in the file and in the parameters.
        parts: Parts in the order in which they are concatenated along the joined axis.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    parts: tuple[Part, ...]


class Layers:
    """Layer numbers of stacked parameters. A stack with several kinds of layers (`alternate`) has one parameter per kind."""

    def __init__(self, model: Functional):
        modules = nnx.iter_modules(model.describe())
        self.kinds = {".".join(map(str, path)): m.kinds for path, m in modules if isinstance(m, MixedLayers)}

    def locate(self, path: str, shape: Sequence[int], axes: Sequence[str | None]) -> tuple[str, list[int] | None]:
        """Return (path in the table, layer number of each row); the numbers are None if the parameter is not stacked."""
        if not axes or axes[0] != "layers":
            return path, None
        for stack, kinds in self.kinds.items():
            if path.startswith(f"{stack}."):
                kind, _, suffix = path.removeprefix(f"{stack}.").partition(".")
                return f"{stack}.{suffix}", [i for i, k in enumerate(kinds) if k == int(kind)]
        return path, list(range(shape[0]))


def layout(model: Functional, rules: Iterable[Rule]) -> dict[str, Tensor]:
    """Return every tensor in a file of this model by name, for parameters and other variables.

    If several rules match a parameter, the last one is used.

    Raises:
        ConfigError: If the table lacks parameters or variables of the model.
    """
    layers, by_path = Layers(model), dict[str, list[Rule]]()
    for rule in rules:
        for path in rule.paths:
            by_path.setdefault(path, []).insert(0, rule)
    parts: dict[str, tuple[Rule, Axes, dict[str, Part]]] = {}
    unmapped = []
    logical = {**model.axes, **model.variable_axes}
    for path, value in {**model.abstract, **model.variables}.items():
        generic, numbers = layers.locate(path, value.shape, logical[path])
        stacked = numbers is not None
        rank = len(value.shape) - stacked
        rule = next((r for r in by_path.get(generic, ()) if r.rank in (None, rank)), None)
        if rule is None:
            unmapped.append((generic, nearest(generic, by_path)))
            continue
        axes = rule.axes(rank)
        sizes = dict(zip((*axes.indexed, *axes.ours), value.shape[stacked:], strict=True))
        for index, names in _indices(numbers, axes, sizes):
            name = rule.theirs.format(**names)
            parts.setdefault(name, (rule, axes, {}))[2][generic] = Part(path, index, sizes)
    if unmapped:
        raise ConfigError(
            Problem(
                path=f"model ({path})",
                message="the Hugging Face format of this family has no counterpart for this tensor",
                nearest=close,
                fix="remove the feature that adds it, or merge it into the weights first (`axlearn lora merge`)",
            )
            for path, close in unmapped[:8]
        )
    return {name: _tensor(name, *rest) for name, rest in parts.items()}


def _indices(
    numbers: list[int] | None, axes: Axes, sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Return (index into the parameter, placeholder values) of each tensor that a parameter consists of."""
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
