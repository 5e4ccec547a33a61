"""Sources of documents.

A source is a set of files, the standard library of the running Python, or a weighted mixture of other sources.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import attrs

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.errors import InputError, Problem, counted
from axlearn_plugins_transformer.text.data_files import is_url, list_files
from axlearn_plugins_transformer.text.fingerprint import DataFile, fingerprint_files
from axlearn_plugins_transformer.text.records import LINE_BYTES, FileRecords, Records, check_head, find_format
from axlearn_plugins_transformer.text.urls import PROTOCOLS, url_problem

Split = Literal["train", "validation"]


@attrs.frozen
class Part:
    """A part of the data, with its share of the training rows.

    Attributes:
        records: The records.
        weight: Share of the training rows.
        files: Files that contain the records.
    """

    records: Records
    weight: float
    files: tuple[DataFile, ...]


class Source(Protocol):
    """Documents for training and validation."""

    def parts(self, split: Split) -> tuple[Part, ...]:
        """Return the parts of a split, or () if the source does not have the split.

        The weights sum to 1.
        """
        ...


class Files(Configurable):
    """Text, JSONL and Parquet files from paths, globs and fsspec URLs.

    The suffix determines the format.
    """

    @node
    class Config(Configurable.Config["Files"]):
        """Settings for the files.

        Validation data is in separate files, or a hashed fraction of the chunks of `paths`.

        Attributes:
            paths: Paths, globs or URLs of training files.
            validation_paths: Paths, globs or URLs of validation files.
            validation_fraction: Share of the chunks in `paths` to hold out.
            format: File format. `auto` uses the suffix.
            text_field: Field of JSONL and Parquet rows that contains the text.
            chunk_bytes: Size of the text chunks that are read at once. None scales it with the amount of data.
            max_line_bytes: Limit on a JSONL line. Longer lines are an error, because tokenizing a line takes about a
                hundred times its size in memory.
        """

        paths: str | tuple[str, ...] = ()
        validation_paths: str | tuple[str, ...] = ()
        validation_fraction: float = setting(default=0.0, ge=0, lt=1)
        format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
        text_field: str = "text"
        chunk_bytes: int | None = setting(default=None, gt=0)
        max_line_bytes: int = setting(default=LINE_BYTES, kind="execution", gt=0, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Check that there is data, and at most one way to hold some out."""
            return check_paths(self.paths, self.validation_paths, self.validation_fraction)

    def __init__(self, cfg: Config):
        self.config = cfg
        self.train_files, self.validation_files = list_files(many(cfg.paths)), list_files(many(cfg.validation_paths))
        duplicates = sorted({f.name for f in self.train_files} & {f.name for f in self.validation_files})
        if duplicates:
            raise InputError(f"files in both paths and validation_paths: {', '.join(duplicates[:5])}")
        for file in (*self.train_files, *self.validation_files)[:64]:
            kind = find_format(file.path) if cfg.format == "auto" else cfg.format
            if kind != "parquet" and not is_url(file.path):
                check_head(file)

    def parts(self, split: Split) -> tuple[Part, ...]:
        """Return one part with the files, or with their chunks in the split."""
        cfg, held_out = self.config, split == "validation"
        files = self.validation_files if held_out and not cfg.validation_fraction else self.train_files

        def keep(file: DataFile, part: int) -> bool:
            key = f"{os.path.basename(file.name)}:{file.size}:{part}"  # does not depend on the directory
            return not cfg.validation_fraction or is_held_out(key, cfg.validation_fraction) == held_out

        records = FileRecords.from_files(
            files,
            format=cfg.format,
            text_field=cfg.text_field,
            chunk_bytes=cfg.chunk_bytes,
            line_bytes=cfg.max_line_bytes,
            keep=keep,
        )
        return (Part(records, 1.0, files),) if len(records) else ()


def check_paths(paths: object, validation_paths: object, validation_fraction: float) -> Iterable[Problem]:
    """Yield problems with the fields `paths`, `validation_paths` and `validation_fraction`."""
    if not paths and not validation_paths:
        yield Problem(path="paths", message="does not name data files", fix="set it to paths or globs")
    for name, patterns in (("paths", paths), ("validation_paths", validation_paths)):
        for path in many(patterns) if isinstance(patterns, (str, tuple)) else ():
            if problem := url_problem(path):
                expected = ", ".join(f"{p}://" for p in PROTOCOLS)
                yield Problem(path=name, message=problem, got=path, expected=f"a path, or one of {expected}")
    if validation_paths and validation_fraction:
        yield Problem(path="validation_fraction", message="cannot be used together with validation_paths")


