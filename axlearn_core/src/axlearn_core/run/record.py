"""Run directories, and checks before a run is resumed.

config.yaml       resolved config
files/            copies of assets, such as the tokenizer
run.lock.json     versions, devices, flags, kernels, data, provenance, and the fingerprint of the compiled step
metrics.jsonl     one object per logged step
checkpoints/      one directory per step
processes.jsonl   starts, deaths, and replacements of processes, if a supervisor writes it
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.config import Change, Node, diff
from axlearn_core.config.files import read_regular
from axlearn_core.config.kinds import DECISIVE, change_kinds, mathematics, microbatches
from axlearn_core.config.types import show
from axlearn_core.contracts.experiment import belongs_to_weights
from axlearn_core.errors import CheckpointError, RequestError, StorageError, WorkError
from axlearn_core.plugins.code_names import code_name, stable_repr
from axlearn_core.plugins.decisions import Decision
from axlearn_core.run.asset_copies import align_assets, hash_asset_paths, write_assets

SourceLookup = Callable[[str], str | None]
CONFIG, LOCK = "config.yaml", "run.lock.json"
SUPERVISOR = ("processes.jsonl", "launch")
"""Files that a supervisor may write before the run starts: process events, logs, and compiled programs."""
LOCK_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("versions", "flags", "data", "provenance", "mesh"), dict),
    **dict.fromkeys(("run", "hash", "python", "devices", "hlo_fingerprint"), str),
    "kernels": list,
    "saved": bool,
}


def batch_dependence(config: object) -> tuple[str, ...]:
    """Return the reasons why the number of microbatches affects the results. Empty if it does not."""
    from axlearn_core.compose import ModelAndObjective  # imports JAX, which readers of runs do not need

    return ModelAndObjective.from_config(config).batch_dependence


def short_hash(config: Node[Any]) -> str:
    """Return an eight-digit hash of what the config computes, ignoring execution settings and the number of steps."""
    config = hash_asset_paths(config)
    decisive = mathematics(config)
    cut = microbatches(config)
    if cut and batch_dependence(config):
        decisive |= cut
    text = json.dumps({path: stable_repr(value) for path, value in decisive.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@attrs.frozen
class RefusedChange:
    """A config change that prevents resuming a run. `reason` may be empty if the field's kind explains it."""

    change: Change
    reason: str = ""


def find_refused_changes(changes: tuple[Change, ...], old: Node[Any], config: Node[Any]) -> list[RefusedChange]:
    """Return the changes between the config of a run and a new config that affect what the run computes."""
    kinds = change_kinds(changes, old, config)
    reasons = batch_dependence(config) if any(kind == "microbatches" for _, kind in kinds) else ()
    return [
        RefusedChange(change, f"different microbatches: {', '.join(reasons)}" if kind == "microbatches" else "")
        for change, kind in kinds
        if kind in DECISIVE or (kind == "microbatches" and reasons)
    ]


