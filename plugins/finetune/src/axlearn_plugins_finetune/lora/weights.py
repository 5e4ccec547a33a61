"""Open exported adapters as weights of their base, with the adapters merged when they are read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from axlearn_core.config import Node
from axlearn_core.contracts.parts import Tokenizer, Weights
from axlearn_core.errors import CheckpointError
from axlearn_core.run import open_weights
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.adapters import AdapterExport
from axlearn_plugins_finetune.lora.lora_linear import ADAPTERS


def open_adapters(directory: Path, *, base: str | None = None) -> "AdaptedWeights":
    """Open the weights of exported adapters on their base.

    Args:
        directory: Directory written by `axlearn lora export`.
        base: Run that the adapters were trained on. The default is its location during training.

    Raises:
        CheckpointError: A file is missing or damaged, or the base is unknown.
        RequestError: The base is a different model.
    """
    exported = adapters.load(directory)
    uri = base or exported.run
    fix = f"name it: {directory}?base=RUN_DIR"
    if uri is None:
        raise CheckpointError(f"{directory} does not name the run that its adapters were trained on\n    fix: {fix}")
    try:
        weights = open_weights(uri)
    except CheckpointError as error:
        raise CheckpointError(
            f"the base of the adapters in {directory} cannot be opened: {error}\n    or {fix}"
        ) from error
    exported.check_shapes(weights.specs())
    return AdaptedWeights(weights, exported)


class AdaptedWeights:
    """The weights of a dense model with merged adapters. See `axlearn_core.contracts.parts.Weights`.

    The first read of an adapted weight checks that the base has the same values as in training.
    """

    def __init__(self, base: Weights, exported: AdapterExport):
        self.base, self.exported = base, exported
        self._checked = False

    @property
    def experiment(self) -> Node[Any]:
        """The root config of the base."""
        return self.base.experiment

    @property
    def config(self) -> Node[Any]:
        """The config of the dense model."""
        return self.base.config

    @property
    def step(self) -> int:
        """Number of steps that the base was trained for."""
        return self.base.step

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the base."""
        return self.base.tokenizer

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return path -> shape and dtype of the base's weights."""
        return self.base.specs()

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """See `axlearn_core.contracts.parts.Weights`."""
        tensors = dict(self.base.read(pattern, shardings))
        adapted = {path: scale for path, scale in self.exported.scales.items() if f"{path}.weight" in tensors}
        if adapted and not self._checked:
            self.exported.check_values(_LazyWeights(self.base))
            self._checked = True
        for path in self.exported.variables.keys() & tensors.keys():
            old = tensors[path]
            tensors[path] = jax.device_put(self.exported.variables[path].astype(old.dtype), old.sharding)
        for path, scale in adapted.items():
            weight = tensors.pop(f"{path}.weight")
            a, b = (self.exported.params[f"{path}.{name}"] for name in ADAPTERS)
            tensors[f"{path}.weight"] = jax.device_put(adapters.add_adapter(weight, a, b, scale), weight.sharding)
        return tensors


class _LazyWeights(Mapping[str, Any]):
    """A mapping of weights that reads each tensor on access."""

    def __init__(self, weights: Weights):
        self.weights = weights

    def __getitem__(self, path: str) -> Any:
        return self.weights.read(path)[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights.specs())

    def __len__(self) -> int:
        return len(self.weights.specs())

    def __contains__(self, path: object) -> bool:
        return path in self.weights.specs()
