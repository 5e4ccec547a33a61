"""Sparse upcycling (Komatsuzaki et al., 2022): a trained dense model becomes the start of a mixture of experts.

Every expert starts as a copy of the feed-forward layer that it comes from. Where the weights of a token's experts sum
to 1, the new model computes what the old one did, until training makes the experts differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError
from axlearn_core.nn.stack import MixedLayers

Params = dict[str, Any]

FRESH = ("router", "shared")
"""Parts of a mixture of experts that no dense layer has."""


class _Layout:
    """Where the parameters of each layer of a model lie, whether its layers are of one kind or of several."""

    def __init__(self, model: Functional):
        modules = nnx.iter_modules(model.bind(model.abstract))
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


class _Source:
    """The parameters of the old model, and which of them were asked for."""

    def __init__(self, params: Mapping[str, Any], layout: _Layout):
        self.params, self.layout = params, layout
        self.used: set[str] = set()

    def whole(self, path: str) -> Any:
        """A parameter, or None."""
        self.used.add(path)
        found = self.params.get(path)
        return None if found is None else np.asarray(found)  # on the host: there are many shapes, each used once

    def row(self, stack: str, name: str, index: int) -> Any:
        """The parameter `name` of one layer of a stack; None where the layer has none."""
        path, row = self.layout.place(stack, name, index)
        found = self.whole(path)
        return None if found is None else found[row]


def upcycle(params: Mapping[str, Any], source: Functional, target: Functional, *, seed: int = 0) -> Params:
    """The parameters of `target`, made of those of a dense model that is equal to it but for its experts.

    Routers are initialised from `seed`. Shared experts too, but their last matrix is zero, so that at first they add
    nothing.

    Args:
        params: path -> array, of `source`.
        source: the dense model; layers that have experts already keep them.
        target: the model with experts.
        seed: of what is initialised.

    Returns:
        Path -> array, of `target`.

    Raises:
        CheckpointError: a parameter of `target` comes from nowhere or has another shape in `source`, or one of `source`
            would be lost.
    """
    old, new = _Source(params, _Layout(source)), _Layout(target)
    stacks = sorted({*old.layout.kinds, *new.kinds}, key=len, reverse=True)
    fresh = _fresh(target, seed)
    problems: list[str] = []
    made = {}
    for path, wanted in target.abstract.items():
        value = _value(old, new, target, path, stacks)
        if value is None and path in fresh:
            value = np.zeros_like(fresh[path]) if path.endswith("shared.down.weight") else fresh[path]
        if value is None:
            problems.append(f"missing: {path} {wanted.dtype}{list(wanted.shape)}")
        elif value.shape != wanted.shape:
            problems.append(f"differs: {path}: {list(value.shape)} in the old model, expected {list(wanted.shape)}")
        else:
            made[path] = jnp.asarray(value, wanted.dtype)
    problems += [f"has no place: {path}" for path in params if path not in old.used]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        raise CheckpointError(
            "the experts cannot be made of this model\n"
            + "\n".join(f"    {p}" for p in [*problems[:12], *more])
            + "\n    fix: keep the hidden size and the gate of its feed-forward layers, and all else as it is"
        )
    return made


def _fresh(model: Functional, seed: int) -> Params:
    """The initial values of what no dense layer has."""
    names = [p for p in model.abstract if set(FRESH) & set(p.split("."))]
    made = (
        jax.jit(lambda key: {p: x for p, x in model.init(key).items() if p in names})(jax.random.key(seed))
        if names
        else {}
    )
    return {p: np.asarray(x) for p, x in made.items()}


def _value(old: _Source, new: _Layout, target: Functional, path: str, stacks: Sequence[str]) -> Any:
    """What a parameter of `target` becomes; None where the old model has nothing for it."""
    axes, shape = target.axes[path], target.abstract[path].shape
    copies = shape[axes.index("experts")] if "experts" in axes else None
    stack, name, layers = new.split(path, stacks)
    if stack:
        rows = range(shape[0]) if layers is None else layers
        parts = [_copied(old.row(stack, name, i), len(shape) - 1, copies, 0) for i in rows]
        return None if any(p is None for p in parts) else np.stack(parts)
    return _copied(old.whole(path), len(shape), copies, axes.index("experts") if copies is not None else 0)


def _copied(found: Any, rank: int, copies: int | None, axis: int) -> Any:
    """The parameter as it is in the old model, or a copy for each expert where it is that of a dense layer."""
    if found is None or copies is None or found.ndim == rank:
        return found
    return np.repeat(np.expand_dims(found, axis), copies, axis=axis)
