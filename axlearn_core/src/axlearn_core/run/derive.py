"""Write derived runs, which are converted, merged, quantized, or imported instead of trained."""

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
from axlearn_core.contracts.capabilities import LoadsInitialWeights
from axlearn_core.contracts.experiment import checkpoint_uri, get_loop_config
from axlearn_core.contracts.parts import Weights
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.run.asset_copies import collect_assets
from axlearn_core.run.record import RunDir
from axlearn_core.run.weights import split_weights

AnyWeights = TypeVar("AnyWeights", bound=Weights)
LAST = ("config.yaml", "config.json")
"""Files that identify a directory as a run or a model. `create_directory` moves them last."""


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
    """Write a run directory atomically, with one checkpoint that contains weights but no optimizer state.

    When the new run is trained, its learner state is initialized: moments are zero, and the moving average equals the
    parameters. The new run stores checkpoints in its own directory, and its loop does not load weights from elsewhere.

    Args:
        weights: Source weights.
        out: New run directory, which must either be empty or not exist yet.
        config: Trainer config of the new run. Its assets are copied to the run.
        transform: Returns the parameters and variables of the model in `config` by dotted path.
        new_step: Step of the checkpoint (default: the step of `weights`).
        extra: Additional data for the checkpoint, such as the position in the input.
        lock: Lock of the new run.
        add_files: Adds files to the directory before it becomes visible.

    Returns:
        The run directory.

    Raises:
        RequestError: If `out` is not empty or is a URI, or if the tensors do not match the model.
        WorkError: If the directory cannot be written.
    """
    path = new_directory(out)
    settings = _independent_config(config)
    functional = Functional.from_config(settings.model)
    expected = {**functional.abstract, **functional.variables}
    tensors = transform(weights)
    if wrong := [p for p in expected.keys() | tensors.keys() if _shape(tensors.get(p)) != _shape(expected.get(p))]:
        raise RequestError(f"the parameters do not match the new model: {', '.join(sorted(wrong)[:5])}")
    params, variables = split_weights({p: jnp.asarray(tensors[p], s.dtype) for p, s in expected.items()}, functional)
    step = weights.step if new_step is None else new_step
    state = {"step": jnp.asarray(step, jnp.int32), "params": params, "variables": variables}
    with create_directory(path) as partial:
        if add_files is not None:
            add_files(partial)
        _write_checkpoint(partial, settings, step, state, extra or {}, lock or {})
    return path


def new_directory(uri: str | Path) -> Path:
    """Return the local path of a new directory.

    Raises:
        RequestError: If it is a storage URI, or if the directory is not empty.
    """
    path = local_target(uri)
    present = sorted(part.name for part in path.iterdir())[:3] if path.is_dir() else ["a file"] if path.exists() else []
    if present:
        leftover = fnmatch.filter(present, ".*.partial")
        remedy = "delete the files of a killed process, or use" if leftover else "use"
        raise RequestError(
            f"{path} already exists\n    got: {', '.join(leftover or present)}\n"
            f"    fix: {remedy} a directory that does not exist; nothing was written"
        )
    return path


def local_target(uri: str | Path) -> Path:
    """Return the local path to write to.

    Raises:
        RequestError: If it is a storage URI.
    """
    text = str(uri)
    if "://" in text and not text.startswith("file://"):
        raise RequestError(
            f"cannot write to {text}: the output must be a local or mounted directory\n"
            f"    got: the scheme {text.partition('://')[0]!r}\n    expected: a path; only reading supports any storage\n"
            "    fix: use a path; to store checkpoints of `axlearn train` in a storage, use --set checkpointer.uri=..."
        )
    return Path(text.removeprefix("file://")).expanduser()


@contextlib.contextmanager
def create_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `out` at the end.

    If `out` exists, it must be empty and may be a link or a mounted volume. The files are then moved into it, and the file
    that identifies it as a run is moved last.

    Raises:
        WorkError: If the directory cannot be written.
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
    """Return the config of a run that has its own weights and checkpoints."""

    def detach(part: Node[Any]) -> Node[Any]:
        return part.without_initial_weights() if isinstance(part, LoadsInitialWeights) else part

    loop = get_loop_config(config)
    settings = config if loop is None else patch(config, {"loop": map_nodes(loop, detach)})
    if checkpoint_uri(settings) is not None:
        settings = patch(settings, {"checkpointer.uri": None})
    return settings


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(array.shape)
