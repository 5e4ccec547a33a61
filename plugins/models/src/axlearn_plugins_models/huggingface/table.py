"""Tables that map parameters to the tensors of Hugging Face files, and their axes.

Here, parameters include the model's other variables, such as the bias of a sigmoid router.

    Rule("decoder.layer.attention.query.weight", "model.layers.{layer}.self_attn.q_proj.weight", "(n h) d -> d n h")

The left side of the pattern lists the axes in the file, and the right side those of the parameter, without its stacked axis
`layers`. Axes in parentheses are one axis. An axis `1` has one entry, and the parameter does not have it. If the file lacks a
leading axis of the parameter (the experts), that axis is a placeholder in the tensor name.

If several parameters are stored as one tensor, the rule names them all, and a star marks the axis along which they are
concatenated: `"d (n* h) -> d n h"` for the fused queries, keys and values of GPT-2. A star after a parenthesis marks several
axes, whose sizes may differ between the parameters. If the parameters do not have the marked axis, they alternate along it:
`"e d (f part*) -> e d f"` for the interleaved gates and inputs of gpt-oss. Parameters with different axes have a pattern each.
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
JOINED = "*"
"""Name of the axis in a file along which parameters are concatenated."""
Groups = tuple[tuple[str, ...], ...]


@attrs.frozen
class Axes:
    """A parsed pattern, with the axes of a tensor in the file and of the parameter.

    Attributes:
        theirs: For each axis in the file, the axes that it combines.
        ours: For each axis of the parameter that the file has, the axes that it combines.
        indexed: Leading axes of the parameter that are numbers in the tensor name.
        joined: Adjacent axes in the file along which several parameters are concatenated.
    """

    theirs: Groups
    ours: Groups
    indexed: tuple[str, ...]
    joined: tuple[str, ...]

    @classmethod
    def parse(cls, pattern: str) -> "Axes":
        """Parse a pattern, such as `"(n h) d -> d n h"`."""
        before, _, after = pattern.partition("->")
        (theirs, stars), (names, no_stars) = _parse_side(before), _parse_side(after)
        left, right = _flatten(theirs), _flatten(names)
        indexed = tuple(a for a in right if a not in left)
        joined = stars[0] if stars else ()
        if (
            any({"(", ")"} & {*a} for a in (*left, *right))
            or len({*left}) < len(left)
            or len({*right}) < len(right)
            or names[: len(indexed)] != tuple((a,) for a in indexed)
            or {*left} - {*right} not in (set(), {*joined})
            or len(stars) > 1
            or no_stars
        ):
            raise ValueError(
                f"{pattern!r}: both sides must have the same axes, except for leading axes on the right, and for the axis with "
                "the only star on the left"
            )
        return cls(theirs, names[len(indexed) :], indexed, joined)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """For each single axis of the parameter, its position among those in the file."""
        ours = _flatten(self.ours)
        flat = [a for a in _flatten(self.theirs) if a in ours]
        return tuple(flat.index(a) for a in ours)

    @functools.cached_property
    def outer(self) -> Groups:
        """Axes in the file, with the joined axes as one axis `JOINED`."""
        first, others = self.joined[:1], self.joined[1:]
        return tuple(tuple(JOINED if a in first else a for a in group if a not in others) for group in self.theirs)


def _parse_side(text: str) -> tuple[Groups, list[tuple[str, ...]]]:
    """Return the axes of one side of a pattern in groups, and the axes of each star. An unmatched parenthesis is an axis."""
    groups: list[list[str]] = []
    stars: list[tuple[str, ...]] = []
    opened: list[int] = []
    for token in re.findall(r"\(|\)\*?|[^\s()]+", text):
        if token[0] == ")" and opened:
            begin = opened.pop()
            stars += [tuple(groups[-1][begin:])] if token == ")*" else []
            continue
        if not opened:
            groups.append([])
        if token == "(":
            opened.append(len(groups[-1]))
        elif token != "1":
            groups[-1].append(token.rstrip("*"))
            stars += [(groups[-1][-1],)] if token.endswith("*") else []
    return (*map(tuple, groups), *(("(",) for _ in opened)), stars


def _flatten(groups: Groups) -> tuple[str, ...]:
    return tuple(a for group in groups for a in group)


@attrs.frozen
class Rule:
    """A rule that maps parameters to a tensor; see the module docstring.

    Attributes:
        ours: Path of a parameter, or paths of several parameters that the file stores as one tensor.
        theirs: Tensor name, with the placeholder `{layer}` for stacked parameters, and with placeholders for indexed axes.
        pattern: Axes, or the axes of each parameter. Without a pattern, both sides have the same axes.
        within: Class of layers that the rule applies to, such as `GatedDeltaNet`. None applies to all layers.
        sizes: Size of an axis, or the key of `config.json` that states it. Only axes in parentheses on the right need it, if
            no other axis of the rule's parameters determines it.
    """

    ours: str | tuple[str, ...]
    theirs: str
    pattern: str | tuple[str, ...] = ""
    within: type | None = attrs.field(default=None, kw_only=True)
    sizes: Mapping[str, int | str] = attrs.field(factory=dict, kw_only=True, hash=False)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the parameters."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def axes(self, path: str, rank: int) -> Axes | None:
        """Return the axes of a parameter without its stacked axis, or None if the rule is for another rank.

        The rank tells experts from a dense layer at the same path.
        """
        pattern = self.pattern if isinstance(self.pattern, str) else self.pattern[self.paths.index(path)]
        axes = _axes(pattern or (lambda names: f"{names} -> {names}")(" ".join(f"a{i}" for i in range(rank))))
        return axes if len(axes.indexed) + len(axes.ours) == rank else None


_axes = functools.cache(Axes.parse)


@attrs.frozen
class Part:
    """The location in a parameter, `parameter[index]`, of a tensor or of one piece of it along the joined axis.

    Attributes:
        path: Path of the parameter.
        index: Leading indices into the parameter.
        axes: Axes in the file and in the parameter.
        sizes: Axis -> size.
        offset: First index of the piece along the joined axis of the tensor.
    """

    path: str
    index: tuple[int, ...]
    axes: Axes
    sizes: Mapping[str, int]
    offset: int = 0

    @property
    def length(self) -> int:
        """Size of the piece along the joined axis."""
        return self.product(self.axes.joined)

    def product(self, names: Iterable[str]) -> int:
        """Return the product of the sizes of axes."""
        return math.prod(self.sizes[a] for a in names)


@attrs.frozen
class Tensor:
    """A tensor in a file, and the parameters that it contains.

    Attributes:
        name: Name in the file.
        shape: Shape in the file.
        parts: Parts in the order in which they are concatenated along the joined axis.
        rule: Rule of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rule: Rule

    @property
    def length(self) -> int:
        """Size of the joined axis."""
        return self.parts[-1].offset + self.parts[-1].length


