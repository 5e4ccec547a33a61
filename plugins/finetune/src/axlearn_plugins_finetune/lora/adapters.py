"""Merge adapters into weights, unmerge them, and read and write them as separate files.

Parameters are flat dicts keyed by dotted path (`decoder.layer.attention.query.lora_a`). `scales` maps the path of each adapted map
(`decoder.layer.attention.query`) to alpha / rank. `scales_of(model)` returns it.

Exported adapters consist of two files:

    adapters.safetensors    lora_a and lora_b of each adapted map, and the model's variables that are not parameters, with their
                            values after training (`variables.<path>`)
    adapters.json           the scales, a hash of the base weights from training, and the run with these weights
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from axlearn_core.compose.functions import array_function
from axlearn_core.errors import CheckpointError, RequestError, WorkError, nearest
from axlearn_plugins_finetune.lora.lora_linear import ADAPTERS, is_adapted

Params = Mapping[str, Any]
WEIGHTS, FACTS = "adapters.safetensors", "adapters.json"
VARIABLES = "variables."
"""Prefix of a variable's path in the file."""
_FORMAT = 1


def is_adapter(path: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return path.rpartition(".")[2] in ADAPTERS


def scales_of(model: Any) -> dict[str, float]:
    """Return path -> alpha / rank of each adapted map in a module, which may be abstract."""
    modules: Any = nnx.iter_modules(model)
    return {".".join(map(str, path)): m.lora_scale for path, m in modules if is_adapted(m)}


def split(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split parameters into (parameters of the base, parameters of the adapters)."""
    base = {p: x for p, x in params.items() if not is_adapter(p)}
    return base, {p: x for p, x in params.items() if is_adapter(p)}


def merge(params: Params, scales: Mapping[str, float]) -> dict[str, Any]:
    """Merge adapters into the parameters of an equivalent dense model: W + alpha / rank * A B.

    The sum is computed in float32 and rounded once to the dtype of W.

    Raises:
        RequestError: An adapted map has no parameter `weight` with the shape of A B, or an adapter has no scale.
    """
    return _add_adapters(params, scales, 1.0)


def unmerge(params: Params, adapters: Params, scales: Mapping[str, float]) -> dict[str, Any]:
    """Invert `merge`, up to rounding: subtract the adapters from merged weights, and return both."""
    result = _add_adapters({**params, **adapters}, scales, -1.0)
    return {**result, **adapters}


def _add_adapters(params: Params, scales: Mapping[str, float], sign: float) -> dict[str, Any]:
    merged, adapters = split(params)
    paths = {p.rpartition(".")[0] for p in adapters}
    if paths != set(scales):
        odd = sorted(paths ^ set(scales))
        raise RequestError(f"adapters and scales belong to different maps\n    got: {', '.join(odd[:5])}")
    for path, scale in scales.items():
        name, a, b = f"{path}.weight", adapters[f"{path}.lora_a"], adapters[f"{path}.lora_b"]
        weight = merged.get(name)
        if weight is None or not jnp.issubdtype(weight.dtype, jnp.floating):
            raise RequestError(
                f"{path}: the adapted map has no floating-point parameter `weight` to merge into\n"
                "    fix: merge before the weights are quantized"
            )
        _check_shape(path, weight, a, b)
        merged[name] = add_adapter(weight, a, b, sign * scale)
    return merged


@array_function()
def add_adapter(weight: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array | float) -> jax.Array:
    """Return weight + scale * A B, summed in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    stacked = tuple(range(_num_layer_axes(weight, a, b)))
    contracted = (a.ndim - 1,), (len(stacked),)
    product = lax.dot_general(a, b, (contracted, (stacked, stacked)), precision=lax.Precision.HIGHEST)
    return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)


def _num_layer_axes(weight: Any, a: Any, b: Any) -> int:
    """Return the number of leading layer dimensions, which A, B and W share."""
    return a.ndim + b.ndim - 2 - weight.ndim


def _check_shape(path: str, weight: Any, a: Any, b: Any) -> None:
    count = _num_layer_axes(weight, a, b)
    shape = (*a.shape[:-1], *b.shape[count + 1 :]) if count >= 0 else ()
    if shape != weight.shape or a.shape[:count] != b.shape[:count] or a.shape[-1] != b.shape[count]:
        raise RequestError(
            f"{path}: the adapters were trained on a different base\n"
            f"    got: A {tuple(a.shape)}, B {tuple(b.shape)} for a weight {tuple(weight.shape)}\n"
            "    fix: use the base that they were trained on"
        )


@attrs.frozen(eq=False)
class AdapterExport:
    """Exported adapters.

    Attributes:
        params: Path -> parameter of the adapters.
        scales: Path of an adapted map -> alpha / rank.
        base: `fingerprint` of the base weights from training.
        run: The run with these weights, under the name that it had during training. None if unknown.
        variables: Path -> variable of the model after training. These replace the variables of the base.
        dtype: Dtype of the base weights in training, if all of them had the same dtype. None if unknown.
    """

    params: dict[str, Any]
    scales: dict[str, float]
    base: str
    run: str | None = None
    variables: dict[str, Any] = attrs.field(factory=dict)
    dtype: str | None = None

    def check(self, params: Params) -> None:
        """Raise `RequestError` unless `params` are the base that the adapters were trained on."""
        self.check_shapes(params)
        self.check_values(params)

    def check_values(self, params: Params) -> None:
        """Raise `RequestError` unless the base weights have the same values as in training.

        Training may have stored the base in a narrower dtype (`lora:base_dtype`), so round the weights to it.
        """
        if fingerprint(params, self.scales, self.dtype) != self.base:
            raise RequestError(
                "the adapters were trained on a different base: the weights have the same shapes but different values\n"
                "    fix: use the base that they were trained on"
            )

    def check_shapes(self, params: Params) -> None:
        """Raise `RequestError` unless `params` contains the maps that the adapters belong to. The parameters may be abstract."""
        for path, value in self.variables.items():
            shape = tuple(params[path].shape) if path in params else None
            if shape != tuple(value.shape):
                raise RequestError(
                    f"the adapters were trained on a different base, which has the variable {path} {list(value.shape)}\n"
                    f"    got: {'no such variable' if shape is None else list(shape)} in this model\n"
                    "    fix: use the base that they were trained on"
                )
        for path in self.scales:
            if f"{path}.weight" not in params:
                maps = {p.removesuffix(".weight") for p in params if p.endswith(".weight")}
                close = nearest(path, maps)
                raise RequestError(
                    f"the adapters were trained on a different base: this model has no {path}.weight\n"
                    + (f"    nearest: {', '.join(close)}\n" if close else "")
                    + "    fix: use the base that they were trained on"
                )
            a, b = (self.params[f"{path}.{name}"] for name in ADAPTERS)
            _check_shape(path, params[f"{path}.weight"], a, b)


def fingerprint(params: Params, scales: Mapping[str, float], dtype: str | None = None) -> str:
    """Return a hash of the weights that have adapters. If a dtype is given, round wider weights to it first."""
    digest = hashlib.sha256()
    for path in sorted(scales):
        weight = np.asarray(params[f"{path}.weight"])
        narrower = dtype is not None and _is_narrower(dtype, weight.dtype)
        weight = np.ascontiguousarray(weight.astype(jnp.dtype(dtype)) if narrower else weight)
        digest.update(f"{path} {weight.dtype} {weight.shape}".encode())
        digest.update(weight.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _is_narrower(dtype: str, than: Any) -> bool:
    return jnp.issubdtype(than, jnp.floating) and jnp.dtype(dtype).itemsize < than.itemsize


def save(
    directory: Path,
    params: Params,
    scales: Mapping[str, float],
    *,
    run: str | None = None,
    variables: Collection[str] = (),
) -> None:
    """Write the adapters in `params` and a hash of their base.

    Args:
        directory: Output directory. Existing files are replaced.
        params: Parameters of the base and the adapters.
        scales: Path of an adapted map -> alpha / rank.
        run: Run that contains the base. It is recorded for later use of the adapters.
        variables: Paths in `params` of variables that changed during training, which are also written.

    Raises:
        RequestError: There are no adapters.
        WorkError: The directory cannot be written.
    """
    from safetensors.flax import save_file

    _, adapters = split(params)
    if not adapters:
        raise RequestError("the model has no adapters to write")
    dtypes = {str(params[f"{path}.weight"].dtype) for path in scales}
    facts = {
        "format": _FORMAT,
        "base": fingerprint(params, scales),
        "dtype": dtypes.pop() if len(dtypes) == 1 else None,
        "scales": dict(sorted(scales.items())),
        "run": run,
    }
    adapters |= {f"{VARIABLES}{p}": params[p] for p in variables}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({p: jnp.asarray(np.asarray(x)) for p, x in adapters.items()}, str(directory / WEIGHTS))
        (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise WorkError(f"cannot write adapters to {directory}: {error.strerror or error}") from error


def load(directory: Path) -> AdapterExport:
    """Load adapters that `save` wrote.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != _FORMAT:
            raise ValueError(f"format {facts['format']} is not {_FORMAT}")
        tensors = load_file(str(directory / WEIGHTS))
        variables = {p.removeprefix(VARIABLES): tensors.pop(p) for p in list(tensors) if p.startswith(VARIABLES)}
        exported = AdapterExport(
            tensors, facts["scales"], facts["base"], facts.get("run"), variables, dtype=facts.get("dtype")
        )
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{directory} has no exported adapters: {reason}\n    fix: write them with `axlearn lora export RUN_DIR DIR`"
        ) from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapters in {directory} are damaged: {error}\n    fix: export them again"
        ) from error
    expected = {f"{path}.{name}" for path in exported.scales for name in ADAPTERS}
    if expected != exported.params.keys():
        raise CheckpointError(f"the adapters in {directory} are damaged: {FACTS} and {WEIGHTS} name different maps")
    return exported
