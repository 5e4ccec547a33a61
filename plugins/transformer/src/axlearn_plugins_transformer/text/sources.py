"""Where documents come from: files, the standard library of the running Python, and weighted mixtures of sources."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import attrs

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.errors import InputError, Problem
from axlearn_plugins_transformer.text.data_files import is_url, list_files
from axlearn_plugins_transformer.text.fingerprint import DataFile, fingerprint_files
from axlearn_plugins_transformer.text.records import LINE_BYTES, FileRecords, Records, check_head, format_of
from axlearn_plugins_transformer.text.urls import PROTOCOLS, url_problem

Split = Literal["train", "validation"]


@attrs.frozen
class Part:
    """Records, their share of the training rows, and the files that they are in."""

    records: Records
    weight: float
    files: tuple[DataFile, ...]


class Source(Protocol):
    """Documents for training and validation."""

    def parts(self, split: Split) -> tuple[Part, ...]:
        """What a split consists of; empty where the source has no such split. Weights add up to 1."""
        ...


class Files(Configurable):
    """Text, JSONL and Parquet files, by paths, globs and fsspec URLs. The suffix says the format."""

    @node
    class Config(Configurable.Config["Files"]):
        """Validation data is in files of its own, or a fraction of the chunks of `paths`, chosen by a hash."""

        paths: str | tuple[str, ...] = ()
        validation_paths: str | tuple[str, ...] = ()
        validation_fraction: float = setting(default=0.0, ge=0, lt=1)
        format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
        text_field: str = "text"  # of JSONL and Parquet rows
        chunk_bytes: int | None = setting(default=None, gt=0)  # longest text read at once; None: by the amount of data
        # Of JSONL; a longer line is an error, because tokenizing one takes about a hundred times its size.
        max_line_bytes: int = setting(default=LINE_BYTES, kind="execution", gt=0, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """There is data, and one way of holding some out."""
            return check_paths(self.paths, self.validation_paths, self.validation_fraction)

    def __init__(self, cfg: Config):
        self.config = cfg
        self.train_files, self.validation_files = list_files(many(cfg.paths)), list_files(many(cfg.validation_paths))
        both = sorted({f.name for f in self.train_files} & {f.name for f in self.validation_files})
        if both:
            raise InputError(f"in both paths and validation_paths: {', '.join(both[:5])}")
        for file in (*self.train_files, *self.validation_files)[:64]:
            kind = format_of(file.path) if cfg.format == "auto" else cfg.format
            if kind != "parquet" and not is_url(file.path):
                check_head(file)

    def parts(self, split: Split) -> tuple[Part, ...]:
        """One part: the files, or the chunks of them that fall into the split."""
        cfg, held_out = self.config, split == "validation"
        files = self.validation_files if held_out and not cfg.validation_fraction else self.train_files

        def keep(file: DataFile, part: int) -> bool:
            key = f"{os.path.basename(file.name)}:{file.size}:{part}"  # the same wherever the file lies
            return not cfg.validation_fraction or is_held_out(key, cfg.validation_fraction) == held_out

        records = FileRecords.of(
            files,
            format=cfg.format,
            text_field=cfg.text_field,
            chunk_bytes=cfg.chunk_bytes,
            line_bytes=cfg.max_line_bytes,
            keep=keep,
        )
        return (Part(records, 1.0, files),) if len(records) else ()


def check_paths(paths: object, validation_paths: object, validation_fraction: float) -> Iterable[Problem]:
    """What is wrong with the fields of these names."""
    if not paths and not validation_paths:
        yield Problem(path="paths", message="names no data files", fix="set it to paths or globs")
    for name, patterns in (("paths", paths), ("validation_paths", validation_paths)):
        for path in many(patterns) if isinstance(patterns, (str, tuple)) else ():
            if problem := url_problem(path):
                expected = ", ".join(f"{p}://" for p in PROTOCOLS)
                yield Problem(path=name, message=problem, got=path, expected=f"a path, or one of {expected}")
    if validation_paths and validation_fraction:
        yield Problem(path="validation_fraction", message="cannot be used together with validation_paths")


def many(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    """One path or several, as several."""
    return (paths,) if isinstance(paths, str) and paths else tuple(paths)


_NOT_ITS_OWN = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}  # many systems do not install them, and some are not UTF-8 on purpose
_GENERATED = {"encodings", "pydoc_data"}  # near copies of each other: held out, they would flatter any model
EXCLUDED = frozenset(_NOT_ITS_OWN | _TESTS | _GENERATED)


class StandardLibrary(Configurable):
    """The Python source files of the running interpreter's standard library; nothing is downloaded.

    Tests and generated tables are left out. A file is held out for validation by a hash of its path relative to the
    library, so that every machine with this Python has the same split.
    """

    @node
    class Config(Configurable.Config["StandardLibrary"]):
        """How much is held out, as a fraction of the files."""

        validation_fraction: float = setting(default=0.05, gt=0, lt=1)
        chunk_bytes: int = setting(default=1 << 18, gt=0)

    def __init__(self, cfg: Config):
        self.config = cfg
        self.files = standard_library_files()

    def parts(self, split: Split) -> tuple[Part, ...]:
        """One part: the files of the split."""
        held_out = split == "validation"
        files = tuple(f for f in self.files if is_held_out(f.name, self.config.validation_fraction) == held_out)
        return (Part(FileRecords.of(files, format="text", chunk_bytes=self.config.chunk_bytes), 1.0, files),)


def standard_library_files() -> tuple[DataFile, ...]:
    """The `.py` files of the running interpreter's standard library, without `EXCLUDED`, sorted by relative path."""
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in EXCLUDED]
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and not os.path.islink(path) and (size := os.path.getsize(path)):
                files.append(DataFile(path, os.path.relpath(path, root).replace(os.sep, "/"), size))
    if not files:
        raise InputError(f"the standard library of this Python has no source files in {root}")
    return fingerprint_files(sorted(files, key=lambda f: f.name))


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a hash of `name` falls into the first `fraction` of all hashes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < fraction * 2**64


