"""Parameters of a run as a checkpoint that MaxText, Tunix or plain Orbax reads, and the other way round."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint import split_weights
from axlearn_core.checkpoint.manifest import MANIFEST
from axlearn_core.checkpoint.weights import check_tensors
from axlearn_core.compose import Functional, compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.errors import RequestError, WorkError, nearest
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.resolved import Resolved
from axlearn_core.train.api import provenance, saved_config
from axlearn_core.train.session import log_message
from axlearn_plugins_finetune.runs import appearing, check_new, local_target, open_run, write_weights
from axlearn_plugins_orbax import api
from axlearn_plugins_orbax.foreign import METADATA, TREE_METADATA, ForeignTree
from axlearn_plugins_orbax.layouts import LAYOUTS, TreeLayout, find_layout, nest


def export_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    layout: str = "maxtext",
    item: str | None = None,
    array_format: api.ArrayFormat = api.ArrayFormat(),
) -> Path:
    """Writes the parameters of a run to `OUT/STEP/ITEM`; the step appears in one piece.

    Args:
        run_dir: the run, or the URI of one.
        out: the directory of checkpoints, which may have other steps.
        step: the checkpoint to take; None takes the newest.
        layout: one of `LAYOUTS`.
        item: the name of the item, instead of the layout's.
        array_format: how Orbax stores the arrays.

    Returns:
        The directory of the step.

    Raises:
        RequestError: it is not a run, or `out` has the step.
        WorkError: the checkpoint cannot be written.
    """
    target, chosen = local_target(out), LAYOUTS[layout]
    configure_devices(None)
    source = open_run(run_dir, step)
    folder = target.absolute() / str(source.step)
    if folder.exists():
        raise RequestError(f"{folder} is there already; nothing was written\n    fix: give another OUT or --step")
    tree = chosen.pack(nest(source.read()), source.step)
    try:
        target.mkdir(parents=True, exist_ok=True)
        api.start_save(str(folder), {item or chosen.item: tree}, array_format)()
    except (OSError, ValueError) as error:
        for partial in target.glob(f"{folder.name}.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise WorkError(f"cannot write {folder}: {reason}") from error
    return folder


@attrs.frozen
class ImportedTree:
    """A checkpoint that was imported.

    Attributes:
        path: of the checkpoint.
        layout: where its parameters are.
        count: how many parameters the model has.
        ignored: paths of arrays that are not parameters.
    """

    path: str
    layout: TreeLayout
    count: int
    ignored: Sequence[str]


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
) -> ImportedTree:
    """Writes a run at step 0 whose model has the parameters of an Orbax checkpoint.

    Args:
        directory: of one checkpoint, or of checkpoints by step; a path or gs://.
        out: the new run.
        config: whose parameters they are: an experiment, a run file or a run.
        step: which checkpoint of `directory`; None takes the newest.
        layout: one of `LAYOUTS`; None goes by the arrays.
        item: the item with the parameters; None goes by the names of items.
        with_: features to add to the experiment, as on the command line.
        set: settings to make in it.

    Raises:
        CheckpointError: Orbax cannot read it, or its arrays are not those of the model; lists every difference.
        RequestError: `out` is taken, or the experiment does not fit.
        WorkError: the run cannot be written.
    """
    target = local_target(out)
    check_new(target)
    path, own_item = find_checkpoint(str(directory), step)
    configure_devices(None)
    resolved = resolve_target(config, with_, set)
    experiment: Any = resolved.config
    if getattr(experiment.checkpointer, "uri", None) is not None:
        raise RequestError(
            f"checkpointer.uri: an import keeps its checkpoint in OUT\n    got: {experiment.checkpointer.uri}\n"
            "    fix: add --set checkpointer.uri=null"
        )
    source = choose_item(ForeignTree.open(path), item or own_item)
    (name,) = source.items
    stored = source.arrays()
    chosen = LAYOUTS[layout] if layout else find_layout(name, stored)
    paths = chosen.params(stored)
    functional = Functional.of(experiment.model)
    model = {**functional.abstract, **functional.variables}
    check_tensors(
        f"{path} (item {name}, layout {chosen.name})",
        model,
        {p: stored[of] for p, of in paths.items()},
        fix="give the experiment whose parameters these are, with its features and sizes (--with, --set), or another --layout",
    )
    log_message(f"note: {path} has no manifest of axlearn, so its files cannot be verified")
    tensors = _read(source, experiment, {p: paths[p] for p in model}, stored)
    params, variables = split_weights(tensors, functional)
    lock = {"imported_from": path, "provenance": provenance(resolved)}
    with appearing(target) as partial:
        write_weights(partial, experiment, params, variables, step=0, lock=lock)
    ignored = sorted(stored.keys() - paths.values())
    return ImportedTree(path, chosen, functional.num_parameters, ignored)


def resolve_target(config: str | Path, with_: Sequence[str], set: Sequence[str]) -> Resolved:
    """The experiment that an import is for, by its name, its file, or a run that has it."""
    stored = saved_config(config) if os.path.isdir(config) or "://" in str(config) else None
    return resolve(Request.of(config if stored is None else stored, with_=with_, set=set)).checked()


def find_checkpoint(directory: str, step: int | None) -> tuple[str, str | None]:
    """Finds one checkpoint in a directory, which has its files, its items or its steps.

    Returns:
        (path of the checkpoint, name of the item if `directory` is that of an item)

    Raises:
        RequestError: there is no checkpoint, or not of this step; or axlearn wrote it.
    """
    root = api.open_path(directory)
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
                "    expected: the directory of a checkpoint, or of checkpoints in folders named by their steps"
            )
        root, step = root / str(steps[-1] if step is None else step), None
    if step is not None:
        raise RequestError(f"{directory} is one checkpoint\n    got: --step {step}\n    fix: leave --step out")
    if (root / MANIFEST).exists():
        raise RequestError(
            f"{root} is a checkpoint of an axlearn run\n    fix: give its run directory to the command that needs the weights"
        )
    return str(root), item


def choose_item(tree: ForeignTree, item: str | None) -> ForeignTree:
    """The checkpoint with the one item that has the parameters.

    Raises:
        RequestError: several may be meant, or there is no item of this name.
    """
    names = list(tree.items)
    known = [layout.item for layout in LAYOUTS.values()]
    candidates = [item] if item is not None else names if len(names) == 1 else [n for n in known if n in names][:1]
    if not candidates or candidates[0] not in names:
        close = nearest(item or "", [str(n) for n in names], limit=1)
        raise RequestError(
            f"{tree.path}: {'which item has the parameters?' if item is None else f'there is no item {item!r}'}\n"
            f"    items: {', '.join(map(str, names))}\n    fix: give --item {close[0] if close else names[0]}"
        )
    return attrs.evolve(tree, items={candidates[0]: tree.items[candidates[0]]})


def _read(
    source: ForeignTree, config: Any, paths: Mapping[str, str], stored: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """The tensors of the model, in its shardings and dtypes."""
    state = compose(config).state
    specs = {**state.params, **state.variables}
    like = {
        of: jax.ShapeDtypeStruct(stored[of].shape, stored[of].dtype, sharding=specs[p].sharding)
        for p, of in paths.items()
    }
    loaded = source.read(like)
    changed = {
        (str(loaded[of].dtype), str(specs[p].dtype)) for p, of in paths.items() if loaded[of].dtype != specs[p].dtype
    }
    for old, new in sorted(changed):
        log_message(f"note: arrays of {old} become {new}, which the model has")
    return {p: loaded[of].astype(specs[p].dtype) for p, of in paths.items()}
