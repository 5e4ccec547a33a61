"""Trained runs with their weights stored as integers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.compose.devices import configure_devices
from axlearn_core.compose.functions import array_function
from axlearn_core.errors import RequestError
from axlearn_core.run import Run, RunWeights
from axlearn_core.run.derive import new_directory
from axlearn_plugins_quantization.feature import stored
from axlearn_plugins_quantization.weight_only import Storage, WeightOnlyLinear


def store(params: Mapping[str, Any], functional: Functional) -> dict[str, Any]:
    """The parameters and variables of a dense model as `functional`, the same model with stored weights, has them.

    Raises:
        RequestError: a parameter is missing, so it is not the same model.
    """
    model = functional.describe()
    expected = {**functional.abstract, **functional.variables}
    params_out = {p: params[p] for p in expected if p in params}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, WeightOnlyLinear):
            name = ".".join(map(str, path))
            if f"{name}.weight" not in params:
                raise RequestError(f"{name}: the dense model has no parameter {name}.weight")
            params_out[f"{name}.weight"], params_out[f"{name}.weight_scale"] = _quantize_weight(
                module, params[f"{name}.weight"]
            )
    wrong = [p for p, s in expected.items() if p not in params_out or params_out[p].shape != s.shape]
    if wrong:
        raise RequestError(f"the dense model is of another shape: {', '.join(wrong[:5])}")
    return {p: params_out[p] for p in expected}


def _quantize_weight(module: WeightOnlyLinear, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    function = module.quantized
    for _ in range(weight.ndim - len(module.cfg.input_dims) - len(module.cfg.output_dims)):
        function = jax.vmap(function)  # over the layers of a stack
    return array_function()(function)(weight.astype(jnp.float32))


def size(params: Mapping[str, Any]) -> int:
    """Bytes that parameters take where integers of four bits are packed, as accelerators do."""
    return sum(x.size * jnp.iinfo(x.dtype).bits // 8 if x.dtype == jnp.int4 else x.nbytes for x in params.values())


def quantize_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    storage: Storage,
    tile_size: int | None = None,
    target: str = "model.**",
    step: int | None = None,
) -> tuple[int, int]:
    """Writes the run `out`, whose model has the weights of `run_dir` (a run, or the URI of one) stored as integers.

    Returns:
        The bytes of its parameters before and after.

    Raises:
        RequestError: `run_dir` is not a run, `out` is taken, or nothing fits `target`.
    """
    new_directory(out)
    configure_devices(None)
    run = Run(run_dir)
    # Before anything is read.
    config: Any = stored(run.weights(step).experiment, storage, tile_size=tile_size, target=target)
    sizes: list[int] = []

    def quantize(source: RunWeights) -> dict[str, Any]:
        dense = source.read()
        params = store(dense, Functional.of(config.model))
        sizes.extend((size(dense), size(params)))
        return params

    run.derive(out, config, quantize, step=step)
    return sizes[0], sizes[1]