@attrs.frozen
class RunDir:
    """A run directory that has been checked against a config.

    Attributes:
        path: Local directory. For a run at a URI, it is a working copy.
        resumes: True if the directory contains a run that will be resumed.
        notes: Messages about changes to the config.
        allow_drift: True if changes that affect what the run computes are allowed.
        uri: URI of the run, or None.
    """

    path: Path
    resumes: bool
    notes: tuple[str, ...] = ()
    allow_drift: bool = False
    uri: str | None = None

    @property
    def checkpoints(self) -> Path | str:
        """Location of the checkpoints. If the run has a URI, they are stored there directly."""
        return self.path / "checkpoints" if self.uri is None else f"{self.uri}/checkpoints"

    @classmethod
    def check(
        cls,
        path: Path,
        config: Node[Any],
        old: Any,
        *,
        allow_drift: bool,
        find_source: SourceLookup = {}.get,
        uri: str | None = None,
        untrained: bool = False,
    ) -> "RunDir":
        """Decide whether to start a new run or to resume one. This does not write anything.

        Args:
            path: Directory, which may not exist.
            config: Resolved config of the request.
            old: Config in the directory, or None.
            allow_drift: Resume even if the new config computes something different.
            find_source: Returns the source of a setting by config path, or None. Used in error messages.
            uri: URI of the run, if the directory is a working copy.
            untrained: See `check_config`.

        Raises:
            RequestError: If the directory contains something other than a run.
            CheckpointError: If it contains a run of a different experiment.
        """
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"the run directory {str(path)!r} is not valid UTF-8\n    fix: use another --run-dir"
            ) from None
        if uri is None and (scheme := re.match(r"([a-z][a-z0-9+.-]+):/", str(path))):
            raise RequestError(
                f"the run directory {str(path)!r} is a URI with the scheme {scheme[1]!r}\n"
                "    expected: a local or mounted directory\n"
                f"    fix: use a path; only `axlearn train --run-dir {scheme[1]}://...` can write runs to storages"
            )
        if path.exists() and not path.is_dir():
            raise RequestError(f"{path} is a file\n    fix: use another --run-dir")
        if old is None:
            names = sorted(p.name for p in path.iterdir()) if path.exists() else []
            # Ignore the lock file of a trainer that died, and the files of a supervisor.
            unknown_files = [n for n in names if not n.startswith(".trainer-") and n not in SUPERVISOR][:5]
            if unknown_files and uri is None:
                raise RequestError(
                    f"{path} is not empty and is not a run: it has no config.yaml\n    got: {', '.join(unknown_files)}\n"
                    "    fix: use another --run-dir; nothing was written"
                )
            return cls(path, resumes=False, allow_drift=allow_drift, uri=uri)
        options: Any = {"allow_drift": allow_drift, "find_source": find_source, "untrained": untrained}
        changes = check_config(f"{uri or path} contains a run", old, config, **options)
        notes = tuple(f"changed since the run started: {show_change(c)}" for c in changes)
        return cls(path, resumes=True, notes=notes, allow_drift=allow_drift, uri=uri)

    def write(self, config_text: str, lock: Mapping[str, Any], assets: Mapping[str, bytes] = {}) -> None:
        """Write the config, the lock, and the assets (contents by path in the run).

        Raises:
            WorkError: If the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_assets(LocalStorage(self.path), assets)
            write_whole(self.path / CONFIG, config_text)
            write_whole(self.path / LOCK, json.dumps(lock, indent=1, default=str) + "\n")
        except (OSError, StorageError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise WorkError(f"cannot write the run directory {self.path}: {reason}") from error

    def read_lock(self) -> dict[str, Any]:
        """Return the lock, or an empty dict if it is missing. Raise `CheckpointError` if it is damaged."""
        file = self.path / LOCK
        try:
            return parse_lock(read_regular(file), str(file))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _damaged_lock(str(file), str(error).partition("\n")[0][:200]) from None

    def write_fact(self, name: str, value: object) -> None:
        """Add to the lock a fact that is known only after compilation."""
        lock = self.read_lock() | {name: value}
        write_whole(self.path / LOCK, json.dumps(lock, indent=1, default=str) + "\n")

    def add_decision(self, decision: Decision) -> None:
        """Add to the lock a decision that was made after the run had started."""
        self.write_fact("decisions", [*self.read_lock().get("decisions", ()), attrs.asdict(decision)])


def parse_lock(data: bytes, name: str) -> dict[str, Any]:
    """Parse `run.lock.json`.

    Args:
        data: Contents of the file.
        name: Name of the file, for use in the error message.

    Raises:
        CheckpointError: If the file is damaged.
    """
    try:
        lock = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged_lock(name, str(error).partition("\n")[0][:200] or type(error).__name__) from None
    if not isinstance(lock, dict):
        raise _damaged_lock(name, f"a {type(lock).__name__}")
    for key, kind in LOCK_TYPES.items():
        if key in lock and not isinstance(lock[key], kind):
            raise _damaged_lock(name, f"{key}: {show(lock[key])}")
    return lock


def _damaged_lock(name: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is damaged\n    got: {problem}\n"
        "    fix: restore it, for example from the folder of a checkpoint, or delete it; the next run writes a new one"
    )


def check_config(
    subject: str,
    old: Node[Any],
    config: Node[Any],
    *,
    allow_drift: bool,
    find_source: SourceLookup = {}.get,
    untrained: bool = False,
) -> tuple[Change, ...]:
    """Return the changes between the config of a run and a new config.

    Args:
        subject: Name of the run, for use in the error message.
        old: Config of the run.
        config: New config.
        allow_drift: Accept changes that affect what the run computes.
        find_source: Returns the source of a setting by config path, or None.
        untrained: The run has only weights and has not been trained yet. Only its model and tokenizer must stay the same.

    Raises:
        CheckpointError: If the changes affect what the run computes. The message starts with `subject`.
    """
    old = align_assets(old, config)
    changes = diff(old, config, code_name)
    refused = find_refused_changes(changes, old, config)
    if untrained:
        refused = [refusal for refusal in refused if belongs_to_weights(refusal.change.path)]

    def line(refusal: RefusedChange) -> str:
        remarks = "; ".join(r for r in (refusal.reason, find_source(refusal.change.path)) if r)
        return f"    {show_change(refusal.change)}" + (f" ({remarks})" if remarks else "")

    if refused and not allow_drift:
        raise CheckpointError(
            f"{subject} with a different config; nothing was written\n"
            + "\n".join(map(line, refused[:12]))
            + (f"\n    and {len(refused) - 12} more" if len(refused) > 12 else "")
            + "\n    fix: use another --run-dir, or resume anyway with --allow-drift; if a feature changed the parameters,"
            "\n    `axlearn convert` creates a new run from this one, or explains why it cannot"
        )
    return changes


def show_change(change: Change) -> str:
    """Format a change as `path: old -> new`."""
    return f"{change.path}: {change.old!r} -> {change.new!r}"


def lock_drift(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe changes in versions, devices, and flags since the lock was written.

    The lock of a derived run does not contain these values.
    """
    notes = []
    old_versions, new_versions = old.get("versions", {}), new.get("versions", {})
    for name in sorted({*old_versions, *new_versions}) if old_versions else ():
        before, after = old_versions.get(name), new_versions.get(name)
        if before != after:
            notes.append(f"{name} was {before or 'not installed'}, is {after or 'not installed'}")
    for key in ("python", "devices", "flags"):
        if key in old and old[key] != new.get(key):
            notes.append(f"{key}: was {old[key]}, is {new.get(key)}")
    return notes


def is_untrained(lock: Mapping[str, Any]) -> bool:
    """Return True for the lock of a derived run that no process has trained yet. Training records versions in the lock."""
    return get_origin(lock) is not None and "versions" not in lock


def get_origin(lock: Mapping[str, Any]) -> str | None:
    """Return the run or model that a run was derived from, or None if it was trained from scratch."""
    origin = lock.get("made_from") or lock.get("imported_from")
    return str(origin) if origin else None


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file atomically.

    Args:
        path: The file.
        text: Its content.
        durable: Whether to wait until the content is on the disk, so that it survives a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
