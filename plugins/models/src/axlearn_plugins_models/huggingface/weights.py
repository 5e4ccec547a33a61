"""A model directory in Hugging Face format as weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from axlearn_core.checkpoint.weights import select_tensors
from axlearn_core.config import Node
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.train.session import log_message
from axlearn_plugins_models.huggingface.members import read_json
from axlearn_plugins_models.huggingface.source import Source, open_model

GENERATION = "generation_config.json"


def open_directory(directory: Path) -> "DirectoryWeights":
    """The weights of a model directory, in the dtype of its files.

    Raises:
        RequestError: something is wrong with the directory; nothing was read but the headers.
    """
    weights = DirectoryWeights(open_model(directory, stored_dtype=True))
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
        """The root config that `config.json` stands for."""
        return self.source.config

    @property
    def config(self) -> Node[Any]:
        """The config of the model."""
        return self.source.config.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of `tokenizer.json`."""
        return self.source.config.input.tokenizer.build() if self.source.family.text else None

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that `config.json` and `generation_config.json` let an output end with, such as the end of a turn."""
        directory, named = self.source.directory, [self.source.data]
        if (directory / GENERATION).is_file():
            more = read_json(directory, GENERATION)
            named += [more] if isinstance(more, dict) else []
        ends = [end for data in named for end in _as_list(data.get("eos_token_id"))]
        size = self.source.data.get("vocab_size")
        return frozenset(e for e in ends if type(e) is int and 0 <= e < (size if type(size) is int else 0))

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """In the dtype of the config's parameters, not of the files."""
        return {**self.source.model.abstract, **self.source.model.variables}

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """See `axlearn_core.contracts.parts.Weights`."""
        specs = self.specs()
        places = select_tensors(pattern, shardings, specs, str(self.source.directory))
        default = SingleDeviceSharding(jax.local_devices()[0])
        like = {
            p: jax.ShapeDtypeStruct(specs[p].shape, specs[p].dtype, sharding=place or default)
            for p, place in places.items()
        }
        return self.source.read(like)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
