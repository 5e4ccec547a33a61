"""Transfer a model's parameters to a second model, which a feature built from the same config.

Everything here also applies to the models' other variables, such as running statistics.

Parameters that both models have are matched by layer number and by name within the layer, even if the layer is in a different
stack. For parameters that the old model lacks, a feature's bridge computes the value or asks for initialization. A feature
declares its bridge as

    bridge = "axlearn_plugins_moe.upcycle:bridge"        # "module:attribute", loaded when needed

If a feature's parameters cannot be computed from other models, it declares the reason for the error message:

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
from axlearn_plugins_transformer.stack_layers import MixedLayers

Params = dict[str, Any]


class Fill(enum.Enum):
    """A marker that a bridge returns instead of a parameter's value."""

    FRESH = "as the model initializes it"
    ZERO = "zero"


FRESH: Literal[Fill.FRESH] = Fill.FRESH
ZERO: Literal[Fill.ZERO] = Fill.ZERO


class Bridge(Protocol):
    """A function that computes the parameters that a feature adds to a model."""

    def __call__(
        self,
        path: str,
        shape: Sequence[int],
        axes: Sequence[str | None],
        old: Callable[[str], np.ndarray | None],
    ) -> np.ndarray | Fill | None:
        """Return the value of a parameter in the new model, or None if the feature does not add this parameter.

        Args:
            path: Path of the parameter, or its name within the layer if the parameter is in a stack of mixed layers.
            shape: Shape of the parameter. For a parameter in such a stack, the shape in one layer.
            axes: Logical axes of the parameter.
            old: Function from a name to the parameter of the same layer in the old model, or None if there is none.
        """
        ...


def load_bridges(features: Iterable[tuple[str, Feature]]) -> tuple[list[Bridge], dict[str, str]]:
    """Return the features' bridges, and a mapping from feature name to reason for features that cannot have one."""
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
    bridges: Sequence[Bridge] = (),
    *,
    reasons: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Params:
    """Compute the parameters and variables of `target` from those of `source`.

    Args:
        params: Path -> array, for the parameters and variables of `source`.
        source: The old model.
        target: The new model.
        bridges: Bridges of the additional features of `target`.
        reasons: Feature name -> reason why the feature has no bridge, for the error message.
        seed: Seed for initialized parameters.

    Returns:
        Path -> array, for the parameters and variables of `target`.

    Raises:
        CheckpointError: A parameter of `target` has no source or has a different shape in `source`, or a parameter of `source`
            would be lost.
    """
    old, new = _SourceParams(params, _LayerPaths(source)), _LayerPaths(target)
    stacks = sorted({*old.layers.kinds, *new.kinds}, key=len, reverse=True)
    tensors, names = {**target.abstract, **target.variables}, {**target.axes, **target.variable_axes}
    cells: dict[str, list[Any]] = {}
    problems: list[str] = []
    for path, tensor in tensors.items():
        stack, name, layers = new.split(path, stacks)
        shape, axes = (tensor.shape, names[path]) if not stack else (tensor.shape[1:], names[path][1:])
        numbers: Sequence[Any] = range(tensor.shape[0]) if layers is None else layers
        cells[path] = [_value(old, stack, name, i, shape, axes, bridges) for i in (numbers if stack else (None,))]
        if any(cell is None for cell in cells[path]):
            problems.append(f"missing: {path} {tensor.dtype}{list(tensor.shape)}")
        shapes = {cell.shape for cell in cells[path] if isinstance(cell, np.ndarray)} - {shape}
        problems += [f"differs: {path}: {list(s)} in the old model, expected {list(shape)}" for s in shapes]
    problems += [f"not in the new model: {path}" for path in params if path not in old.used]
    if problems:
        raise _transfer_error(problems, reasons or {})
    fresh = _init_arrays(target, [p for p, row_cells in cells.items() if FRESH in map(_marker, row_cells)], seed)

    def assemble(path: str, row_cells: list[Any]) -> jax.Array:
        tensor, stacked = tensors[path], new.split(path, stacks)[0]
        rows = [_fill_cell(cell, fresh.get(path), i if stacked else None, tensor) for i, cell in enumerate(row_cells)]
        return jnp.asarray(np.stack(rows) if stacked else rows[0], tensor.dtype)

    return {path: assemble(path, row_cells) for path, row_cells in cells.items()}


class _LayerPaths:
    """The parameter paths of each layer in a model. A stack may have several kinds of layers."""

    def __init__(self, model: Functional):
        modules = nnx.iter_modules(model.describe())
        self.kinds = {".".join(map(str, path)): m.kinds for path, m in modules if isinstance(m, MixedLayers)}

    def split(self, path: str, stacks: Sequence[str]) -> tuple[str, str, Sequence[int] | None]:
        """Split the path of a stacked parameter.

        Returns:
            (path of the stack, path within a layer, numbers of the layers or None for all). For a parameter outside of `stacks`,
            the first two are ("", path).
        """
        for stack in stacks:
            if not path.startswith(f"{stack}."):
                continue
            name = path.removeprefix(f"{stack}.")
            if stack not in self.kinds:
                return stack, name, None
            kind, _, name = name.partition(".")
            return stack, name, [i for i, k in enumerate(self.kinds[stack]) if k == int(kind)]
        return "", path, None

    def place(self, stack: str, name: str, index: int) -> tuple[str, int]:
        """Return where layer `index` of a stack keeps the parameter `name`: the path and row of the stacked array."""
        if stack not in self.kinds:
            return f"{stack}.{name}", index
        kinds = self.kinds[stack]
        return f"{stack}.{kinds[index]}.{name}", kinds[:index].count(kinds[index])


class _SourceParams:
    """The parameters of the old model, and the paths that were read."""

    def __init__(self, params: Mapping[str, Any], layers: _LayerPaths):
        self.params, self.layers = params, layers
        self.used: set[str] = set()

    def get(self, stack: str, name: str, index: int | None) -> np.ndarray | None:
        """Return a parameter, or its row for one layer of a stack. Return None if the model does not have it."""
        path, row = (name, None) if index is None else self.layers.place(stack, name, index)
        self.used.add(path)
        value = self.params.get(path)
        if value is None:
            return None
        value = np.asarray(
            value
        )  # slice on the host, because a device would compile a program for each of the many shapes
        return value if row is None else value[row]


def _value(
    old: _SourceParams, stack: str, name: str, index: int | None, shape: Any, axes: Any, bridges: Sequence[Bridge]
) -> np.ndarray | Fill | None:
    """Return the new value of a parameter, for one layer if it is stacked. Return None if it has no source."""
    same = old.get(stack, name, index)
    if same is not None and same.shape == tuple(shape):
        return same
    answers = (b(name, shape, axes, lambda other: old.get(stack, other, index)) for b in bridges)
    return next((a for a in answers if a is not None), same)


def _marker(cell: Any) -> Any:
    return cell if isinstance(cell, Fill) else None


def _init_arrays(model: Functional, names: Sequence[str], seed: int) -> Params:
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
        f"remove {' and '.join(reasons)}, or train the new model from scratch"
        if reasons
        else ("keep the sizes and layers that the features do not change")
    )
    listed = "\n".join(f"    {p}" for p in [*why, *problems[:12], *more])
    return CheckpointError(f"the parameters cannot be transferred to this model\n{listed}\n    fix: {fix}")
