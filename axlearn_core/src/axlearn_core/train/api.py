"""`train`: from a request to a finished run, in one call."""

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint import open_storage
from axlearn_core.checkpoint.base import StorageCheckpointer
from axlearn_core.compose.devices import resolve_for_devices
from axlearn_core.config import Node, diff, encode
from axlearn_core.config.assets import assets as assets_of
from axlearn_core.config.assets import portable
from axlearn_core.contracts.experiment import checkpoint_uri, checkpointer_of
from axlearn_core.errors import CheckpointError, RequestError, StorageError
from axlearn_core.plugins.request import Request, write
from axlearn_core.plugins.resolve import Resolved
from axlearn_core.plugins.unregistered import CodeNames, code_name
from axlearn_core.run.asset_copies import aligned_assets, collect_assets, recovered_assets
from axlearn_core.run.checkpoints import RunCheckpoint, open_checkpoint, open_folder
from axlearn_core.run.notices import log_message
from axlearn_core.run.record import RunDir, check_config, refused_changes, short_hash
from axlearn_core.run.run import Run
from axlearn_core.run.working_copy import is_remote, working_copy
from axlearn_core.train.session import RollBack
from axlearn_core.train.trainer import Result, Trainer


def train(
    request: Request | str | Path | Node[Any],
    *,
    with_: Iterable[str] | Mapping[str, Mapping[str, Any] | None] = (),
    set: Iterable[str] | Mapping[str, Any] = (),  # what it is called on the command line
    steps: int | None = None,
    target: str | None = None,
    run_dir: str | Path | None = None,
    allow_drift: bool = False,
    restore_step: int | None = None,
    restart: bool = False,
) -> Result:
    """Trains, and continues by itself where the run directory has a checkpoint.

    Args:
        request: an experiment's name, a YAML file, or a config.
        with_: features, as on the command line (`"rope:theta=500000"`) or as name -> options.
        set: settings, as on the command line (`"seed=1"`) or as path -> value.
        steps: sets `max_steps`.
        target: the machine to run on, whose mesh rule holds: `cpu-8` (eight virtual devices), `h100-8x64`; `none` for no
            mesh rule. By default what JAX finds, with what is execution in its mesh rule.
        run_dir: a path, or the URI of a storage; by default `runs/<experiment>-<hash of the config>`.
        allow_drift: continue a run although what it computes changed.
        restore_step: continue from this checkpoint instead of the newest.
        restart: begin at step 0 although the run has metrics or checkpoints, which are set aside.

    A config may hold code that is not registered as a component, such as a layer of a notebook. The run says so: its config
    file is read back only by a process that has defined the same code.

    Raises:
        RequestError: anything that is wrong with the request; nothing was written.
        WorkError: what failed later, such as a full disk.
    """
    from_python = not isinstance(request, Request)
    if not isinstance(request, Request):
        request = Request.of(request, with_=with_, set=set, steps=steps, target=target)
    resolved, destination = prepare(request, run_dir, restore_step)
    names = CodeNames(resolved.names)
    writer = names if from_python else resolved.names
    encode(resolved.config, writer)  # the run's config may name the same values of code
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
    except RollBack as back:  # once: what is asked for by its step is not gone back from
        log_message(f"going back to the checkpoint of step {back.step}")
        return trainer.run(attrs.evolve(checked, resumes=True), restore_step=back.step, **facts)


@attrs.frozen
class Destination:
    """The place of a run, and the run that is there already.

    Attributes:
        path: the local directory.
        uri: of the run, if the directory is a working copy.
        old: the config of the run that is continued; None for a new one.
        notes: for the user.
    """

    path: Path
    uri: str | None
    old: Node[Any] | None
    notes: tuple[str, ...]

    def check(self, resolved: Resolved, *, allow_drift: bool) -> RunDir:
        """The run directory, if the config may be trained there. Raises as `RunDir.check`; nothing is written."""
        options: Any = {"allow_drift": allow_drift, "set_by": resolved.setter}
        config: Any = resolved.config
        elsewhere = None if self.old else stored_beside(checkpoint_uri(config))
        run_dir = RunDir.check(self.path, config, self.old, uri=self.uri, **options)
        if elsewhere is not None:
            check_config(f"{elsewhere.uri} has checkpoints of a run", elsewhere.config, config, **options)
        return attrs.evolve(run_dir, notes=(*self.notes, *run_dir.notes))


def prepare(request: Request, run_dir: str | Path | None, restore_step: int | None) -> tuple[Resolved, Destination]:
    """The config that a request to train stands for, and where it goes. Nothing is written.

    Args:
        request: an experiment that trains.
        run_dir: see `train`.
        restore_step: of the checkpoint to continue from; None is the newest.

    Raises:
        RequestError: the request is wrong, or its run directory cannot be read.
    """
    resolved = resolve_for_devices(request)
    config = resolved.config
    if not isinstance(config, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(config).__qualname__}; expected a Trainer.Config")
    path, uri, notes = place_of_run(run_dir, resolved.title, config)
    old = trained_config(uri or path, restore_step)
    config, recovered = recovered_assets(config, old)
    return attrs.evolve(resolved, config=config), Destination(path, uri, old, (*notes, *recovered))


