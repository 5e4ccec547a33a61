"""Equinox modules as layers."""

import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Literal

from axlearn_core.config import node, setting
from axlearn_core.errors import ConfigError, PluginError, Problem
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.randomness import is_key
from axlearn_plugins_models.bridges.wrapper import Path, Structure, WrappedLayer, cast, wrong_module


class Buffer(nnx.Variable):
    """An integer or boolean array in an Equinox module, which is not trained."""


class EquinoxLayer(WrappedLayer):
    """An Equinox module as a layer, for example as a feed-forward layer or a norm.

    - Equinox modules process one example, so the module is vmapped over `vmap_axes` leading axes of the input. Use 2 for a
      module that takes the vector of one position, 1 for one that takes the positions of a row, 0 for one that takes a
      batch.
    - Floating-point arrays are parameters (`nnx.Param` at `module.<path>`). Other arrays are stored unchanged. Parameters
      are cast to the compute dtype when the module is called.
    - `axes` sets the axis names. Parameters without axis names are replicated.
    - A module that draws random numbers (dropout) gets a separate `key` for each example, from a stream of the layer. In
      evaluation it gets no key and runs in inference mode (`eqx.nn.inference_mode`).
    - Modules with `eqx.nn.State` (`eqx.nn.BatchNorm`) are not supported.
    """

    @node
    class Config(WrappedLayer.Config["EquinoxLayer"]):
        """See `WrappedLayer.Config`; `vmap_axes` is the number of leading input axes to vmap the module over."""

        vmap_axes: int = setting(default=2, ge=0)

    library = "Equinox"

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision, **offered: Any):
        super().__init__(cfg, precision=precision)
        eqx = _equinox()
        module = cfg.module.build(rngs=rngs, precision=self.precision, **offered)
        if not isinstance(module, eqx.Module):
            raise wrong_module(module, "Equinox")
        _refuse_state(eqx, module)
        leaves, tree = jax.tree_util.tree_flatten_with_path(module)
        self.paths: tuple[Path | None, ...] = tuple(
            _path(path) if isinstance(leaf, jax.Array | np.ndarray) else None for path, leaf in leaves
        )
        static_leaves = tuple(leaf for (_, leaf), path in zip(leaves, self.paths, strict=True) if path is None)
        self.structure = Structure((tree, static_leaves))
        for (_, leaf), path in zip(leaves, self.paths, strict=True):
            if path is not None:
                self._keep_array(path, jnp.asarray(leaf))
        self.check_axes(path for path in self.paths if path is not None)
        sample = self.sample(offered)
        self.takes_key = "key" in inspect.signature(type(module).__call__).parameters
        self.rngs = rngs.dropout.fork() if self.takes_key and self._draws(sample) else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the module's output in the compute dtype; a feed-forward layer maps [B, S, D] to [B, S, D]."""
        key = self.rngs() if self.rngs is not None and not self.deterministic else None
        module = self._module()
        if self.deterministic:
            module = _equinox().nn.inference_mode(module)
        return self.computes(self._map(module, x, key))

    def _keep_array(self, path: Path, array: jax.Array) -> None:
        if is_key(array):
            raise ConfigError(
                Problem(
                    path=f"module ({'.'.join(path)})",
                    message="the Equinox module contains a random key, which would be the same in every step",
                    fix="accept `key` as an argument of __call__",
                )
            )
        trained = jnp.issubdtype(array.dtype, jnp.inexact)
        self.keep(path, nnx.Param if trained else Buffer, cast(array, self.precision.params), None)

    def _module(self) -> Any:
        tree, static_leaves = self.structure.value
        remaining = iter(static_leaves)
        arrays = [next(remaining) if path is None else self.computes(self.variable(path)[...]) for path in self.paths]
        return jax.tree.unflatten(tree, arrays)

    def _map(self, module: Any, x: jax.Array, key: jax.Array | None) -> Any:
        axes = self.cfg.vmap_axes
        if key is None:
            function = lambda x: module(x, key=None) if self.takes_key else module(x)  # noqa: E731
            arguments: tuple[jax.Array, ...] = (x,)
        else:
            function = lambda x, key: module(x, key=key)  # noqa: E731
            arguments = (x, jax.random.split(key, x.shape[:axes]) if axes else key)
        for _ in range(axes):
            function = jax.vmap(function)
        return function(*arguments)

    def _draws(self, sample: jax.Array) -> bool:
        """Return whether the module's output in training depends on its key."""
        module = self._module()
        traced = jax.make_jaxpr(lambda key: self._map(module, sample, key))(jax.random.key(0)).jaxpr
        relevant = {v for v in traced.outvars if not isinstance(v, Literal)}
        for equation in reversed(traced.eqns):
            if relevant & set(equation.outvars):
                relevant |= {v for v in equation.invars if not isinstance(v, Literal)}
        return traced.invars[0] in relevant


def _equinox() -> ModuleType:
    try:
        import equinox
    except ModuleNotFoundError as error:
        raise PluginError(
            "the component equinox-layer needs equinox, which is not installed\n"
            "    fix: pip install 'axlearn-plugins-models[equinox]'"
        ) from error
    return equinox


def _refuse_state(eqx: ModuleType, module: Any) -> None:
    def is_state(value: Any) -> bool:
        return isinstance(value, eqx.nn.State | eqx.nn.StateIndex)

    stateful = [p for p, x in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_state)[0] if is_state(x)]
    if stateful:
        raise ConfigError(
            Problem(
                path="module",
                message="the Equinox module has state (eqx.nn.State), which equinox-layer does not support",
                got=", ".join(".".join(_path(path)) for path in stateful[:3]),
                fix="use nnx.BatchNorm through configure, or a Linen module through linen-layer",
            )
        )


def _path(path: tuple[Any, ...]) -> Path:
    """Return the parts of a JAX key path: attribute names, indices and mapping keys."""
    parts = []
    for entry in path:
        names = (getattr(entry, name, None) for name in ("name", "idx", "key"))
        parts.append(str(next(n for n in names if n is not None)))
    return tuple(parts)
