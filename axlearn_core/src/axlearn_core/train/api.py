"""`train`: resolve a request and train it, in one call."""

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint import open_storage
from axlearn_core.checkpoint.base import StorageCheckpointer
from axlearn_core.compose.devices import resolve_for_devices
from axlearn_core.config import Node, diff, encode
from axlearn_core.config.assets import assets as list_assets
from axlearn_core.config.assets import make_portable
from axlearn_core.contracts.experiment import checkpoint_uri, get_checkpointer_config
from axlearn_core.errors import CheckpointError, RequestError, StorageError
from axlearn_core.plugins.code_names import CodeNames, code_name
from axlearn_core.plugins.request import Request, write
from axlearn_core.plugins.resolve import UNNAMED, Resolved
from axlearn_core.run.asset_copies import align_assets, collect_assets, recover_assets
from axlearn_core.run.checkpoints import RunCheckpoint, open_checkpoint, open_folder
from axlearn_core.run.notices import log_message
from axlearn_core.run.record import RunDir, check_config, find_refused_changes, is_untrained, short_hash
from axlearn_core.run.run import Run
from axlearn_core.run.working_copy import is_remote, strip_slashes, working_copy
from axlearn_core.train.session import RollBack
from axlearn_core.train.trainer import Result, Trainer


def train(
    request: Request | str | Path | Node[Any],
    *,
    with_: Iterable[str] | Mapping[str, Mapping[str, Any] | None] = (),
    set: Iterable[str] | Mapping[str, Any] = (),  # the name of the command-line option
    steps: int | None = None,
    target: str | None = None,
    run_dir: str | Path | None = None,
    allow_drift: bool = False,
    restore_step: int | None = None,
    restart: bool = False,
) -> Result:
    """Train an experiment. Resume if the run directory has a checkpoint.

    Args:
        request: The name of an experiment, a YAML file, or a config.
        with_: Features, as on the command line (`"rope:theta=500000"`) or as a map from name to options.
        set: Settings, as on the command line (`"seed=1"`) or as a map from path to value.
        steps: Value of `max_steps`.
        target: Machine to run on, such as `cpu-8` (eight virtual devices) or `h100-8x64`. Its mesh rule applies; `none` applies
            no mesh rule. The default is the machine that JAX detects, with only the execution settings from its mesh rule.
        run_dir: A path or a storage URI. The default is `runs/<experiment>-<hash>`, with a hash of what the config computes.
        allow_drift: Resume a run even if its data or what it computes has changed.
        restore_step: Step of the checkpoint to resume from (default: the newest).
        restart: Start at step 0 and set existing metrics and checkpoints aside.

    A config may use code that is not registered as a component, such as a layer defined in a notebook. The run then logs a
    note: only a process that defines the same code can read its config file.

    Raises:
        RequestError: The request is invalid. Nothing was written.
        WorkError: Something failed later, for example because the disk was full.
    """
    from_python = not isinstance(request, Request)
    if not isinstance(request, Request):
        request = Request.from_arguments(request, with_=with_, set=set, steps=steps, target=target)
    resolved, destination = prepare(request, run_dir, restore_step)
    names = CodeNames(resolved.names)
    writer = names if from_python else resolved.names
    encode(resolved.config, writer)  # records unregistered code, which the stored config may also use
    stored_config, assets = collect_assets(resolved.config)
    facts: dict[str, Any] = {
        "experiment": resolved.title,
        "config_text": write(stored_config, writer),
        "assets": assets,
        "provenance": provenance(resolved),
        "machine": resolved.machine,
        "decisions": (*resolved.decisions, *names.decisions(resolved.config)),
    }
    checked = destination.check(resolved, allow_drift=allow_drift)
    trainer = resolved.config.build()
    try:
        return trainer.run(checked, restore_step=restore_step, restart=restart, **facts)
    except RollBack as back:  # only once: a run that restores a given step does not roll back
        log_message(f"rolling back to the checkpoint of step {back.step}")
        return trainer.run(attrs.evolve(checked, resumes=True), restore_step=back.step, **facts)


@attrs.frozen
class Destination:
    """The location of a run, and the run that already exists there.

    Attributes:
        path: Local directory.
        uri: URI of the run if the directory is a working copy, else None.
        old: Config of the run to resume, or None for a new run.
        untrained: True if the run to resume has only the weights of another run or model.
        notes: Notes for the user.
    """

    path: Path
    uri: str | None
    old: Node[Any] | None
    untrained: bool
    notes: tuple[str, ...]

    def check(self, resolved: Resolved, *, allow_drift: bool) -> RunDir:
        """Return the run directory if the config can be trained there.

        Does not write anything. Raises the same errors as `RunDir.check`.
        """
        options: Any = {"allow_drift": allow_drift, "find_source": resolved.setter}
        config: Any = resolved.config
        stored = None if self.old else find_stored_checkpoint(checkpoint_uri(config))
        run_dir = RunDir.check(self.path, config, self.old, uri=self.uri, untrained=self.untrained, **options)
        if stored is not None:
            check_config(f"{stored.uri} has checkpoints of a run", stored.config, config, **options)
        return attrs.evolve(run_dir, notes=(*self.notes, *run_dir.notes))


