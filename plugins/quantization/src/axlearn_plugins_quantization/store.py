"""Store the weights of trained runs as integers."""

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
from axlearn_plugins_quantization.feature import weight_only_config
from axlearn_plugins_quantization.weight_only import Storage, WeightOnlyLinear


def quantize_params(params: Mapping[str, Any], functional: Functional) -> dict[str, Any]:
    """Convert a dense model's parameters and variables to those of the same model with weight-only maps.

    Args:
        params: Path -> array of the dense model.
        functional: The model with weight-only maps.

    Raises:
        RequestError: A parameter is missing, so the models differ.
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
        raise RequestError(f"the dense model has different parameters or shapes: {', '.join(wrong[:5])}")
    return {p: params_out[p] for p in expected}


def _quantize_weight(module: WeightOnlyLinear, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    function = module.quantize
    for _ in range(weight.ndim - len(module.cfg.input_dims) - len(module.cfg.output_dims)):
        function = jax.vmap(function)  # over the layers of a stack
    return array_function()(function)(weight.astype(jnp.float32))


def size(params: Mapping[str, Any]) -> int:
    """Return the size of parameters in bytes, with 4-bit integers packed as on accelerators."""
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
    """Write the run `out` with the weights of `run_dir` (a run or its URI) stored as integers.

    Returns:
        Size of the parameters in bytes, before and after.

    Raises:
        RequestError: `run_dir` is not a run, `out` already exists, or `target` does not match any linear map.
    """
    new_directory(out)
    configure_devices(None)
    run = Run(run_dir)
    # Validate the target before reading any weights.
    config: Any = weight_only_config(run.weights(step).experiment, storage, tile_size=tile_size, target=target)
    sizes: list[int] = []

    def quantize(source: RunWeights) -> dict[str, Any]:
        dense = source.read()
        params = quantize_params(dense, Functional.from_config(config.model))
        sizes.extend((size(dense), size(params)))
        return params

    run.derive(out, config, quantize, step=step)
    return sizes[0], sizes[1]
