"""Adapters as values: merged into the weights, taken out of them again, and kept in files of their own.

Parameters are flat dicts by dotted path (`decoder.layer.attention.query.lora_a`). `scales` has alpha / rank of each adapted
map by its path (`decoder.layer.attention.query`); `scales_of(model)` gives it.

The files of exported adapters:

    adapters.safetensors    lora_a and lora_b of each adapted map, and the model's variables that are not parameters, as they
                            are after the training of the adapters (`variables.<path>`)
    adapters.json           the scales, a hash of the weights that they were trained beside, and the run that has these
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
"""Before the path of a variable, in the file."""
_FORMAT = 1


def is_adapter(path: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return path.rpartition(".")[2] in ADAPTERS


def scales_of(model: Any) -> dict[str, float]:
    """alpha / rank of each adapted map in a module, by path; the module may be abstract."""
    modules: Any = nnx.iter_modules(model)
    return {".".join(map(str, path)): m.lora_scale for path, m in modules if is_adapted(m)}


def split(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the base's parameters, the adapters')."""
    base = {p: x for p, x in params.items() if not is_adapter(p)}
    return base, {p: x for p, x in params.items() if is_adapter(p)}


def merge(params: Params, scales: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of the dense model that computes what the adapted one does: W + alpha / rank * A B.

    The sum is taken in float32 and rounded once to the dtype of W.

    Raises:
        RequestError: an adapted map has no parameter `weight` of the shape of A B, or an adapter has no scale.
    """
    return _add_adapters(params, scales, 1.0)


def unmerge(params: Params, adapters: Params, scales: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of the adapted model again: takes the adapters out of merged weights, and puts them beside them.

    Equal to what was merged but for the rounding of `merge`.
    """
    result = _add_adapters({**params, **adapters}, scales, -1.0)
    return {**result, **adapters}


def _add_adapters(params: Params, scales: Mapping[str, float], sign: float) -> dict[str, Any]:
    merged, adapters = split(params)
    paths = {p.rpartition(".")[0] for p in adapters}
    if paths != set(scales):
        odd = sorted(paths ^ set(scales))
        raise RequestError(f"adapters and their scales are of different maps\n    got: {', '.join(odd[:5])}")
    for path, scale in scales.items():
        name, a, b = f"{path}.weight", adapters[f"{path}.lora_a"], adapters[f"{path}.lora_b"]
        weight = merged.get(name)
        if weight is None or not jnp.issubdtype(weight.dtype, jnp.floating):
            raise RequestError(
                f"{path}: adapters merge into a floating-point parameter `weight`, and there is none\n"
                "    fix: merge before the weights are quantized"
            )
        _check_shape(path, weight, a, b)
        merged[name] = add_adapter(weight, a, b, sign * scale)
    return merged


@array_function()
def add_adapter(weight: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array | float) -> jax.Array:
    """weight + scale * A B, summed in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    stacked = tuple(range(_num_layer_axes(weight, a, b)))
    contracted = (a.ndim - 1,), (len(stacked),)
    product = lax.dot_general(a, b, (contracted, (stacked, stacked)), precision=lax.Precision.HIGHEST)
    return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)


def _num_layer_axes(weight: Any, a: Any, b: Any) -> int:
    """How many leading dimensions number the layers: those that are in A, B and W alike."""
    return a.ndim + b.ndim - 2 - weight.ndim


def _check_shape(path: str, weight: Any, a: Any, b: Any) -> None:
    count = _num_layer_axes(weight, a, b)
    shape = (*a.shape[:-1], *b.shape[count + 1 :]) if count >= 0 else ()
    if shape != weight.shape or a.shape[:count] != b.shape[:count] or a.shape[-1] != b.shape[count]:
        raise RequestError(
            f"{path}: the adapters are of another base\n"
            f"    got: A {tuple(a.shape)}, B {tuple(b.shape)} beside a weight {tuple(weight.shape)}\n"
            "    fix: use the base that they were trained with"
        )


@attrs.frozen(eq=False)
class Exported:
    """Adapters on their own.

    Attributes:
        params: their parameters by path.
        variables: the model's variables by path, as they are beside the adapters; they replace those of the base.
        scales: alpha / rank by the path of the adapted map.
        base: `fingerprint` of the weights that they belong to.
        run: the run that has these weights, as it was named in training; None where that is not known.
    """

    params: dict[str, Any]
    scales: dict[str, float]
    base: str
    run: str | None = None
    variables: dict[str, Any] = attrs.field(factory=dict)

    def check(self, params: Params) -> None:
        """Raises `RequestError` unless `params` holds the base that the adapters were trained with."""
        self.check_shapes(params)
        self.check_values(params)

    def check_values(self, params: Params) -> None:
        """Raises `RequestError` unless the weights beside the adapters have the values that they had in training."""
        if fingerprint(params, self.scales) != self.base:
            raise RequestError(
                "the adapters are of another base: its weights have the right shapes and other values\n"
                "    fix: use the base that they were trained with"
            )

    def check_shapes(self, params: Params) -> None:
        """Raises `RequestError` unless `params`, which may be abstract, has the maps that the adapters belong to."""
        for path, value in self.variables.items():
            shape = tuple(params[path].shape) if path in params else None
            if shape != tuple(value.shape):
                raise RequestError(
                    f"the adapters are of another base: they come with the variable {path} {list(value.shape)}\n"
                    f"    got: {'none' if shape is None else list(shape)} in this model\n"
                    "    fix: use the base that they were trained with"
                )
        for path in self.scales:
            if f"{path}.weight" not in params:
                maps = {p.removesuffix(".weight") for p in params if p.endswith(".weight")}
                close = nearest(path, maps)
                raise RequestError(
                    f"the adapters are of another base: this model has no {path}.weight\n"
                    + (f"    nearest: {', '.join(close)}\n" if close else "")
                    + "    fix: use the base that they were trained with"
                )
            a, b = (self.params[f"{path}.{name}"] for name in ADAPTERS)
            _check_shape(path, params[f"{path}.weight"], a, b)


def fingerprint(params: Params, scales: Mapping[str, float]) -> str:
    """A hash of the weights that have adapters."""
    digest = hashlib.sha256()
    for path in sorted(scales):
        weight = np.ascontiguousarray(np.asarray(params[f"{path}.weight"]))
        digest.update(f"{path} {weight.dtype} {weight.shape}".encode())
        digest.update(weight.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save(
    directory: Path,
    params: Params,
    scales: Mapping[str, float],
    *,
    run: str | None = None,
    variables: Collection[str] = (),
) -> None:
    """Writes the adapters among `params`, and a hash of the base beside them.

    Args:
        directory: where; files of these names in it are replaced.
        params: the base's and the adapters'.
        scales: alpha / rank by the path of the adapted map.
        run: where the base is, for who opens the adapters later.
        variables: the paths in `params` that are not parameters: training moved them, so that they are written too.

    Raises:
        RequestError: there are none.
        WorkError: the directory cannot be written.
    """
    from safetensors.flax import save_file

    _, adapters = split(params)
    if not adapters:
        raise RequestError("there are no adapters to write: the model has none")
    facts = {"format": _FORMAT, "base": fingerprint(params, scales), "scales": dict(sorted(scales.items())), "run": run}
    adapters |= {f"{VARIABLES}{p}": params[p] for p in variables}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({p: jnp.asarray(np.asarray(x)) for p, x in adapters.items()}, str(directory / WEIGHTS))
        (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise WorkError(f"cannot write adapters to {directory}: {error.strerror or error}") from error


def load(directory: Path) -> Exported:
    """The adapters that `save` wrote.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != _FORMAT:
            raise ValueError(f"format {facts['format']} is not {_FORMAT}")
        tensors = load_file(str(directory / WEIGHTS))
        variables = {p.removeprefix(VARIABLES): tensors.pop(p) for p in list(tensors) if p.startswith(VARIABLES)}
        exported = Exported(tensors, facts["scales"], facts["base"], facts.get("run"), variables)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{directory} holds no exported adapters: {reason}\n    fix: `axlearn lora export RUN_DIR DIR` writes them"
        ) from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapters in {directory} are damaged: {error}\n    fix: export them again"
        ) from error
    expected = {f"{path}.{name}" for path in exported.scales for name in ADAPTERS}
    if expected != exported.params.keys():
        raise CheckpointError(f"the adapters in {directory} are damaged: {FACTS} and {WEIGHTS} name different maps")
    return exported
