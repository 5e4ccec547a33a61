"""Opens a trained run, and writes one that was made and not trained."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from axlearn_core.checkpoint import RunWeights, open_weights, split_weights
from axlearn_core.checkpoint.assets import collect_assets
from axlearn_core.checkpoint.sharded import WEIGHTS_ONLY
from axlearn_core.compose import Functional
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import Node, patch
from axlearn_core.config import map as map_nodes
from axlearn_core.contracts.capabilities import BeginsElsewhere
from axlearn_core.errors import CheckpointError, RequestError, WorkError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.train.run_dir import RunDir
from axlearn_core.train.trainer import Trainer


def open_run(run_dir: str | Path, step: int | None = None) -> RunWeights:
    """The weights of a run at a step, by default the newest.

    Args:
        run_dir: a run directory, or the URI of one in any storage that is installed.
        step: which checkpoint.

    Raises:
        CheckpointError: it is not a run of a trainer, has no such checkpoint, or the checkpoint is damaged.
        RequestError: no plugin knows the scheme.
    """
    configure_devices(None)
    weights = open_weights(run_dir, step=step)
    if not isinstance(weights, RunWeights) or not isinstance(weights.experiment, Trainer.Config):
        reason = "it holds something else" if not isinstance(weights, RunWeights) else "its config is not a trainer's"
        raise CheckpointError(
            f"{run_dir} is not a run directory: {reason}\n"
            "    fix: give the directory that `axlearn train` named; a Hugging Face model becomes one by\n"
            "    `axlearn checkpoint import-hf`, adapters with their base by `axlearn lora merge`"
        )
    return weights


def local_target(uri: str | Path) -> Path:
    """The local path to write to.

    Raises:
        RequestError: it is a URI of a storage.
    """
    text = str(uri)
    if "://" in text and not text.startswith("file://"):
        raise RequestError(
            f"cannot write to {text}: what is made goes to a local or mounted directory\n"
            f"    got: the scheme {text.partition('://')[0]!r}\n    expected: a path; runs are read from any storage\n"
            "    fix: give a path; `axlearn train` keeps checkpoints in a storage by --set checkpointer.uri=..."
        )
    return Path(text.removeprefix("file://")).expanduser()


def check_new(out: Path) -> None:
    """Raises `RequestError` unless a new run can be written to `out`; to be asked before any work is done."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(
            f"{out} is there already\n    fix: give a directory that does not exist; nothing was written"
        )


LAST = ("config.yaml", "config.json")
"""What makes a directory a run, or a model."""


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` in one piece; of one that was cut off nothing is left but the folders above.

    Where `out` is there already (empty, it may be a link or a mounted volume), what was made moves into it, last the
    file that makes it a run.

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


def write_weights(
    directory: Path,
    config: Any,
    params: Mapping[str, Any],
    variables: Mapping[str, Any],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    lock: Mapping[str, Any] | None = None,
) -> None:
    """Writes what a run directory consists of: config, lock, and one checkpoint that holds weights and no optimizer state.

    A run that begins with it begins its learner's state anew: moments at zero, a moving average at the parameters.

    Args:
        directory: of the run.
        config: of its trainer. The run gets copies of its assets.
        params: path -> array.
        variables: path -> array, of the model's other variables.
        step: of the checkpoint.
        extra: what the checkpoint holds in addition, such as the position in the data.
        lock: of the run.

    Raises:
        WorkError: the directory cannot be written.
    """
    run = RunDir(directory, resumes=False)
    stored_config, assets = collect_assets(config, required=False)
    text = write(stored_config, registry())
    run.write(text, lock or {}, assets)
    checkpointer = config.checkpointer.build(directory=run.checkpoints)
    checkpointer.files = {"config.yaml": text}
    weights = {"step": jnp.asarray(step, jnp.int32), "params": dict(params), "variables": dict(variables)}
    try:
        checkpointer.save(step, weights, extra={**(extra or {}), "step": step, WEIGHTS_ONLY: True}, metrics={})
        checkpointer.wait()
    finally:
        checkpointer.close()


def write_run(
    out: Path,
    config: Node[Any],
    tensors: Mapping[str, Any],
    source: RunWeights,
    *,
    step: int | None = None,
    lock: Mapping[str, Any] | None = None,
) -> None:
    """Writes a run directory with one checkpoint of these weights; it appears in one piece.

    The position in the data is that of the run that it was made of. The run begins with a new learner's state.

    Args:
        out: the directory, which must not hold anything.
        config: the config of the new run, a trainer's.
        tensors: path -> array, of its model.
        source: the run that it was made of.
        step: the step of the checkpoint; by default that of `source`.
        lock: more for the run lock.

    Raises:
        RequestError: `out` is taken, or the tensors are not those of the model.
        WorkError: the directory cannot be written.
    """
    check_new(out)
    settings: Any = after_beginning(config)
    if getattr(settings.checkpointer, "uri", None) is not None:  # the new run keeps its checkpoints to itself
        settings = patch(settings, {"checkpointer.uri": None})
    functional = Functional.of(settings.model)
    expected = {**functional.abstract, **functional.variables}
    if wrong := [p for p in expected.keys() | tensors.keys() if _shape(tensors.get(p)) != _shape(expected.get(p))]:
        raise RequestError(f"the parameters are not those of the new model: {', '.join(sorted(wrong)[:5])}")
    params, variables = split_weights({p: jnp.asarray(tensors[p], s.dtype) for p, s in expected.items()}, functional)
    step, of = source.step if step is None else step, source.checkpoint.uri
    lock = {"made_from": str(of), "step": source.step, **(lock or {})}
    with appearing(out) as partial:
        write_weights(partial, settings, params, variables, step=step, extra=source.extra, lock=lock)


def after_beginning(config: Any) -> Any:
    """The config of a run whose weights are there: its loop does not begin with those of another run."""

    def begun(part: Node[Any]) -> Node[Any]:
        return part.begun() if isinstance(part, BeginsElsewhere) else part

    loop = getattr(config, "loop", None)
    return config if loop is None else patch(config, {"loop": map_nodes(loop, begun)})


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(array.shape)
