"""Parameters of one model carried over to another one, which a feature made of the same config.

What is said here of parameters holds for the models' other variables too, such as running statistics.

What both have is taken over by its name within a layer and the layer's number, regardless of its stack. What the
old model lacks, a feature's bridge makes, or says that it is to be initialised. A feature names its bridge as

    bridge = "axlearn_plugins_moe.upcycle:bridge"        # "module:attribute", loaded when it is needed

and one whose parameters cannot be made of those of other models says why, for the error:

    no_bridge = "keys and values are made of a latent that no projection of the old attention gives"
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.compose.functions import array_function
from axlearn_core.errors import CheckpointError
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.targets import load
from axlearn_plugins_transformer.stacked import MixedLayers

Params = dict[str, Any]


class Made(enum.Enum):
    """What a bridge says of a parameter instead of giving its value."""

    FRESH = "as the model initialises it"
    ZERO = "zero"


FRESH: Literal[Made.FRESH] = Made.FRESH
ZERO: Literal[Made.ZERO] = Made.ZERO


class Bridge(Protocol):
    """Makes what a feature adds to a model."""

    def __call__(
        self,
        path: str,
        shape: Sequence[int],
        axes: Sequence[str | None],
        old: Callable[[str], np.ndarray | None],
    ) -> np.ndarray | Made | None:
        """The value of a parameter of the new model; None where this feature has nothing to do with it.

        Args:
            path: of the parameter; its name within the layer where the stacks of the two models differ.
            shape: of the parameter; in one layer where the stacks differ, else in all of them.
            axes: its logical axes.
            old: name -> the parameter of the old model's same layer, or None where that has none.
        """
        ...


def bridges(features: Iterable[tuple[str, Feature]]) -> tuple[list[Bridge], dict[str, str]]:
    """The bridges of features, and why those that have none cannot have one, by their names."""
    usable, reasons = [], {}
    for name, feature in features:
        if feature.bridge:
            usable.append(load(feature.bridge))
        elif feature.no_bridge:
            reasons[name] = feature.no_bridge
    return usable, reasons


def transfer_params(
    params: Mapping[str, Any],
    source: Functional,
    target: Functional,
    by: Sequence[Bridge] = (),
    *,
    reasons: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Params:
    """The parameters and variables of `target`, made of those of `source`.

    Args:
        params: path -> array, of `source`: its parameters, and its variables.
        source: the old model.
        target: the new one.
        by: the bridges of the features that it has more.
        reasons: why some of those features have no bridge, by name; for the error.
        seed: of what is initialised.

    Returns:
        Path -> array, of `target`.

    Raises:
        CheckpointError: a parameter of `target` comes from nowhere or has another shape in `source`, or one of `source`
            would be lost.
    """
    old, new = _Old(params, _Layers(source)), _Layers(target)
    stacks = sorted({*old.layers.kinds, *new.kinds}, key=len, reverse=True)
    tensors, names = {**target.abstract, **target.variables}, {**target.axes, **target.variable_axes}
    cells: dict[str, list[Any]] = {}
    problems: list[str] = []
    for path, tensor in tensors.items():
        stack, name, layers = new.split(path, stacks)
        shape, axes = (tensor.shape, names[path]) if not stack else (tensor.shape[1:], names[path][1:])
        numbers: Sequence[Any] = range(tensor.shape[0]) if layers is None else layers
        cells[path] = [_value(old, stack, name, i, shape, axes, by) for i in (numbers if stack else (None,))]
        if any(cell is None for cell in cells[path]):
            problems.append(f"missing: {path} {tensor.dtype}{list(tensor.shape)}")
        shapes = {cell.shape for cell in cells[path] if isinstance(cell, np.ndarray)} - {shape}
        problems += [f"differs: {path}: {list(s)} in the old model, expected {list(shape)}" for s in shapes]
    problems += [f"has no place: {path}" for path in params if path not in old.used]
    if problems:
        raise _transfer_error(problems, reasons or {})
    fresh = _fresh(target, [p for p, row_cells in cells.items() if FRESH in map(_marker, row_cells)], seed)

    def whole(path: str, row_cells: list[Any]) -> jax.Array:
        tensor, stacked = tensors[path], new.split(path, stacks)[0]
        rows = [_fill_cell(cell, fresh.get(path), i if stacked else None, tensor) for i, cell in enumerate(row_cells)]
        return jnp.asarray(np.stack(rows) if stacked else rows[0], tensor.dtype)

    return {path: whole(path, row_cells) for path, row_cells in cells.items()}


class _Layers:
    """Where the parameters of each layer of a model lie, whether its layers are of one kind or of several."""

    def __init__(self, model: Functional):
        modules = nnx.iter_modules(model.describe())
        self.kinds = {".".join(map(str, path)): m.kinds for path, m in modules if isinstance(m, MixedLayers)}

    def split(self, path: str, stacks: Sequence[str]) -> tuple[str, str, Sequence[int] | None]:
        """(path of the stack, path within a layer, numbers of the layers, or None for all) of a stacked parameter.

        The first two are ("", path) for a parameter in no stack among `stacks`.
        """
        for stack in stacks:
            if not path.startswith(f"{stack}."):
                continue
            rest = path.removeprefix(f"{stack}.")
            if stack not in self.kinds:
                return stack, rest, None
            kind, _, rest = rest.partition(".")
            return stack, rest, [i for i, k in enumerate(self.kinds[stack]) if k == int(kind)]
        return "", path, None

    def place(self, stack: str, name: str, index: int) -> tuple[str, int]:
        """The path of the parameter `name` of one layer of a stack, and its row there."""
        if stack not in self.kinds:
            return f"{stack}.{name}", index
        kinds = self.kinds[stack]
        return f"{stack}.{kinds[index]}.{name}", kinds[:index].count(kinds[index])


class _Old:
    """The parameters of the old model, and which of them were asked for."""

    def __init__(self, params: Mapping[str, Any], layers: _Layers):
        self.params, self.layers = params, layers
        self.used: set[str] = set()

    def get(self, stack: str, name: str, index: int | None) -> np.ndarray | None:
        """A parameter, or its row for one layer of a stack; None where there is none."""
        path, row = (name, None) if index is None else self.layers.place(stack, name, index)
        self.used.add(path)
        value = self.params.get(path)
        if value is None:
            return None
        value = np.asarray(value)  # on the host: there are many shapes, each used once
        return value if row is None else value[row]


def _value(
    old: _Old, stack: str, name: str, index: int | None, shape: Any, axes: Any, by: Sequence[Bridge]
) -> np.ndarray | Made | None:
    """What a parameter becomes, in one layer where it lies in a stack; None where it comes from nowhere."""
    same = old.get(stack, name, index)
    if same is not None and same.shape == tuple(shape):
        return same
    answers = (b(name, shape, axes, lambda other: old.get(stack, other, index)) for b in by)
    return next((a for a in answers if a is not None), same)


def _marker(cell: Any) -> Any:
    return cell if isinstance(cell, Made) else None


def _fresh(model: Functional, names: Sequence[str], seed: int) -> Params:
    if not names:
        return {}

    def init(key: jax.Array) -> Params:
        params, variables = model.init_arrays(key)
        return {p: x for p, x in {**params, **variables}.items() if p in names}

    values = array_function()(init)(jax.random.key(seed))
    return {p: np.asarray(x) for p, x in values.items()}


def _fill_cell(cell: Any, fresh: Any, row: int | None, tensor: Any) -> np.ndarray:
    if cell is ZERO:
        return np.zeros(tensor.shape if row is None else tensor.shape[1:], tensor.dtype)
    if cell is FRESH:
        return fresh if row is None else fresh[row]
    return cell


def _transfer_error(problems: Sequence[str], reasons: Mapping[str, str]) -> CheckpointError:
    more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
    why = [f"{name}: {reason}" for name, reason in reasons.items()]
    fix = (
        f"leave {' and '.join(reasons)} out, or train that model from the beginning"
        if reasons
        else ("keep what the features do not change as it is: sizes, and which layers there are")
    )
    listed = "\n".join(f"    {p}" for p in [*why, *problems[:12], *more])
    return CheckpointError(f"the parameters cannot be carried over to this model\n{listed}\n    fix: {fix}")
