"""Export a run's parameters to MaxText, Tunix or plain Orbax checkpoints, and import parameters from them."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint.manifest import MANIFEST
from axlearn_core.compose import compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import Run
from axlearn_core.run.derive import derive_run, local_target, new_directory
from axlearn_core.run.notices import log_message
from axlearn_core.train.api import provenance
from axlearn_plugins_orbax import compat
from axlearn_plugins_orbax.file_names import METADATA, TREE_METADATA
from axlearn_plugins_orbax.layouts import LAYOUTS, nest
from axlearn_plugins_orbax.weights import OrbaxWeights


def export_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    layout: str = "maxtext",
    item: str | None = None,
    array_format: compat.ArrayFormat = compat.ArrayFormat(),
) -> Path:
    """Write the parameters of a run to `OUT/STEP/ITEM`. The step is committed atomically.

    Args:
        run_dir: Directory or URI of the run.
        out: Directory of checkpoints, which may contain other steps.
        step: Step of the checkpoint, or None for the newest.
        layout: One of `LAYOUTS`.
        item: Name of the item (default: the item of the layout).
        array_format: Storage format of the arrays.

    Returns:
        The directory of the step.

    Raises:
        CheckpointError: `run_dir` is not a run, or has no such checkpoint.
        RequestError: `out` already has the step.
        WorkError: The checkpoint cannot be written.
    """
    target, selected = local_target(out), LAYOUTS[layout]
    configure_devices(None)
    source = Run(run_dir).weights(step)
    folder = target.absolute() / str(source.step)
    if folder.exists():
        raise RequestError(f"{folder} already exists; nothing was written\n    fix: use another OUT or --step")
    tree = selected.pack(nest(source.read()), source.step)
    try:
        target.mkdir(parents=True, exist_ok=True)
        compat.start_save(str(folder), {item or selected.item: tree}, array_format).finish()
    except (OSError, ValueError) as error:
        for partial in target.glob(f"{folder.name}.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise WorkError(f"cannot write {folder}: {reason}") from error
    return folder


def import_checkpoint(
    directory: str | Path,
    out: str | Path,
    config: str | Path,
    *,
    step: int | None = None,
    layout: str | None = None,
    item: str | None = None,
    with_: Sequence[str] = (),
    set: Sequence[str] = (),
) -> OrbaxWeights:
    """Create a run at step 0 with the parameters of an Orbax checkpoint.

    Args:
        directory: Path or `gs://` URI of one checkpoint, or of a folder of checkpoints by step.
        out: Directory of the new run.
        config: Experiment, run file or run with the same parameters.
        step: Step of the checkpoint in `directory`, or None for the newest.
        layout: One of `LAYOUTS`, or None to detect it.
        item: Item with the parameters, or None to detect it.
        with_: Features to add to the experiment, as on the command line.
        set: Settings for the experiment, as on the command line.

    Raises:
        CheckpointError: Orbax cannot read the checkpoint, or its arrays do not match the model. The error lists every difference.
        RequestError: `out` already exists, or the experiment is invalid.
        WorkError: The run cannot be written.
    """
    new_directory(out)
    path, item_name = find_checkpoint(str(directory), step)
    configure_devices(None)
    resolved = resolve(Request.from_arguments(Run(config).config or config, with_=with_, set=set)).check()
    experiment: Any = resolved.config
    weights = OrbaxWeights(path, experiment, item=item or item_name, layout=layout)
    log_message(f"note: {path} has no axlearn manifest, so its files cannot be verified")

    def read(source: OrbaxWeights) -> Mapping[str, Any]:
        state = compose(experiment).state
        return source.read("**", {p: x.sharding for p, x in {**state.params, **state.variables}.items()})

    derive_run(weights, out, experiment, read, lock={"imported_from": path, "provenance": provenance(resolved)})
    return weights


def find_checkpoint(directory: str, step: int | None) -> tuple[str, str | None]:
    """Find a checkpoint in a directory, which is an item, a checkpoint, or a folder of checkpoints by step.

    Returns:
        (path of the checkpoint, name of the item if `directory` is an item, else None)

    Raises:
        RequestError: There is no checkpoint, there is none for this step, or an axlearn run wrote it.
    """
    root = compat.open_path(directory)
    names = sorted(p.name for p in root.iterdir()) if root.is_dir() else []
    item = root.name if TREE_METADATA in names and METADATA not in names else None
    if item is not None:
        root = root.parent
    elif METADATA not in names and not any((root / n / TREE_METADATA).exists() for n in names):
        steps = sorted(int(n) for n in names if n.isdecimal())
        if not steps or (step is not None and step not in steps):
            listed = f"steps: {', '.join(map(str, steps))}" if steps else f"files: {', '.join(names[:8]) or 'none'}"
            raise RequestError(
                f"{directory} has no Orbax checkpoint{'' if step is None else f' of step {step}'}\n    got: {listed}\n"
                "    expected: a checkpoint, or a folder of checkpoints named by their steps"
            )
        root, step = root / str(steps[-1] if step is None else step), None
    if step is not None:
        raise RequestError(f"{directory} is a single checkpoint\n    got: --step {step}\n    fix: remove --step")
    if (root / MANIFEST).exists():
        raise RequestError(
            f"{root} is a checkpoint of an axlearn run\n    fix: pass its run directory to the command that needs the weights"
        )
    return str(root), item
