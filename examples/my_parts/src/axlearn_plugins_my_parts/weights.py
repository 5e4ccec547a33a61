"""Weights in one `.npz` file, which `axlearn generate model.npz` opens."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from axlearn_core.extend import (
    CheckpointError,
    Functional,
    Node,
    Tokenizer,
    Weights,
    check_tensors,
    children,
    read_text,
    registry,
    select_tensors,
    write,
)

CONFIG, STEP = "config.yaml", "step"


def save_npz(weights: Weights, file: Path) -> None:
    """Write weights and their config to a file. Floats are written as float32."""
    text = write(weights.experiment, registry())
    arrays = {path: np.asarray(tensor, np.float32) for path, tensor in weights.read().items()}
    np.savez(file, **{CONFIG: np.array(text), STEP: np.array(weights.step), **arrays})


class NpzWeights:
    """Weights in a file from `save_npz`. Implements `axlearn_core.contracts.parts.Weights`."""

    def __init__(self, file: Path):
        self.file = file
        with np.load(file) as data:
            if CONFIG not in data:
                raise CheckpointError(f"{file} has no {CONFIG}\n    fix: write it with `save_npz`")
            request = read_text(str(data[CONFIG]), f"{file}/{CONFIG}", registry())
            stored = {name: data[name] for name in data.files if name not in (CONFIG, STEP)}
            self.step = int(data[STEP])
        assert isinstance(request.experiment, Node)
        self.experiment: Any = request.experiment
        check_tensors(str(file), self.specs(), stored, fix="write it again with the installed versions")

    @property
    def config(self) -> Node[Any]:
        """Config of the model."""
        return self.experiment.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the experiment's input, or None."""
        node = children(self.experiment.input).get("tokenizer")
        return None if node is None else node.build()

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every tensor."""
        return {**self._functional.abstract, **self._functional.variables}

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """Return the tensors that match the pattern."""
        specs, default = self.specs(), SingleDeviceSharding(jax.local_devices()[0])
        places = select_tensors(pattern, shardings, specs, str(self.file))
        with np.load(self.file) as data:
            return {p: jax.device_put(data[p].astype(specs[p].dtype), place or default) for p, place in places.items()}

    @cached_property
    def _functional(self) -> Functional:
        return Functional.from_config(self.config)
