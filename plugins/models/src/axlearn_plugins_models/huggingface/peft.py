"""Export adapters in the format of the PEFT library, for models that Hugging Face's format can describe.

    adapter_config.json           rank, alpha, and the modules with adapters
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]

Source: `peft.LoraConfig` and `peft.get_peft_model_state_dict`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Functional
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import Configurable
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.run import Run
from axlearn_core.run.derive import local_target
from axlearn_plugins_finetune.lora.feature import without_adapters
from axlearn_plugins_finetune.lora.lora_linear import ADAPTERS
from axlearn_plugins_finetune.lora.merge import changed_variables, scales_of
from axlearn_plugins_models.huggingface.family import find_family

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


class PeftFormat(Configurable):
    """Adapter format of `axlearn lora export --format peft`; see `AdapterFormat`."""

    def export(self, run_dir: str, directory: str, *, base: str | None, step: int | None) -> None:
        """Write the adapters of a run; see `export_peft`."""
        export_peft(run_dir, directory, base=base, step=step)


def export_peft(
    run_dir: str | Path, directory: str | Path, *, base: str | None = None, step: int | None = None
) -> None:
    """Write the adapters of a run in PEFT's format.

    Args:
        run_dir: Run with adapters.
        directory: Directory to write to; existing files of the same names are replaced.
        base: Base model to record in `adapter_config.json`: a directory or a name on the hub.
        step: Step of the checkpoint; the default is the newest.

    Raises:
        RequestError: If the run has no adapters, no Hugging Face family describes its base model, or the format does not
            support one of the adapters.
        WorkError: If the directory cannot be written.
    """
    from safetensors.flax import save_file

    directory = local_target(directory)
    configure_devices(None)
    source = Run(run_dir).weights(step)
    if not scales_of(source):
        raise RequestError(f"{run_dir} has no adapters to write\n    fix: use a run that was trained with lora")
    if variables := changed_variables(source):
        raise RequestError(
            f"PEFT's format cannot store this model's variables, which training changes: {', '.join(variables[:3])}"
            + (f" and {len(variables) - 3} more" if len(variables) > 3 else "")
            + "\n    fix: merge the adapters into the weights (`axlearn lora merge`), and export the model"
        )
    arrays, facts = files(source.experiment, source.read("**.lora_*"), scales_of(source), base=base)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({n: jnp.asarray(x) for n, x in arrays.items()}, str(directory / WEIGHTS), {"format": "pt"})
        (directory / CONFIG).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", "utf-8")
    except OSError as error:
        raise WorkError(f"cannot write adapters to {directory}: {error.strerror or error}") from error


def files(
    config: Any, adapters: Mapping[str, Any], scales: Mapping[str, float], *, base: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (arrays by name, `adapter_config.json`) for the adapters in a trainer config; see `export_peft`."""
    model = without_adapters(config)
    family, data = find_family(model)
    tensors = family.layout(Functional.from_config(model.model), data)
    modules: dict[str, tuple[str, Any]] = {}
    for name, tensor in tensors.items():
        path = tensor.parts[0].path.removesuffix(".weight")
        if path in scales:
            modules[name.removesuffix(".weight")] = (path, tensor)
    unmapped = set(scales) - {path for path, _ in modules.values()}
    if unmapped:
        raise RequestError(
            f"Hugging Face's format has no weights for the adapted layers {', '.join(sorted(unmapped)[:5])}"
        )
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, (path, tensor) in modules.items():
        a, b = _matrices(path, tensor, adapters)
        arrays |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        ranks[name], alphas[name] = len(a), _number(scales[path] * len(a))
    all_modules = {n.removesuffix(".weight") for n in tensors if n.endswith(".weight")}
    return arrays, adapter_config(ranks, alphas, all_modules, base)


def adapter_config(
    ranks: Mapping[str, int], alphas: Mapping[str, float], all_modules: set[str], base: str | None
) -> dict[str, Any]:
    """Return the `adapter_config.json` for adapters with these ranks and alphas; `all_modules` names all modules of the model."""
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    last = {n: n.rpartition(".")[2] for n in all_modules}
    partly = {
        last[n] for n in all_modules - set(ranks)
    }  # as a target, this last part would also match modules without adapters
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({n if last[n] in partly else last[n] for n in ranks}),
        "rank_pattern": {n: r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {n: a for n, a in alphas.items() if a != alpha},
    }


def _matrices(path: str, tensor: Any, adapters: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return A [r, in] and B [out, r] for a tensor of the dense model."""
    part = tensor.parts[0]
    axes, theirs = part.axes, part.axes.theirs
    a, b = (np.asarray(adapters[f"{path}.{n}"])[part.index] for n in ADAPTERS)
    names = [group[0] for group in axes.ours if len(group) == 1]
    inputs, outputs = names[: a.ndim - 1], names[a.ndim - 1 :]
    joined = len(tensor.parts) > 1 or axes.joined or len(names) < len(axes.ours)
    if joined or len(theirs) != 2 or set(theirs[0]) != set(outputs):
        raise RequestError(
            f"{path}: PEFT's format does not support these adapters, because {tensor.name} contains other layers too, or a "
            "transpose\n    fix: merge them into the weights (`axlearn lora merge`), and export the model"
        )
    a = np.moveaxis(a, -1, 0).transpose(0, *(1 + inputs.index(n) for n in theirs[1]))
    b = b.transpose(*(1 + outputs.index(n) for n in theirs[0]), 0)
    rank = a.shape[0]
    return a.reshape(rank, -1), b.reshape(-1, rank)


def _commonest(values: Any) -> Any:
    listed: Sequence[Any] = sorted(values)
    return max(listed, key=listed.count)


def _number(value: float) -> float | int:
    """Return whole numbers as int, since PEFT's alphas are mostly integers."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value
