"""Weights of a model directory in Hugging Face format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from axlearn_core.config import Node
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.run.notices import log_message
from axlearn_core.run.weights import select_tensors
from axlearn_plugins_models.huggingface.source import Source, open_model


def open_directory(uri: str | Path) -> "DirectoryWeights":
    """Open the weights of a model directory or of a name on the hub, in the dtype of the files.

    Raises:
        RequestError: If the directory is not valid; only the headers were read.
    """
    weights = DirectoryWeights(open_model(uri, stored_dtype=True))
    for note in weights.source.notes:
        log_message(f"note: {note}")
    return weights


class DirectoryWeights:
    """The weights of an opened model directory; see `axlearn_core.contracts.parts.Weights`."""

    step = 0

    def __init__(self, source: Source):
        self.source = source

    @property
    def experiment(self) -> Node[Any]:
        """Root config of the experiment for `config.json`."""
        return self.source.config

    @property
    def config(self) -> Node[Any]:
        """Config of the model."""
        return self.source.config.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer from `tokenizer.json`, or None for models without text."""
        return self.source.config.input.tokenizer.build() if self.source.family.text else None

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the specs of all tensors, in the dtype of the config's parameters, not of the files."""
        return {**self.source.model.abstract, **self.source.model.variables}

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """Read tensors; see `axlearn_core.contracts.parts.Weights`."""
        specs = self.specs()
        places = select_tensors(pattern, shardings, specs, str(self.source.directory))
        default = SingleDeviceSharding(jax.local_devices()[0])
        like = {
            p: jax.ShapeDtypeStruct(specs[p].shape, specs[p].dtype, sharding=place or default)
            for p, place in places.items()
        }
        return self.source.read(like)
