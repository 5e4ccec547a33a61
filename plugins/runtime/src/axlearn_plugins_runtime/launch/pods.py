"""Pod specs for a job on Kubernetes: node labels, resources, volumes and probes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import load
from axlearn_plugins_runtime.job.progress import PROGRESS
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.supervised_job import is_uri

SPARE_PRIORITY = "axlearn-spare"
PROGRESS_FILE = "/tmp/axlearn-progress"
GKE_TPUS = {
    "tpu-v4": "tpu-v4-podslice",
    "tpu-v5e": "tpu-v5-lite-podslice",
    "tpu-v5p": "tpu-v5p-slice",
    "tpu-v6e": "tpu-v6e-slice",
    "tpu-7x": "tpu7x",
}
"""`cloud.google.com/gke-tpu-accelerator` by target. See cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus."""
GKE_GPUS = {
    "a100": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}
"""`cloud.google.com/gke-accelerator` by target (A2 Ultra, A3 High, A3 Ultra, A4). A3 Mega is nvidia-h100-mega-80gb."""
Manifest = dict[str, Any]


def check_image(job: Job) -> None:
    """Raise `RequestError` if no image is set."""
    if not job.options.image:
        raise RequestError(
            "--on kubernetes requires an image with axlearn-core and the plugins of the run\n"
            "    fix: --option image=REGISTRY/NAME:TAG; docs/launch.md says how to build an image"
        )


def check_run_dir(job: Job) -> None:
    """Raise `RequestError` if the run directory would be lost when the pods end."""
    if is_uri(job.run_dir):
        return
    mount = PurePosixPath(job.options.mount)
    if job.options.claim is None or not PurePosixPath(job.run_dir).is_relative_to(mount):
        raise RequestError(
            f"pods would lose {job.run_dir} when they end\n    got: claim {job.options.claim}, mounted at {mount}\n"
            f"    expected: a URI, or a path on a PersistentVolumeClaim that several pods can write\n"
            f"    fix: --run-dir gs://BUCKET/RUN, or --option claim=NAME --run-dir {mount}/RUN"
        )


def node_selector(job: Job) -> Manifest:
    """Return the node labels of the target's hardware and of `--option node-selector`."""
    labels: Manifest = {}
    machine = job.machine
    if machine is not None and job.options.cloud == "gke":
        name = machine.target.name
        if machine.target.platform == "tpu":
            if name not in GKE_TPUS or machine.target.domain_shape is None:
                raise _unknown(name, GKE_TPUS)
            shape: Any = load(machine.target.domain_shape)
            labels["cloud.google.com/gke-tpu-accelerator"] = GKE_TPUS[name]
            labels["cloud.google.com/gke-tpu-topology"] = "x".join(map(str, shape(machine)))
        elif machine.target.platform == "gpu":
            if name not in GKE_GPUS:
                raise _unknown(name, GKE_GPUS)
            labels["cloud.google.com/gke-accelerator"] = GKE_GPUS[name]
    for text in (job.options.node_selector or "").split(","):
        key, equals, value = text.strip().partition("=")
        if text.strip() and not (key and equals):
            raise RequestError(
                f"--option node-selector: got {text!r}\n    expected: KEY=VALUE,KEY=VALUE\n"
                "    fix: write the labels as `kubectl get nodes --show-labels` prints them"
            )
        if key:
            labels[key] = value
    return labels


def resources(job: Job) -> Manifest:
    """Return the chips of a host as resource requests and limits."""
    machine = job.machine
    names = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu", "neuron": "aws.amazon.com/neuron"}
    if machine is None or machine.target.platform not in names:
        return {}
    name, count = names[machine.target.platform], str(machine.chips_per_host)
    return {"requests": {name: count}, "limits": {name: count}}


def container(
    job: Job,
    name: str,
    words: Sequence[str] | None,
    *,
    env: Sequence[Manifest] = (),
    variables: Mapping[str, str] | None = None,
    probes: bool = False,
    run_file: str | None = None,
    chips: bool = True,
) -> Manifest:
    """Return the spec for a container.

    Args:
        job: Job with the image, the claim and the chips.
        name: Name of the container.
        words: Command, started without a shell so that SIGTERM reaches the trainer. If it is None, an operator sets it.
        env: Environment entries that refer to other fields.
        variables: Environment variables.
        probes: Restart the container if it makes no progress.
        run_file: Mount path of the run file, or None.
        chips: Request the chips of the host.
    """
    spec: Manifest = {"name": name, "image": job.options.image}
    if words is not None:
        spec["command"] = list(words)
    values = dict(variables or {}) | ({PROGRESS: PROGRESS_FILE, "PYTHONUNBUFFERED": "1"} if probes else {})
    if entries := [*env, *({"name": k, "value": v} for k, v in values.items())]:
        spec["env"] = entries
    if chips and (limits := resources(job)):
        spec["resources"] = limits
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}] if _uses_gpus(job) else []
    if job.options.claim is not None:
        mounts.append({"name": "run", "mountPath": job.options.mount})
    if run_file is not None:
        mounts.append({"name": "run-file", "mountPath": run_file})
    if mounts:
        spec["volumeMounts"] = mounts
    if probes:
        spec |= _probes(job)
    return spec


def pod_spec(
    job: Job, main: Manifest, *, volumes: Sequence[Manifest], chips: bool = True, restart: str | None = "Never"
) -> Manifest:
    """Return the spec for a pod with one container."""
    options = job.options
    spec: Manifest = {"terminationGracePeriodSeconds": options.grace}
    if restart is not None:
        spec["restartPolicy"] = restart
    if chips and (labels := node_selector(job)):
        spec["nodeSelector"] = labels
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.fs_group is not None:
        spec["securityContext"] = {"fsGroup": options.fs_group}
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if tolerated := [
        *({"nvidia.com/gpu"} if _uses_gpus(job) else ()),
        *([options.toleration] if options.toleration else ()),
    ]:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in tolerated]
    spec["containers"] = [main]
    job_volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}] if _uses_gpus(job) else []
    if options.claim is not None:
        job_volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": options.claim}})
    if all_volumes := [*job_volumes, *volumes]:
        spec["volumes"] = all_volumes
    return spec


def _probes(job: Job) -> Manifest:
    """Return probes of the progress file, which the trainer overwrites at each phase.

    The startup probe waits for a phase of the loop. The liveness probe then checks the age of the file. The limit depends on the
    phase, because a save or an evaluation takes longer than a step.
    """
    started = f"grep -qE ' (input|step|save|evaluate) ' {PROGRESS_FILE}"
    hang, save, start = (
        math.ceil(seconds / 60)
        for seconds in (job.options.hang_seconds, job.options.save_seconds, job.options.start_seconds)
    )
    alive = (
        f'm={start}; case "$(cat {PROGRESS_FILE})" in *" save "*) m={save};; *" input "*|*" step "*) m={hang};; esac; '
        f'[ -n "$(find {PROGRESS_FILE} -mmin -$m)" ]'
    )
    return {
        "startupProbe": {
            "exec": {"command": ["sh", "-c", started]},
            "periodSeconds": 10,
            "failureThreshold": math.ceil(job.options.start_seconds / 10),
        },
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", alive]},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 2,
        },
    }


def _uses_gpus(job: Job) -> bool:
    return job.machine is not None and job.machine.target.platform == "gpu"


def _unknown(name: str, labels: Mapping[str, str]) -> RequestError:
    return RequestError(
        f"unknown GKE node labels for {name!r}\n    expected: {', '.join(labels)}\n"
        "    fix: --option cloud=none --option node-selector=KEY=VALUE"
    )
