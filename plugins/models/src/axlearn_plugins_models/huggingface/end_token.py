"""The token that ends a text, as the files of a model directory name it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from axlearn_plugins_models.huggingface.members import read_json

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


def end_token(directory: Path, config: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> str | None:
    """The end token of a model; None where no file names one that the tokenizer has.

    `config.json` and `generation_config.json` name ids. Where there are several, such as the end of a turn and the end of the text,
    `tokenizer_config.json` says which of them ends an answer; without it, the first does.

    Raises:
        CheckpointError: one of the files is not a JSON object that can be read.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    named = _content(_read(directory, TOKENIZER_CONFIG).get("eos_token"))
    for data in (config, _read(directory, GENERATION)):
        ends = [token for i in _ids(data.get("eos_token_id")) if (token := tokenizer.id_to_token(i)) is not None]
        if ends:
            return named if named in ends else ends[0]
    return named if named in vocab else None


def _read(directory: Path, name: str) -> Mapping[str, Any]:
    """The file, where it is there and holds what it should."""
    data = read_json(directory, name) if (directory / name).exists() else {}
    return data if isinstance(data, Mapping) else {}


def _ids(value: Any) -> Iterator[int]:
    """The ids of a value that is one id or a list of them; ignores anything else."""
    for one in value if isinstance(value, list) else [value]:
        if type(one) is int and 0 <= one < 1 << 31:
            yield one


def _content(value: Any) -> str | None:
    """A token, which may be written with its options."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
