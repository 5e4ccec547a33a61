"""Create a job, and check that the config resolves and that the hosts fit the target and the mesh."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_core.contracts.experiment import batch_size, num_shards
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request, is_file
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.run_files import read_bases, read_document


def make_job(
    experiment: str,
    train: Mapping[str, Any],
    *,
    run_dir: str | None = None,
    name: str | None = None,
    hosts: int | None = None,
    spares: int = 0,
    processes_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    options: Any = None,
) -> Job:
    """Create and check a job.

    Args:
        experiment: Name of an experiment, or path of a run file.
        train: Options for `axlearn train` as parsed by click: `with_`, `without`, `set_`, `steps`, `target`, `allow_drift`.
        run_dir: Run directory (default: as for `axlearn train`).
        name: Name of the job (default: the last part of the run directory).
        hosts: Number of hosts that train (default: the target's number of hosts, or 1).
        spares: Number of spare hosts.
        processes_per_host: Trainer processes on each host.
        environment: Environment variables of every trainer.
        options: Options for the launcher.

    Raises:
        RequestError: The config is invalid, or the hosts do not fit it.
    """
    from axlearn_core.checkpoint.storage import check_uri
    from axlearn_core.train.api import default_run_dir

    request = Request.from_arguments(
        experiment,
        with_=train.get("with_", ()),
        without=train.get("without", ()),
        set=train.get("set_", ()),
        steps=train.get("steps"),
        target=train.get("target"),
    )
    resolved = resolve(request).check()
    check_uri(resolved.config)
    hosts = check_hosts(resolved.config, resolved.machine, hosts, processes_per_host)
    place = run_dir or str(default_run_dir(resolved.title, resolved.config)[0])
    if not re.match(r"[a-z][a-z0-9+.-]+://", place):
        place = str(Path(place).absolute())
    return Job(
        name=_job_name(name or place.rstrip("/").rpartition("/")[2]),
        experiment=experiment,
        document=read_document(experiment) if is_file(experiment) else None,
        bases=read_bases(experiment) if is_file(experiment) else {},
        words=_train_words(train),
        run_dir=place,
        hosts=hosts,
        spares=spares,
        processes_per_host=processes_per_host,
        config=resolved.config,
        machine=resolved.machine,
        environment=dict(environment or {}),
        options=options,
    )


def check_hosts(config: Any, machine: Machine | None, hosts: int | None, processes_per_host: int) -> int:
    """Return the number of hosts that train.

    Raises:
        RequestError: The target has a different number of hosts, or the mesh or batch cannot be split over the processes.
    """
    if machine is not None and (machine.target.size == "hosts" or machine.chips > machine.chips_per_host):
        needed = max(1, machine.chips // machine.chips_per_host)
        if hosts is not None and hosts != needed:
            raise RequestError(
                f"the target {machine.name!r} has {needed} hosts of {machine.chips_per_host} chips\n"
                f"    got: --hosts {hosts}\n    fix: --hosts {needed}, or another --target"
            )
        hosts = needed
    hosts = hosts or 1
    processes = hosts * processes_per_host
    shape = dict(config.mesh.shape)
    product = 1
    for size in shape.values():
        product *= abs(size)  # -1 stands for the remaining devices
    if shape and -1 not in shape.values() and product % processes:
        raise RequestError(
            f"mesh.shape {shape} has {product} devices, which cannot be divided evenly among {processes} processes\n"
            f"    got: --hosts {hosts} --processes-per-host {processes_per_host}\n"
            "    fix: use a number of hosts that divides it, or set one mesh axis to -1"
        )
    rows = batch_size(config)
    if rows is not None and rows % processes:
        raise RequestError(
            f"input.batch_size {rows} cannot be divided evenly among {processes} processes\n"
            f"    got: --hosts {hosts} --processes-per-host {processes_per_host}\n"
            f"    fix: {_list_sizes(rows, processes_per_host, hosts)}"
        )
    return hosts


def _list_sizes(rows: int, processes_per_host: int, hosts: int) -> str:
    """Suggest the nearest batch sizes and numbers of hosts that divide evenly."""
    processes = hosts * processes_per_host
    below = rows // processes * processes
    sizes = [size for size in (below, below + processes) if size]
    fitting = [n for n in range(1, rows + 1) if rows % (n * processes_per_host) == 0]
    near = [max((n for n in fitting if n < hosts), default=0), min((n for n in fitting if n > hosts), default=0)]
    counts = [n for n in near if n]
    fix = " or ".join(f"input.batch_size={size}" for size in sizes)
    return fix + (f"; or {' or '.join(f'--hosts {n}' for n in counts)}" if counts else "")


def reduced_words(
    config: Any, machine: Machine | None, processes: int, fewer: int, devices: int
) -> tuple[str, ...] | None:
    """Return arguments to resume with fewer processes, the same global batch and a smaller data-parallel size.

    Args:
        config: Config of the run.
        machine: Machine of its target.
        processes: Number of processes that were requested.
        fewer: Number of processes that are left.
        devices: Total number of devices across all requested processes.

    Returns:
        Arguments to append to those of `axlearn train`, or None if the mesh or the batch does not support this few processes.
    """
    remaining = devices // processes * fewer
    if machine is not None:
        smaller = machine.target.make_machine(remaining, fewer) if machine.target.size == "hosts" else None
        return None if smaller is None else ("--target", smaller.name)
    shape = dict(config.mesh.shape) or {"fsdp": -1}
    free = [axis for axis, size in shape.items() if size == -1]
    for axis in free or [axis for axis in ("data", "fsdp") if axis in shape]:
        other_sizes = math.prod(size for name, size in shape.items() if name != axis)
        if axis not in ("data", "fsdp") or remaining % other_sizes:
            continue
        sizes = {**shape, axis: remaining // other_sizes}
        shards = math.prod(sizes.get(name, 1) for name in ("data", "fsdp", "expert"))
        rows = batch_size(config) or 0
        parts = num_shards(config) or rows
        if rows % shards == 0 and rows % fewer == 0 and parts % fewer == 0:
            return () if free else ("--set", f"mesh.shape.{axis}={remaining // other_sizes}")
    return None


def _job_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:52].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _train_words(train: Mapping[str, Any]) -> tuple[str, ...]:
    words: list[str] = []
    for option, name in (("--with", "with_"), ("--without", "without"), ("--set", "set_")):
        for text in train.get(name, ()):
            words += [option, text]
    for option, name in (("--steps", "steps"), ("--target", "target")):
        if train.get(name) is not None:
            words += [option, str(train[name])]
    return (*words, *(("--allow-drift",) if train.get("allow_drift") else ()))
