"""`train`: from a request to a finished run, in one call."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.checkpoint.run import read_run_config
from axlearn_core.compose.devices import settle
from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_core.train.run_dir import RunDir, default_run_dir
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
) -> Result:
    """Trains, and continues by itself where the run directory has a checkpoint.

    Args:
        request: an experiment's name, a YAML file, or a config.
        with_: features, as on the command line (`"rope:theta=500000"`) or as name -> options.
        set: settings, as on the command line (`"seed=1"`) or as path -> value.
        steps: sets `max_steps`.
        target: the machine to run on, whose mesh rule holds: `cpu-8` (eight virtual devices), `h100-8x64`; by default what
            JAX finds, without a rule.
        run_dir: by default `runs/<experiment>-<hash of the config>`.
        allow_drift: continue a run although its architecture or data changed.
        restore_step: continue from this checkpoint instead of the newest.

    Raises:
        RequestError: anything that is wrong with the request; nothing was written.
        WorkError: what failed later, such as a full disk.
    """
    if not isinstance(request, Request):
        request = Request.of(request, with_=with_, set=set, steps=steps, target=target)
    resolved = resolve(request).checked()
    settle(resolved.machine)
    if not isinstance(resolved.config, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(resolved.config).__qualname__}; expected a Trainer.Config")
    path = Path(run_dir) if run_dir else default_run_dir(resolved.title, resolved.config)
    text = resolved.to_yaml()
    old = saved_config(path)
    checked = RunDir.check(path, resolved.config, old, allow_drift=allow_drift, who=resolved.setter)
    trainer = resolved.config.build()
    return trainer.run(
        checked,
        experiment=resolved.title,
        config_text=text,
        provenance=provenance(resolved),
        restore_step=restore_step,
        machine=resolved.machine,
    )


def saved_config(run_dir: Path) -> Node[Any] | None:
    """The resolved config of a run directory; None where there is no config file.

    Raises:
        CheckpointError: the file cannot be read back.
    """
    return read_run_config(LocalStorage(run_dir), run_dir)


def provenance(resolved: Resolved) -> dict[str, list[dict[str, str]]]:
    """Path -> who set it to what, first to last, as JSON."""
    return {
        path: [{"by": step.who, "value": str(step.new)} for step in steps]
        for path, steps in resolved.provenance.items()
    }
