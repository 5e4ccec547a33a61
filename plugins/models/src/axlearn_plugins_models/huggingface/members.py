"""The files of a model directory, and safe access to them: only regular files of limited size inside the directory."""

import json
import math
import stat
from pathlib import Path
from typing import Any

from axlearn_core.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the weights, and of the index of sharded weights."""
TEMPLATES = "additional_chat_templates"
"""Folder with the chat templates that have names."""
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
"""Patterns of the small files besides the weights, which an import keeps for an export."""
JSON_BYTES = 64 << 20
"""Maximum size of a JSON file. The tokenizers library reads tokenizer.json, which takes about 33 MB for 256,000 tokens."""

SHARED_BLOBS = ".huggingface-shared-blobs"
"""File with which `huggingface_hub` marks the folder of the blobs that repositories share."""


def member(directory: Path, name: str) -> Path:
    """Return the path of a file in a directory.

    A link may point to a different file in the directory. In a cache of the Hugging Face hub (`snapshots/REVISION`), it may also
    point to one of the repository's `blobs`, or to the `blobs` that repositories share.

    Raises:
        CheckpointError: If the name points outside the directory, or the file is not regular.
    """
    file = directory / name
    if Path(name).name != name:
        raise CheckpointError(f"{directory}: {name!r} is not a plain file name\n    fix: download the model again")
    try:
        target = file.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links, before Python 3.13
        reason = (error.strerror if isinstance(error, OSError) else None) or "a broken link"
        raise CheckpointError(f"{file} cannot be read: {reason}") from None
    places = [directory.resolve()]
    for repository in (p.parent for p in (*places[0].parents,)[:2] if p.name == "snapshots"):  # also for a folder in it
        places.append(repository / "blobs")
        if (shared := repository.parent / "blobs").joinpath(SHARED_BLOBS).is_file():
            places.append(shared)
    if not any(target.is_relative_to(place) for place in places):
        raise CheckpointError(
            f"{file} is a link to a file outside its directory, which is not followed\n    got: {target}\n"
            "    fix: replace the link with a copy of the file if it belongs to the model, or delete it"
        )
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a regular file\n    fix: download the model again")
    return file


def read_json(directory: Path, name: str) -> Any:
    """Read a JSON file in a directory. Raise `CheckpointError` if it cannot be read."""
    file = member(directory, name)
    if (size := file.stat().st_size) > JSON_BYTES:
        raise CheckpointError(f"{file} has {size:,} bytes\n    expected: at most {JSON_BYTES:,}")
    try:
        return json.loads(file.read_bytes().decode("utf-8"), parse_constant=_finite, parse_float=_finite)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{file} cannot be read: it is nested too deeply") from None


def _finite(text: str) -> float:
    """Parse a JSON number. Reject `NaN`, `Infinity` and `1e999`, which Python accepts but are never valid sizes or rates."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a JSON number")
    return number
