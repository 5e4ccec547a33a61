"""`--on slurm`: a batch script that supervises the run under Slurm, with spare nodes in the allocation."""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import attrs

from axlearn_core.config import get_options
from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.job_text import line
from axlearn_plugins_runtime.launch.run_files import write_script
from axlearn_plugins_runtime.launch.supervised_job import is_uri, make_setup
from axlearn_plugins_runtime.launch.task import FINAL

_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")


def time_limit(instance: object, attribute: "attrs.Attribute[str | None]", value: str | None) -> None:
    """Validate a Slurm time limit."""
    if value is not None and not _TIME.fullmatch(value):
        raise ValueError(
            f"time: got {value!r}; expected minutes, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"
        )


@attrs.frozen(kw_only=True)
class SlurmOptions:
    """Options for `--on slurm`.

    Attributes:
        partition, account, qos, reservation, constraint, time, mem: Options for `sbatch`.
        gpu_type: GPU type in `--gpus-per-node`, if the site requires one.
        exclusive: Allocate whole nodes.
        grace: The run saves and is requeued this many seconds before the time limit.
        restarts: Maximum number of additional attempts in one allocation.
        crash_loop: The job stops after this many consecutive attempts without a new checkpoint.
        python: Python interpreter on the nodes (default: this one).
        folder: Folder for the run file and exit codes, reachable from all nodes (default: `launch` in the run directory).
        setup: Shell line to run before training, such as `module load cuda`.
        compile_cache: Cache compiled programs in the run directory.
    """

    partition: str | None = line()
    account: str | None = line()
    qos: str | None = line()
    reservation: str | None = line()
    constraint: str | None = line()
    time: str | None = attrs.field(default=None, validator=time_limit)
    mem: str | None = line()
    gpu_type: str | None = line()
    exclusive: bool = True
    grace: int = attrs.field(default=120, validator=attrs.validators.ge(10))
    restarts: int = attrs.field(default=100, validator=attrs.validators.ge(0))
    crash_loop: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    python: str | None = line()
    folder: str | None = line()
    setup: str | None = line()
    compile_cache: bool = True


class SlurmLauncher:
    """Renders a batch script and submits it with `sbatch`."""

    Options: type = SlurmOptions

    def check(self) -> None:
        """See `Launcher`."""
        if shutil.which("sbatch") is None:
            raise RequestError(
                "--on slurm requires `sbatch`, which is not on the PATH\n"
                "    fix: run this on a login node of the cluster, or print the script with --dry-run and submit it there"
            )

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """See `Launcher`."""
        script = render_script(job)
        if dry_run:
            print(script, end="")
            return 0
        folder = Path(job_folder(job))
        folder.mkdir(parents=True, exist_ok=True)  # Slurm does not create the folder for the job's output
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(script)
            file.flush()
            result = subprocess.run(["sbatch", "--parsable", file.name], capture_output=True, text=True)
        if result.returncode:
            raise WorkError(
                f"sbatch refused the job: {result.stderr.strip() or f'exit code {result.returncode}'}\n"
                "    fix: set --option partition=..., account=..., qos=... or time=... as this cluster requires"
            )
        number = result.stdout.strip().partition(";")[0]
        print(f"submitted as job {number}; its output: {folder}/slurm-{number}.txt", file=sys.stderr)
        print(number)
        return 0


def job_folder(job: Job) -> str:
    """Return the folder for the run file, the exit codes and the job's output."""
    if job.options.folder is not None:
        return str(Path(job.options.folder).absolute())
    return str(Path(f"axlearn-{job.name}").absolute()) if is_uri(job.run_dir) else f"{job.run_dir}/launch"


def directives(job: Job) -> dict[str, str | None]:
    """Return the options for the `#SBATCH` lines. An option without a value is None."""
    options = job.options
    machine = job.machine
    entries: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.hosts + job.spares),
        "ntasks-per-node": str(job.processes_per_host),
        "output": f"{job_folder(job)}/slurm-%j.txt",
        "open-mode": "append",
        "requeue": None,
        "no-kill": None,  # a failed node must not end the job, because a spare replaces it
        "signal": f"B:USR1@{options.grace}",
    }
    if options.exclusive:
        entries["exclusive"] = None
    entries |= get_options(options, "partition", "account", "qos", "reservation", "constraint", "time", "mem")
    if machine is not None and machine.target.platform == "gpu":
        kind = f"{options.gpu_type}:" if options.gpu_type else ""
        entries["gpus-per-node"] = f"{kind}{machine.chips_per_host}"
    return entries


def render_script(job: Job) -> str:
    """Return the batch script of a job.

    Raises:
        RequestError: Slurm or a batch script does not support the job.
    """
    options = job.options
    if job.machine is not None and job.machine.target.platform == "tpu":
        raise RequestError(
            f"--on slurm does not support TPUs\n    got: the target {job.machine.name!r}\n    fix: use --on kubernetes or --on sky"
        )
    chips = _local_chips(job)
    folder = job_folder(job)
    for name, path in (("--run-dir", job.run_dir), ("--option folder", folder)):
        if not path.isprintable() or "%" in path:
            raise RequestError(
                f"{name} {path!r} cannot be used in a batch script\n    fix: use a path without line breaks and %"
            )
    experiment, run_file = _run_file(job, folder)
    words = [
        options.python or sys.executable,
        "-m",
        "axlearn_plugins_runtime.launch.task",
        "slurm",
        *job.train_words(experiment),
    ]
    values = {
        "FOLDER": shlex.quote(folder),
        "RUN_DIR": shlex.quote(job.run_dir),
        "HOSTS": str(job.hosts),
        "PER_HOST": str(job.processes_per_host),
        "RUN_FILE": run_file,
        "EXPORTS": exports(make_setup(job).environment),
        "KEEP": shlex.quote(" ".join(job.environment)),
        "LOCAL_CHIPS": str(chips),
        "EVENTS": "''" if is_uri(job.run_dir) else '"$run_dir/processes.jsonl"',
        "SETUP": options.setup or "",
        "COMMAND": shlex.join(words),
        "FINAL": " ".join(map(str, FINAL)),
        "MEANING": "1: the training code, 2: the request, 65: the data",
        "CRASH_LOOP": str(options.crash_loop),
        "RESTARTS": str(options.restarts),
    }
    template = (files("axlearn_plugins_runtime.launch") / "slurm.sh").read_text(encoding="utf-8")
    body = re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)
    head = ["#!/bin/bash", *(f"#SBATCH --{k}" + ("" if v is None else f"={v}") for k, v in directives(job).items())]
    return "\n".join([*head, body])


def exports(environment: Mapping[str, str]) -> str:
    """Return shell lines that export environment variables."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())


def _local_chips(job: Job) -> int:
    """Return the number of chips that the processes of a host share, or 0 if they share none."""
    if job.processes_per_host == 1 or job.machine is None or job.machine.target.platform == "cpu":
        return 0
    if job.machine.chips_per_host % job.processes_per_host:
        raise RequestError(
            f"{job.machine.chips_per_host} chips per host cannot be divided evenly among the host's processes\n"
            f"    got: --processes-per-host {job.processes_per_host}\n    fix: use a number that divides it"
        )
    return job.machine.chips_per_host


def _run_file(job: Job, folder: str) -> tuple[str | None, str]:
    """Return (path of the run file on the nodes, shell lines that write it)."""
    files = job.files(folder)
    return next(iter(files), None), "\n".join(write_script(files, "the batch script"))