def many(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one path or several as a tuple."""
    return (paths,) if isinstance(paths, str) and paths else tuple(paths)


_THIRD_PARTY = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}  # many systems do not install these, and some are deliberately not UTF-8
_GENERATED = {"encodings", "pydoc_data"}  # files that nearly duplicate each other, so held-out ones would be too easy
EXCLUDED = frozenset(_THIRD_PARTY | _TESTS | _GENERATED)


class StandardLibrary(Configurable):
    """The Python source files of the running interpreter's standard library.

    Nothing is downloaded.

    Tests and generated tables are excluded. Files are held out by a hash of their path relative to the library, so every
    machine with the same Python has the same split.
    """

    @node
    class Config(Configurable.Config["StandardLibrary"]):
        """Settings for the split.

        Attributes:
            validation_fraction: Share of the files to hold out.
            chunk_bytes: Size of the text chunks that are read at once.
        """

        validation_fraction: float = setting(default=0.05, gt=0, lt=1)
        chunk_bytes: int = setting(default=1 << 18, gt=0)

    def __init__(self, cfg: Config):
        self.config = cfg
        self.files = standard_library_files()

    def parts(self, split: Split) -> tuple[Part, ...]:
        """Return one part with the files of the split."""
        held_out = split == "validation"
        files = tuple(f for f in self.files if is_held_out(f.name, self.config.validation_fraction) == held_out)
        return (Part(FileRecords.from_files(files, format="text", chunk_bytes=self.config.chunk_bytes), 1.0, files),)


def standard_library_files() -> tuple[DataFile, ...]:
    """Return the `.py` files of the running interpreter's standard library.

    They are sorted by relative path. Folders in `EXCLUDED` are skipped.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in EXCLUDED]
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and not os.path.islink(path) and (size := os.path.getsize(path)):
                files.append(DataFile(path, os.path.relpath(path, root).replace(os.sep, "/"), size))
    if not files:
        raise InputError(f"this Python has no standard-library source files in {root}")
    return fingerprint_files(sorted(files, key=lambda f: f.name))


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a hash of `name` is in the first `fraction` of all hashes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < fraction * 2**64


class Mixture(Configurable):
    """Several sources, each with a share of the rows of every batch."""

    @node
    class Config(Configurable.Config["Mixture"]):
        """Settings for the mixture.

        Attributes:
            sources: Sources by name.
            weights: Weight of each source, by name. The weights need not sum to 1.
        """

        sources: Mapping[str, Node[Source]] = REQUIRED
        weights: Mapping[str, float] = REQUIRED

        def validate(self) -> Iterable[Problem]:
            """Check that every source has a positive weight, and every weight a source."""
            if not self.sources or set(self.sources) != set(self.weights):
                yield Problem(
                    path="weights",
                    message="must have one weight per source, and at least one source",
                    got=", ".join(sorted(self.weights)) or "none",
                    expected=", ".join(sorted(self.sources)) or "a source",
                )
            for name, weight in self.weights.items():
                if not 0 < weight < float("inf"):
                    yield Problem(path=f"weights.{name}", message="must be positive", got=str(weight))

    def __init__(self, cfg: Config, **offered: Any):
        self.weights = cfg.weights
        self.sources = {name: cfg.sources[name].build(**offered) for name in sorted(cfg.sources)}

    def parts(self, split: Split) -> tuple[Part, ...]:
        """Return the parts of all sources that have the split.

        Their weights are normalized to a sum of 1.
        """
        weighed = [(p, self.weights[name] * p.weight) for name, s in self.sources.items() for p in s.parts(split)]
        total = sum(w for _, w in weighed)
        return tuple(attrs.evolve(p, weight=w / total) for p, w in weighed)


DIGESTS = 64
"""Up to this many files have individual digests in the run lock. If there are more, all files share a single digest."""


def describe(source: Source) -> dict[str, Any]:
    """Return facts for the run lock.

    A resumed run uses them to detect that the data changed. The facts are the number of files, their bytes, a hash of
    splits, weights, names and sizes, a hash of the contents, and the digests of up to `DIGESTS` files.
    """
    parts = [(split, part) for split in ("train", "validation") for part in source.parts(split)]
    listed = [(split, part.weight, [(f.name, f.size) for f in part.files]) for split, part in parts]
    files = {f.name: f for _, part in parts for f in part.files}
    contents = [(split, part.weight, [(f.name, f.digest) for f in part.files]) for split, part in parts]
    facts = {
        "files": len(files),
        "bytes": sum(f.size for f in files.values()),
        "hash": _hash(listed),
        "content": _hash(contents),
    }
    if len(files) <= DIGESTS:
        facts["digests"] = {name: file.digest for name, file in sorted(files.items())}
    return facts


def summarize(facts: Mapping[str, Any]) -> str:
    """Return the number and the size of the files in the facts of `describe`, for the user."""
    return f"{counted(facts['files'], 'file')}, {counted(facts['bytes'], 'byte')}"


def _hash(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