def prepare(request: Request, run_dir: str | Path | None, restore_step: int | None) -> tuple[Resolved, Destination]:
    """Resolve a training request and its destination. Write nothing.

    Args:
        request: A request for an experiment that trains.
        run_dir: See `train`.
        restore_step: Step of the checkpoint to resume from, or None for the newest.

    Raises:
        RequestError: The request is invalid, or its run directory cannot be read.
    """
    resolved = resolve_for_devices(request)
    config = resolved.config
    if not isinstance(config, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(config).__qualname__}; expected a Trainer.Config")
    path, uri, notes = locate_run(run_dir, resolved.title, config)
    old = read_resumed_config(uri or path, restore_step)
    untrained = old is not None and is_untrained(Run(uri or path).lock)
    config, recovered = recover_assets(config, old)
    return attrs.evolve(resolved, config=config), Destination(path, uri, old, untrained, (*notes, *recovered))


def locate_run(run_dir: str | Path | None, experiment: str, config: Any) -> tuple[Path, str | None, tuple[str, ...]]:
    """Return (local directory, URI if the directory is a working copy, notes for the user) for a run.

    Raises:
        RequestError: The URI cannot be read, the run cannot be stored at a URI, or several earlier runs match the config.
    """
    if run_dir and is_remote(run_dir):
        uri = strip_slashes(str(run_dir))
        _check_remote(uri, config)
        return working_copy(uri), uri, (f"{working_copy(uri)} is the working copy of {uri}",)
    path, notes = (Path(run_dir), ()) if run_dir else default_run_dir(experiment, config)
    return path, None, notes


def _check_remote(uri: str, config: Any) -> None:
    """Raise `RequestError` if a run cannot be stored at a URI."""
    if not isinstance(config.checkpointer, StorageCheckpointer.Config):
        raise RequestError(
            f"--run-dir {uri}: this checkpointer writes checkpoints to a local directory\n"
            f"    got: checkpointer {type(config.checkpointer).__qualname__}\n"
            "    expected: a checkpointer that writes to a storage, such as sharded\n"
            "    fix: use a local path as the run directory"
        )
    try:
        open_storage(uri).list("config.yaml")
    except StorageError as error:
        raise RequestError(
            f"--run-dir: {uri} cannot be read: {error}\n    fix: make it reachable, or use another location"
        ) from error


def find_stored_checkpoint(uri: str | None) -> RunCheckpoint | None:
    """Return the newest checkpoint that already exists at a `checkpointer.uri`, or None."""
    if uri is None:
        return None
    try:
        return open_folder(uri, open_storage(uri))
    except StorageError as error:
        raise RequestError(
            f"checkpointer.uri: {uri} cannot be read: {error}\n    fix: make it reachable, or use another location"
        ) from error


def default_run_dir(experiment: str, config: Node[Any]) -> tuple[Path, tuple[str, ...]]:
    """Return `runs/<experiment>-<hash>`, or an equivalent run that an earlier version named differently.

    Returns:
        (directory, notes for the user).

    Raises:
        RequestError: Several earlier runs compute the same result.
    """
    path = Path("runs") / f"{experiment}-{short_hash(config)}"
    if path.exists():
        return path, ()
    names = dict.fromkeys((experiment, UNNAMED))
    runs = [p for name in names for p in sorted(path.parent.glob(f"{glob.escape(name)}-{'[0-9a-f]' * 8}"))]
    earlier = [p for p in runs if _has_same_result(p, config)]
    if len(earlier) > 1:
        raise RequestError(
            f"several runs from earlier versions match this config: {', '.join(map(str, earlier))}\n"
            "    fix: choose the run to resume with --run-dir, or choose a new directory; nothing was written"
        )
    if earlier:
        return earlier[0], (f"{earlier[0]} was named by an earlier version; this version would name it {path}",)
    return path, ()


def _has_same_result(run_dir: Path, config: Node[Any]) -> bool:
    if RunDir(run_dir, resumes=True).read_lock().get("hash") == short_hash(config):
        return True
    try:  # an earlier version hashed different fields
        old = Run(run_dir).config
    except CheckpointError:  # it uses components that are not installed
        return False
    if old is None:
        return False
    old = align_assets(old, config)
    return not find_refused_changes(diff(old, config, code_name), old, config)


def read_resumed_config(run_dir: Path | str, step: int | None) -> Node[Any] | None:
    """Return the config in the checkpoint to resume from, or else the config in the run directory."""
    config: Any = Run(run_dir).config
    if config is None or not isinstance(get_checkpointer_config(config), StorageCheckpointer.Config):
        return config
    try:
        return open_checkpoint(run_dir, open_storage(run_dir), config, step).config
    except (CheckpointError, StorageError):
        return config  # the checkpoint is missing or damaged; restoring it reports the error


def provenance(resolved: Resolved) -> dict[str, list[dict[str, str]]]:
    """Return the history of each config path as JSON: which source set which value, in order.

    For an asset, the value is the path in the run's config file.
    """
    stored = {asset.path: asset.value for asset in list_assets(make_portable(resolved.config)[0])}
    sources = {asset.path: asset.value for asset in list_assets(resolved.config)}

    def value(path: str, new: object) -> str:
        return stored[path] if path in stored and new == sources[path] else str(new)

    return {
        path: [{"by": step.source, "value": value(path, step.new)} for step in steps]
        for path, steps in resolved.provenance.items()
    }
