"""Transfer of run files to other machines: the given file and the files that it is based on."""

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
"""Delimiter of a run file in a shell script."""


def read_document(name: str) -> str:
    """Return the content of a run file. If it is the config of a run, make its asset paths absolute.

    The paths must be absolute because the content is later read from a different folder.
    """
    text = Path(name).read_text(encoding="utf-8")
    data = parse(text, name).data
    if not (isinstance(data, Mapping) and data.get("resolved") is True):
        return text
    run = LocalRun.from_config_file(Path(name))

    def attached(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: attached(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [attached(v) for v in value]
        is_asset = isinstance(value, str) and value.startswith(RUN_SCHEME)
        return run.find(value.removeprefix(RUN_SCHEME)) or value if is_asset else value

    return dump(attached(data)) if RUN_SCHEME in text else text


def read_bases(experiment: str) -> dict[str, str]:
    """Return the contents of the files that a run file is based on, keyed by their names in `experiment:`, nearest first.

    The request must already be resolved. This ensures that the files can be read and do not form a cycle.
    """
    texts: dict[str, str] = {}
    name: str | None = experiment
    while name is not None:
        texts[name] = read_document(name)
        name = _find_base(texts[name], name)
    del texts[experiment]
    return texts


def place_files(experiment: str, document: str, bases: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the contents of run files, keyed by path in a folder, main file first. References use the new paths.

    Args:
        experiment: Name of the run file, as given.
        document: Text of the run file.
        bases: Result of `read_bases`.
        folder: Folder, without a trailing `/`.
    """
    names = [experiment, *bases]
    if not bases:
        return {f"{folder}/{Path(experiment).name}": document}
    paths = dict(zip(names, _unique_names(names), strict=True))
    return {
        f"{folder}/{paths[name]}": _with_base(text, name, {n: f"{folder}/{p}" for n, p in paths.items()})
        for name, text in zip(names, (document, *bases.values()), strict=True)
    }


def write_script(files: Mapping[str, str], script: str = "the script") -> list[str]:
    """Return shell commands that write files.

    Args:
        files: Contents of the files, by path.
        script: Name of the script, for use in error messages.

    Raises:
        RequestError: A file contains the delimiter line.
    """
    lines: list[str] = []
    for path, text in files.items():
        if any(line == DELIMITER for line in text.splitlines()):
            name = path.rpartition("/")[2]
            raise RequestError(f"{name} has a line {DELIMITER!r}, which ends it in {script}\n    fix: change it")
        lines += [f"cat > {shlex.quote(path)} <<'{DELIMITER}'", text.rstrip("\n"), DELIMITER]
    return lines


def _find_base(text: str, name: str) -> str | None:
    data = parse(text, name).data
    base = data.get("experiment") if isinstance(data, Mapping) and "resolved" not in data else None
    return base if isinstance(base, str) and is_file(base) else None


def _with_base(text: str, name: str, paths: Mapping[str, str]) -> str:
    """Return a run file with the new path of its base."""
    base = _find_base(text, name)
    if base is None:
        return text
    line = f"experiment: {json.dumps(paths[base])}"
    changed, count = re.subn(r"^experiment:[^\n]*$", lambda _: line, text, flags=re.MULTILINE)
    if count == 1 and _find_base(changed, name) == paths[base]:
        return changed
    return (
        json.dumps({**_plain(parse(text, name).data), "experiment": paths[base]}, indent=2) + "\n"
    )  # JSON is valid YAML


def _plain(data: Mapping[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(data, default=str))


def _unique_names(names: list[str]) -> Iterator[str]:
    """Yield the last part of each path, prefixed with a number if it is repeated."""
    used_names: set[str] = set()
    for number, name in enumerate(names):
        place = Path(name).name
        place = f"{number}-{place}" if place in used_names else place
        used_names.add(place)
        yield place
