"""Run files on their way to other machines: the one that was given, and those that it begins with."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axlearn_core.config import dump, parse
from axlearn_core.config.assets import LocalRun
from axlearn_core.config.run_scheme import RUN_SCHEME
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import is_file

DELIMITER = "AXLEARN_RUN_FILE"
"""Ends a run file in a script of shell."""


def read_document(name: str) -> str:
    """The text of a run file, or of a run's config with its assets at absolute paths: it is read in another folder."""
    text = Path(name).read_text(encoding="utf-8")
    data = parse(text, name).data
    if not (isinstance(data, Mapping) and data.get("resolved") is True):
        return text
    run = LocalRun.of_config(Path(name))

    def attached(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: attached(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [attached(v) for v in value]
        is_asset = isinstance(value, str) and value.startswith(RUN_SCHEME)
        return run.find(value.removeprefix(RUN_SCHEME)) or value if is_asset else value

    return dump(attached(data)) if RUN_SCHEME in text else text


def read_bases(experiment: str) -> dict[str, str]:
    """Name -> text of the files that a run file begins with, as their names stand in `experiment:`, nearest first.

    The request was resolved: the files can be read, and none begins with itself.
    """
    texts: dict[str, str] = {}
    name: str | None = experiment
    while name is not None:
        texts[name] = read_document(name)
        name = _base_of(texts[name], name)
    del texts[experiment]
    return texts


def place_files(experiment: str, document: str, bases: Mapping[str, str], folder: str) -> dict[str, str]:
    """Path -> text of the files of a run in a folder where they name each other; the first one is the run's.

    Args:
        experiment: the name of the run file, as it was given.
        document: its text.
        bases: of `read_bases`.
        folder: without a `/` at its end.
    """
    names = [experiment, *bases]
    if not bases:
        return {f"{folder}/{Path(experiment).name}": document}
    places = dict(zip(names, _unique_names(names), strict=True))
    return {
        f"{folder}/{places[name]}": _with_base(text, name, {n: f"{folder}/{p}" for n, p in places.items()})
        for name, text in zip(names, (document, *bases.values()), strict=True)
    }


def write_script(files: Mapping[str, str], script: str = "the script") -> list[str]:
    """Lines of shell that write files. `script` is what errors call what the lines stand in.

    Raises:
        RequestError: a line of a file would end it.
    """
    lines: list[str] = []
    for path, text in files.items():
        if any(line == DELIMITER for line in text.splitlines()):
            name = path.rpartition("/")[2]
            raise RequestError(f"{name} has a line {DELIMITER!r}, which ends it in {script}\n    fix: change it")
        lines += [f"cat > {shlex.quote(path)} <<'{DELIMITER}'", text.rstrip("\n"), DELIMITER]
    return lines


def _base_of(text: str, name: str) -> str | None:
    data = parse(text, name).data
    base = data.get("experiment") if isinstance(data, Mapping) and "resolved" not in data else None
    return base if isinstance(base, str) and is_file(base) else None


def _with_base(text: str, name: str, places: Mapping[str, str]) -> str:
    """A run file with the file that it begins with at its new place."""
    base = _base_of(text, name)
    if base is None:
        return text
    line = f"experiment: {json.dumps(places[base])}"
    changed, count = re.subn(r"^experiment:[^\n]*$", lambda _: line, text, flags=re.MULTILINE)
    if count == 1 and _base_of(changed, name) == places[base]:
        return changed
    return json.dumps({**_plain(parse(text, name).data), "experiment": places[base]}, indent=2) + "\n"  # also YAML


def _plain(data: Mapping[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(data, default=str))


def _unique_names(names: list[str]) -> Iterator[str]:
    """The last parts of paths; a number goes before one that is there already."""
    taken: set[str] = set()
    for number, name in enumerate(names):
        place = Path(name).name
        place = f"{number}-{place}" if place in taken else place
        taken.add(place)
        yield place