def place_of_run(run_dir: str | Path | None, experiment: str, config: Any) -> tuple[Path, str | None, tuple[str, ...]]:
    """(the local directory, the URI where it is a copy of one, notes for the user) of a run.

    Raises:
        RequestError: the URI cannot be read, or this run cannot be kept at one; or several earlier runs compute the same.
    """
    if run_dir and is_remote(run_dir):
        uri = str(run_dir).rstrip("/")
        _check_remote(uri, config)
        return working_copy(uri), uri, (f"the files of {uri} are worked on in {working_copy(uri)}",)
    path, notes = (Path(run_dir), ()) if run_dir else default_run_dir(experiment, config)
    return path, None, notes


def _check_remote(uri: str, config: Any) -> None:
    """Raises `RequestError` where a run cannot be kept at a URI."""
    if not isinstance(config.checkpointer, StorageCheckpointer.Config):
        raise RequestError(
            f"--run-dir {uri}: this checkpointer keeps checkpoints in a directory\n"
            f"    got: checkpointer {type(config.checkpointer).__qualname__}\n"
            "    expected: a checkpointer over a storage, such as sharded\n"
            "    fix: give a path as run directory"
        )
    try:
        open_storage(uri).list("config.yaml")
    except StorageError as error:
        raise RequestError(
            f"--run-dir: {uri} cannot be read: {error}\n    fix: make it reachable, or give another place"
        ) from error


def stored_beside(uri: str | None) -> RunCheckpoint | None:
    """The newest checkpoint that is at a `checkpointer.uri` already; None if there is none."""
    if uri is None:
        return None
    try:
        return open_folder(uri, open_storage(uri))
    except StorageError as error:
        raise RequestError(
            f"checkpointer.uri: {uri} cannot be read: {error}\n    fix: make it reachable, or give another place"
        ) from error


def default_run_dir(experiment: str, config: Node[Any]) -> tuple[Path, tuple[str, ...]]:
    """`runs/<experiment>-<hash>`; where there is none, the run of the same mathematics that an earlier version named.

    Returns:
        The directory, and notes about it for the user.

    Raises:
        RequestError: several earlier runs compute what this one does.
    """
    path = Path("runs") / f"{experiment}-{short_hash(config)}"
    if path.exists():
        return path, ()
    pattern = f"{glob.escape(experiment)}-{'[0-9a-f]' * 8}"
    earlier = [p for p in sorted(path.parent.glob(pattern)) if _computes_the_same(p, config)]
    if len(earlier) > 1:
        raise RequestError(
            f"several runs of earlier versions compute what this one does: {', '.join(map(str, earlier))}\n"
            "    fix: say which one to continue with --run-dir, or name a new directory; nothing was written"
        )
    if earlier:
        return earlier[0], (f"{earlier[0]} was named by an earlier version; today it would be {path}",)
    return path, ()


def _computes_the_same(run_dir: Path, config: Node[Any]) -> bool:
    if RunDir(run_dir, resumes=True).read_lock().get("hash") == short_hash(config):
        return True
    try:  # an earlier version hashed other fields
        old = Run(run_dir).config
    except CheckpointError:  # of components that are not installed now
        return False
    if old is None:
        return False
    old = aligned_assets(old, config)
    return not refused_changes(diff(old, config, code_name), old, config)


def trained_config(run_dir: Path | str, step: int | None) -> Node[Any] | None:
    """What a run was trained with: the config in the checkpoint that it goes on from, else that of the run directory."""
    config: Any = Run(run_dir).config
    if config is None or not isinstance(checkpointer_of(config), StorageCheckpointer.Config):
        return config
    try:
        return open_checkpoint(run_dir, open_storage(run_dir), config, step).config
    except (CheckpointError, StorageError):
        return config  # there is none, or it is damaged, which is said where it is restored


def provenance(resolved: Resolved) -> dict[str, list[dict[str, str]]]:
    """Path -> who set it to what, first to last, as JSON. Assets have the values that the run's config has."""
    stored = {asset.path: asset.value for asset in assets_of(portable(resolved.config)[0])}
    sources = {asset.path: asset.value for asset in assets_of(resolved.config)}

    def value(path: str, new: object) -> str:
        return stored[path] if path in stored and new == sources[path] else str(new)

    return {
        path: [{"by": step.set_by, "value": value(path, step.new)} for step in steps]
        for path, steps in resolved.provenance.items()
    }
