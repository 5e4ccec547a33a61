"""Flax Linen modules as layers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import errors, linen, nnx, traverse_util
from flax.core import meta
from flax.core.scope import DenyList

from axlearn_core.config import node
from axlearn_core.contracts.arrays import is_array
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.layer import Precision
from axlearn_plugins_models.bridges.wrapper import Path, Structure, WrappedLayer, cast, wrong_module

IN_TRAINING = ("train", "training", "is_training")
IN_EVALUATION = ("deterministic", "use_running_average")


class LinenLayer(WrappedLayer):
    """A Linen module as a layer, for example as a feed-forward layer or a norm.

    - Parameters are `nnx.Param`s at `module.<path in Linen>`. Axis names come from `nn.with_logical_partitioning` and from
      `axes`. Parameters without axis names are replicated.
    - Other collections (`batch_stats`) are variables, which are written in training and read in evaluation.
    - Random numbers (dropout) come from a stream of the layer, under Linen's stream names. In evaluation, none are drawn.
    - `deterministic`, `use_running_average`, `train`, `training` and `is_training` are passed if the module's `__call__`
      has such an argument.
    - A module with the fields `dtype` and `param_dtype` gets the layer's dtypes in these fields. Parameters of other
      modules are cast. The result is in the compute dtype.
    """

    @node
    class Config(WrappedLayer.Config["LinenLayer"]):
        """See `WrappedLayer.Config`."""

    library = "Linen"

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision, **offered: Any):
        super().__init__(cfg, precision=precision)
        module = cfg.module.build(rngs=rngs, precision=self.precision, **offered)
        if not isinstance(module, linen.Module):
            raise wrong_module(module, "Linen")
        self.structure = Structure(module)
        self.casts = not hasattr(module, "param_dtype")
        sample = self.sample(offered)
        collections = module.init({"params": rngs.params()}, sample, **self._mode(training=False))
        flat = traverse_util.flatten_dict(dict(collections))
        self.paths = tuple((str(key[0]), tuple(map(str, key[1:]))) for key in flat)
        _refuse_sown([key for key, value in flat.items() if not is_array(meta.unbox(value))])
        for (collection, path), boxed in zip(self.paths, flat.values(), strict=True):
            names = boxed.names if isinstance(boxed, meta.Partitioned) else None
            value = meta.unbox(boxed)
            if collection == "params" and self.casts:
                value = cast(value, self.precision.params)
            self.keep(path, nnx.variable_type_from_name(collection, allow_register=True), value, names)
        self.check_axes(path for _, path in self.paths)
        draws = self._try(module, sample)
        self.rngs = rngs.dropout.fork() if draws else None

    def __call__(self, *inputs: jax.Array) -> Any:
        """Return the module's output in the compute dtype; a feed-forward layer maps [B, S, D] to [B, S, D]."""
        module, training = self.structure.value, not self.deterministic
        states = tuple(dict.fromkeys(c for c, _ in self.paths if c != "params")) if training else ()
        rngs = _streams(self.rngs()) if training and self.rngs is not None else {}
        result = module.apply(
            self._collections(), *inputs, rngs=rngs, mutable=list(states) or False, **self._mode(training)
        )
        if states:
            result, written = result
            flat = {tuple(map(str, key)): value for key, value in traverse_util.flatten_dict(dict(written)).items()}
            for collection, path in self.paths:
                if collection in states:
                    self.variable(path)[...] = flat[collection, *path]
        return self.computes(result)

    def _collections(self) -> dict[str, Any]:
        flat = {}
        for collection, path in self.paths:
            value = self.variable(path)[...]
            flat[collection, *path] = self.computes(value) if collection == "params" and self.casts else value
        return traverse_util.unflatten_dict(flat)

    def _mode(self, training: bool) -> dict[str, Any]:
        names = inspect.signature(type(self.structure.value).__call__).parameters
        flags = dict.fromkeys(IN_TRAINING, training) | dict.fromkeys(IN_EVALUATION, not training)
        return {name: value for name, value in flags.items() if name in names}

    def _try(self, module: linen.Module, sample: jax.Array) -> bool:
        """Trace the module in training mode, and return whether it draws random numbers.

        Raises:
            ConfigError: If the module adds to a collection that did not exist after initialization.
        """

        def run(collections: Mapping[str, Any], rngs: Mapping[str, jax.Array]) -> Any:
            options = self._mode(training=True)
            return module.apply(
                collections, sample, rngs=dict(rngs), mutable=DenyList(("params", "intermediates")), **options
            )

        draws, collections = False, self._collections()
        try:
            _, written = jax.eval_shape(run, collections, {})
        except errors.InvalidRngError:
            draws = True
            _, written = jax.eval_shape(run, collections, _streams(jax.random.key(0)))
        paths = {(collection, *path) for collection, path in self.paths}
        _refuse_sown([key for key in traverse_util.flatten_dict(dict(written)) if tuple(map(str, key)) not in paths])
        return draws


def _streams(key: jax.Array) -> dict[str, jax.Array]:
    """Return the RNG streams: Linen uses `params` for missing streams, but some modules check for `dropout`."""
    first, second = jax.random.split(key)
    return {"params": first, "dropout": second}


def _refuse_sown(keys: Sequence[Path]) -> None:
    if keys:
        raise ConfigError(
            Problem(
                path="module",
                message="the Linen module sows values, or creates variables that are not arrays",
                got=", ".join("/".join(map(str, key)) for key in keys[:3]),
                expected="variables that are created when the module is initialized",
                fix="call add_loss or add_summary of axlearn_core.nn.summaries in the module, or sow to `intermediates`",
            )
        )
