"""The files of a model directory that somebody else made: only those inside it, only regular ones, only of bounded size."""

import json
import math
import stat
from pathlib import Path
from typing import Any

from axlearn_core.errors import CheckpointError

JSON_BYTES = 64 << 20
"""The longest JSON file. A tokenizer.json of 256,000 tokens has about 33 MB, and is read by the tokenizers library."""


def member(directory: Path, name: str) -> Path:
    """The path of a file of a directory.

    A link may lead to another file of the directory, or, in a cache of the Hugging Face hub (`snapshots/REVISION`), to one of its
    `blobs`.

    Raises:
        CheckpointError: the name leads out of the directory, or it is not a regular file.
    """
    file = directory / name
    if Path(name).name != name:
        raise CheckpointError(
            f"{directory}: {name!r} is not the name of a file in it\n    fix: download the model again"
        )
    try:
        target = file.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        reason = (error.strerror if isinstance(error, OSError) else None) or "a link that leads nowhere"
        raise CheckpointError(f"{file} cannot be read: {reason}") from None
    places = [directory.resolve()]
    if (cache := places[0].parent).name == "snapshots":
        places.append(cache.parent / "blobs")
    if not any(target.is_relative_to(place) for place in places):
        raise CheckpointError(
            f"{file} is a link out of its directory, which is not followed\n    got: {target}\n"
            "    fix: put a copy of the file there if it belongs to the model, or delete the link"
        )
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a regular file\n    fix: download the model again")
    return file


def read_json(directory: Path, name: str) -> Any:
    """What a JSON file of a directory holds; raises `CheckpointError` where that cannot be read."""
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
    """A number of JSON. Python also reads `NaN`, `Infinity` and `1e999`, which no size or rate may be."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a number of JSON")
    return number
