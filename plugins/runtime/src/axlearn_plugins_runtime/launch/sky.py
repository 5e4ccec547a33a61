"""`--on sky`: a SkyPilot task for AWS, Google Cloud, Azure or your own machines."""

import io
import os
import shlex
import shutil
import subprocess
import tempfile
from typing import Any

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.job_text import line
from axlearn_plugins_runtime.launch.run_files import write_script
from axlearn_plugins_runtime.launch.supervised_job import is_uri, make_setup

COMMAND = "AXLEARN_SKY"
"""Environment variable that contains the path of `sky` if it is not on the PATH.

SkyPilot is usually installed in a separate environment because it pins old versions of packages."""
GPUS = {"a100": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200"}
"""SkyPilot's accelerator name by target."""
RECOVERED = (74, 75, 134, 137, 139, 143)
"""Exit codes after which the job restarts: a lost peer, the watchdog, and signals."""


@attrs.frozen(kw_only=True)
class SkyOptions:
    """Options for `--on sky`.

    Attributes:
        infra: Infrastructure: `aws`, `gcp/us-central1`, `azure`, `k8s/CONTEXT`, `ssh/POOL` or `slurm/CLUSTER` (default: the
            cheapest).
        spot: Use spot machines, which the cloud may reclaim.
        managed: Use `sky jobs launch`, which replaces lost machines. If False, use `sky launch` with a single cluster.
        image: Image of the machines, such as `docker:REGISTRY/NAME:TAG`.
        setup: Shell line that installs the run's packages on each machine.
        python: Python interpreter on the machines.
        restarts: Number of restarts after errors in the run itself (exit codes 1 and 2).
        compile_cache: Cache compiled programs in the run directory.
    """

    infra: str | None = line()
    spot: bool = False
    managed: bool = True
    image: str | None = line()
    setup: str = line('python -m pip install "axlearn-core[all]"')
    python: str = line("python")
    restarts: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    compile_cache: bool = False


class SkyLauncher:
    """Writes a SkyPilot task and submits it with `sky`."""

    Options: type = SkyOptions

    def check(self) -> None:
        """See `Launcher`."""
        find_sky()

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """See `Launcher`."""
        text = to_yaml(make_task(job))
        if dry_run:
            print(text, end="")
            return 0
        verb = ["jobs", "launch"] if job.options.managed else ["launch"]
        name = ["--name", job.name] if job.options.managed else ["--cluster", job.name]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            # SkyPilot shows its choice and the price and asks for confirmation, so it uses this terminal.
            return subprocess.run([find_sky(), *verb, *name, file.name]).returncode


def find_sky() -> str:
    """Return the path of the `sky` command.

    Raises:
        RequestError: The command does not exist.
    """
    command = os.environ.get(COMMAND)
    path = shutil.which(command or "sky")
    if path is None:
        problem = (
            f"{COMMAND} is {command!r}, which is not a command" if command else "the command `sky` is not on the PATH"
        )
        raise RequestError(
            f"SkyPilot is not installed: {problem}\n"
            "    fix: `uv tool install 'skypilot[aws]'` (or gcp, azure, kubernetes), which uses a separate environment; "
            f"set {COMMAND}=PATH if it is not on the PATH"
        )
    return path


def make_task(job: Job) -> dict[str, Any]:
    """Return the task of a job as the fields of SkyPilot's YAML.

    Raises:
        RequestError: SkyPilot does not support the job.
    """
    options = job.options
    if job.spares:
        raise RequestError(
            f"SkyPilot has no spare machines: it starts new ones after a failure\n    got: --spares {job.spares}\n"
            "    fix: use --spares 0, or --on ray, --on slurm or --on kubernetes"
        )
    if job.processes_per_host > 1:
        raise RequestError(
            f"each node in a SkyPilot task runs one process\n    got: --processes-per-host {job.processes_per_host}\n"
            "    fix: remove it: one process uses all chips of its host"
        )
    if not is_uri(job.run_dir):
        raise RequestError(
            f"{job.run_dir} is a local path, which is lost with the machines that SkyPilot starts\n"
            "    expected: a URI\n    fix: --run-dir s3://BUCKET/RUN or gs://BUCKET/RUN"
        )
    resources: dict[str, Any] = {}
    if options.infra:
        resources["infra"] = options.infra
    if accelerators := accelerator_name(job):
        resources["accelerators"] = accelerators
    if options.spot:
        resources["use_spot"] = True
    if options.image:
        resources["image_id"] = options.image
    if options.managed:
        resources["job_recovery"] = {
            "max_restarts_on_errors": options.restarts,
            "recover_on_exit_codes": list(RECOVERED),
        }
    on_tpus = job.machine is not None and job.machine.target.platform == "tpu"
    # SkyPilot counts a TPU slice as one node and starts the task on each of its hosts.
    task: dict[str, Any] = {"name": job.name, "num_nodes": 1 if on_tpus else job.hosts, "resources": resources}
    if environment := make_setup(job).environment:
        task["envs"] = dict(environment)
    if options.setup:
        task["setup"] = options.setup
    return task | {"run": LiteralScalarString(_script(job))}


def accelerator_name(job: Job) -> str | None:
    """Return SkyPilot's name for the chips of a host, or for a whole TPU slice. Returns None for CPUs.

    Raises:
        RequestError: SkyPilot does not support the hardware.
    """
    machine = job.machine
    if machine is None or machine.target.platform == "cpu":
        return None
    name = machine.target.name
    if name in GPUS:
        return f"{GPUS[name]}:{machine.chips_per_host}"
    if (
        machine.target.platform == "tpu"
        and machine.domains == 1
        and name in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
    ):
        return machine.name.replace("tpu-v5e-", "tpu-v5litepod-")
    raise RequestError(
        f"SkyPilot has no name for the target {machine.name!r}\n"
        f"    expected: {', '.join(f'{g}-8xHOSTS' for g in GPUS)}, or one slice of tpu-v4, tpu-v5e, tpu-v5p or tpu-v6e\n"
        "    fix: --on kubernetes, or another --target"
    )


def to_yaml(task: dict[str, Any]) -> str:
    """Return the task as YAML."""
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.dump(task, text)
    return text.getvalue()


def _script(job: Job) -> str:
    lines, experiment = [], None
    if files := job.files(f"axlearn-{job.name}"):
        experiment = next(iter(files))
        lines += [f"mkdir -p axlearn-{job.name}", *write_script(files)]
    if job.environment:
        lines.append(f"export AXLEARN_KEEP={shlex.quote(' '.join(job.environment))}")
    words = [job.options.python, "-m", "axlearn_plugins_runtime.launch.task", "sky", *job.train_words(experiment)]
    # `exec` replaces the shell, so that SIGTERM reaches the trainer.
    return "\n".join([*lines, f"exec {shlex.join(words)}"]) + "\n"
