"""Writes runs that were made and not trained: converted, merged, quantized or imported ones."""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from axlearn_core.checkpoint.base import WEIGHTS_ONLY
from axlearn_core.compose import Functional
from axlearn_core.config import Node, patch
from axlearn_core.config import map as map_nodes
from axlearn_core.contracts.capabilities import BeginsElsewhere
from axlearn_core.contracts.experiment import checkpoint_uri, loop_of
from axlearn_core.contracts.parts import Weights
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.run.asset_copies import collect_assets
from axlearn_core.run.record import RunDir
from axlearn_core.run.weights import split_weights

AnyWeights = TypeVar("AnyWeights", bound=Weights)
LAST = ("config.yaml", "config.json")
"""The files that make a directory a run, or a model: `appearing` moves them last."""


def derive_run(
    weights: AnyWeights,
    out: str | Path,
    config: Node[Any],
    transform: Callable[[AnyWeights], Mapping[str, Any]],
    *,
    new_step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    lock: Mapping[str, Any] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a run directory with one checkpoint of weights and no optimizer state; it appears in one piece.

    The new run begins its learner's state anew: moments at zero, a moving average at the parameters. It keeps its checkpoints in
    its own directory, and its loop does not begin with the weights of another run.

    Args:
        weights: what the run is made of.
        out: the new run directory, which must be empty or not exist.
        config: of the new run's trainer. The run gets copies of its assets.
        transform: from `weights` to the parameters and variables of the model in `config`, by dotted path.
        new_step: the step of the checkpoint; by default that of `weights`.
        extra: more for the checkpoint, such as the position in the data.
        lock: of the new run.
        add_files: adds files to the directory before it appears.

    Returns:
        The run directory.

    Raises:
        RequestError: `out` is taken or a URI, or the tensors are not those of the model.
        WorkError: the directory cannot be written.
    """
    path = new_directory(out)
    settings = _independent_config(config)
    functional = Functional.of(settings.model)
    expected = {**functional.abstract, **functional.variables}
    tensors = transform(weights)
    if wrong := [p for p in expected.keys() | tensors.keys() if _shape(tensors.get(p)) != _shape(expected.get(p))]:
        raise RequestError(f"the parameters are not those of the new model: {', '.join(sorted(wrong)[:5])}")
    params, variables = split_weights({p: jnp.asarray(tensors[p], s.dtype) for p, s in expected.items()}, functional)
    step = weights.step if new_step is None else new_step
    state = {"step": jnp.asarray(step, jnp.int32), "params": params, "variables": variables}
    with appearing(path) as partial:
        if add_files is not None:
            add_files(partial)
        _write_checkpoint(partial, settings, step, state, extra or {}, lock or {})
    return path


def new_directory(uri: str | Path) -> Path:
    """The local path of a directory that is to be written.

    Raises:
        RequestError: it is the URI of a storage, or it holds something.
    """
    path = local_target(uri)
    present = sorted(part.name for part in path.iterdir())[:3] if path.is_dir() else ["a file"] if path.exists() else []
    if present:
        leftover = fnmatch.filter(present, ".*.partial")
        remedy = "delete what a process that was killed left there, or give" if leftover else "give"
        raise RequestError(
            f"{path} is there already\n    got: {', '.join(leftover or present)}\n"
            f"    fix: {remedy} a directory that does not exist; nothing was written"
        )
    return path


def local_target(uri: str | Path) -> Path:
    """The local path to write to.

    Raises:
        RequestError: it is the URI of a storage.
    """
    text = str(uri)
    if "://" in text and not text.startswith("file://"):
        raise RequestError(
            f"cannot write to {text}: what is made goes to a local or mounted directory\n"
            f"    got: the scheme {text.partition('://')[0]!r}\n    expected: a path; runs are read from any storage\n"
            "    fix: give a path; `axlearn train` keeps checkpoints in a storage by --set checkpointer.uri=..."
        )
    return Path(text.removeprefix("file://")).expanduser()


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` in one piece. A process that is killed meanwhile leaves no `out`.

    If `out` exists (empty, it may be a link or a mounted volume), the files move into it, last the one that makes it a run.

    Raises:
        WorkError: it cannot be written.
    """
    out = Path(os.path.realpath(out))
    exists = out.is_dir()
    partial = (out if exists else out.parent) / f".{out.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if exists:
            for part in sorted(partial.iterdir(), key=lambda p: p.name in LAST):
                part.rename(out / part.name)
        else:
            partial.rename(out)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise WorkError(f"cannot write {out}: {error.strerror or error}{place}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_checkpoint(
    directory: Path,
    config: Any,
    step: int,
    state: Mapping[str, Any],
    extra: Mapping[str, Any],
    lock: Mapping[str, Any],
) -> None:
    run = RunDir(directory, resumes=False)
    stored_config, assets = collect_assets(config, required=False)
    text = write(stored_config, registry())
    run.write(text, lock, assets)
    checkpointer = config.checkpointer.build(directory=run.checkpoints)
    checkpointer.files = {"config.yaml": text}
    try:
        checkpointer.save(step, state, extra={**extra, "step": step, WEIGHTS_ONLY: True}, metrics={})
        checkpointer.wait()
    finally:
        checkpointer.close()


def _independent_config(config: Any) -> Any:
    """The config of a run that has its weights and keeps its checkpoints to itself."""

    def begun(part: Node[Any]) -> Node[Any]:
        return part.begun() if isinstance(part, BeginsElsewhere) else part

    loop = loop_of(config)
    settings = config if loop is None else patch(config, {"loop": map_nodes(loop, begun)})
    if checkpoint_uri(settings) is not None:
        settings = patch(settings, {"checkpointer.uri": None})
    return settings


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(array.shape)