class Layers:
    """Layer numbers of stacked parameters. A stack with several kinds of layers (`alternate`) has one parameter per kind."""

    def __init__(self, model: Functional):
        self.modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model.describe())}
        self.kinds = {path: m.kinds for path, m in self.modules.items() if isinstance(m, MixedLayers)}

    def locate(self, path: str, shape: Sequence[int], axes: Sequence[str | None]) -> tuple[str, list[int] | None]:
        """Return (path in the table, layer number of each row); the numbers are None if the parameter is not stacked."""
        if not axes or axes[0] != "layers":
            return path, None
        for stack, kinds in self.kinds.items():
            if path.startswith(f"{stack}."):
                kind, _, suffix = path.removeprefix(f"{stack}.").partition(".")
                return f"{stack}.{suffix}", [i for i, k in enumerate(kinds) if k == int(kind)]
        return path, list(range(shape[0]))

    def is_within(self, path: str, cls: type | None) -> bool:
        """Return whether a parameter belongs to a module of the class, or to a module below one."""
        ends = [i for i, character in enumerate(path) if character == "."]
        return cls is None or any(isinstance(self.modules.get(path[:end]), cls) for end in ends)


def layout(model: Functional, rules: Iterable[Rule], config_json: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return every tensor in a file of this model by name, for parameters and other variables.

    If several rules match a parameter, the last one is used.

    Args:
        model: The model.
        rules: Table.
        config_json: `config.json`, for rules with `sizes`.

    Raises:
        ConfigError: If the table lacks parameters or variables of the model, or a pattern does not fit its parameters.
    """
    layers, by_path = Layers(model), dict[str, list[Rule]]()
    for rule in rules:
        for path in rule.paths:
            by_path.setdefault(path, []).insert(0, rule)
    pieces: dict[str, tuple[Rule, dict[str, _Piece]]] = {}
    unmapped = []
    logical = {**model.axes, **model.variable_axes}
    for path, value in {**model.abstract, **model.variables}.items():
        generic, numbers = layers.locate(path, value.shape, logical[path])
        shape = tuple(value.shape[1:] if numbers is not None else value.shape)
        candidates = (
            (r, r.axes(generic, len(shape))) for r in by_path.get(generic, ()) if layers.is_within(path, r.within)
        )
        rule, axes = next(((r, a) for r, a in candidates if a is not None), (None, None))
        if rule is None or axes is None:
            unmapped.append(_unmapped(path, shape, generic, by_path))
            continue
        for index, names in _indices(numbers, axes, shape):
            piece = _Piece(path, index, axes, shape[len(axes.indexed) :])
            pieces.setdefault(rule.theirs.format(**names), (rule, {}))[1][generic] = piece
    if unmapped:
        raise ConfigError(unmapped[:8])
    return {name: _tensor(name, rule, parts, config_json or {}) for name, (rule, parts) in pieces.items()}


@attrs.frozen
class _Piece:
    """A `Part` before its sizes are known. `shape` is the shape of `parameter[index]`."""

    path: str
    index: tuple[int, ...]
    axes: Axes
    shape: tuple[int, ...]


def _unmapped(path: str, shape: tuple[int, ...], generic: str, by_path: Mapping[str, list[Rule]]) -> Problem:
    """Return the problem of a parameter without a rule."""
    rules = by_path.get(generic, ())
    kinds = [f"{r.pattern or 'any axes'}{f' within {r.within.__name__}' if r.within else ''}" for r in rules]
    return Problem(
        path=f"model ({path})",
        message="the Hugging Face format of this family has no counterpart for this tensor",
        got=f"shape {list(shape)} in a layer" if kinds else None,
        expected=f"the axes and the layers of a rule for {generic}: {'; '.join(kinds)}" if kinds else None,
        nearest=() if kinds else nearest(generic, by_path),
        fix="remove the feature that adds it, or merge it into the weights first (`axlearn lora merge`)",
    )


def _indices(
    numbers: list[int] | None, axes: Axes, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Return (index into the parameter, placeholder values) of each tensor that a parameter consists of."""
    rows: list[tuple[tuple[int, ...], dict[str, int]]] = [((), {})]
    if numbers is not None:
        rows = [((row,), {LAYER: layer}) for row, layer in enumerate(numbers)]
    for axis, size in zip(axes.indexed, shape, strict=False):
        rows = [((*index, i), {**names, axis: i}) for index, names in rows for i in range(size)]
    return iter(rows)


def _tensor(name: str, rule: Rule, pieces: Mapping[str, _Piece], config_json: Mapping[str, Any]) -> Tensor:
    """Return a tensor, with the sizes of all its axes.

    Raises:
        ConfigError: If the sizes of the parameters contradict each other or the pattern.
    """
    ordered = [pieces[path] for path in rule.paths if path in pieces]
    if len(ordered) < len(pieces):
        raise _misfit(name, rule, [*pieces.values()], {})  # another rule maps a parameter to it
    shared = {axis: _size(size, name, config_json) for axis, size in rule.sizes.items()}
    for piece in ordered:
        for group, size in zip(piece.axes.ours, piece.shape, strict=True):
            if len(group) == 1 and group[0] not in piece.axes.joined:
                shared.setdefault(group[0], size)
    parts: list[Part] = []
    offset, outer = 0, ordered[0].axes.outer
    for piece in ordered:
        sizes = _sizes(piece, shared)
        if sizes is None or piece.axes.outer != outer or (len(ordered) > 1 and not piece.axes.joined):
            raise _misfit(name, rule, ordered, shared)
        parts.append(Part(piece.path, piece.index, piece.axes, sizes, offset))
        offset += parts[-1].length
    totals = {**parts[0].sizes, JOINED: offset}
    return Tensor(name, tuple(math.prod(totals[a] for a in group) for group in outer), tuple(parts), rule)


def _size(size: int | str, name: str, config_json: Mapping[str, Any]) -> int:
    value = config_json.get(size) if isinstance(size, str) else size
    if type(value) is not int or value < 1:
        raise ConfigError(
            Problem(
                path=f"config.json: {size}",
                message=f"the layout of {name} needs this size",
                got="nothing" if value is None else repr(value)[:80],
                expected="a positive integer",
                nearest=nearest(str(size), config_json),
                fix="use the config.json that belongs to the weights",
            )
        )
    return value


def _sizes(piece: _Piece, shared: Mapping[str, int]) -> dict[str, int] | None:
    """Return the size of each single axis, or None if the sizes do not fit. Each group may have one unknown axis."""
    sizes = {a: shared[a] for group in piece.axes.theirs for a in group if a in shared}
    ours = {a for group in piece.axes.ours for a in group}
    sizes |= {a: 1 for a in piece.axes.joined if a not in ours}
    for group, size in zip(piece.axes.ours, piece.shape, strict=True):
        unknown = [a for a in group if a not in sizes]
        product = math.prod(sizes[a] for a in group if a in sizes)
        if len(unknown) > 1 or size % product or (not unknown and size != product):
            return None
        sizes |= dict.fromkeys(unknown, size // product)
    return sizes


def _misfit(name: str, rule: Rule, pieces: Sequence[_Piece], shared: Mapping[str, int]) -> ConfigError:
    """Return the error for parameters that do not fit the pattern of their tensor."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in shared.items())
    return ConfigError(
        Problem(
            path=f"model ({', '.join(p.path for p in pieces)})",
            message=f"the shapes do not fit the pattern of the tensor {name}",
            got=", ".join(str(list(p.shape)) for p in pieces),
            expected=f"{rule.pattern!r}" + (f" with {sizes}" if sizes else ""),
            fix="correct the pattern of the rule, or set `sizes` for axes that no parameter has by themselves",
        )
    )