class Mixture(Configurable):
    """Several sources, each with its share of the rows of every batch."""

    @node
    class Config(Configurable.Config["Mixture"]):
        """Sources by name, and the weight of each; weights need not add up to 1."""

        sources: Mapping[str, Node[Source]] = REQUIRED
        weights: Mapping[str, float] = REQUIRED

        def validate(self) -> Iterable[Problem]:
            """Every source has a weight above zero, and every weight a source."""
            if not self.sources or set(self.sources) != set(self.weights):
                yield Problem(
                    path="weights",
                    message="each source needs one weight, and there is at least one source",
                    got=", ".join(sorted(self.weights)) or "none",
                    expected=", ".join(sorted(self.sources)) or "a source",
                )
            for name, weight in self.weights.items():
                if not 0 < weight < float("inf"):
                    yield Problem(path=f"weights.{name}", message="a weight is more than 0", got=str(weight))

    def __init__(self, cfg: Config, **offered: Any):
        self.weights = cfg.weights
        self.sources = {name: cfg.sources[name].build(**offered) for name in sorted(cfg.sources)}

    def parts(self, split: Split) -> tuple[Part, ...]:
        """The parts of all sources that have the split, weights multiplied and brought to a sum of 1."""
        weighed = [(p, self.weights[name] * p.weight) for name, s in self.sources.items() for p in s.parts(split)]
        total = sum(w for _, w in weighed)
        return tuple(attrs.evolve(p, weight=w / total) for p, w in weighed)


DIGESTS = 64
"""As many files as have their own digests in the run lock; of more there is one of all."""


def describe(source: Source) -> dict[str, Any]:
    """Facts for the run lock, by which a run that goes on notices other data.

    Files, bytes, a hash of splits, weights, names and sizes, a hash of the contents, and of up to `DIGESTS` files their own.
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


def _hash(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
