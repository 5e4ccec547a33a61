"""`--on kubernetes`: the manifests of a JobSet or of a KubeRay RayJob. `pods.py` builds the pod specs."""

import io
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.job_text import line
from axlearn_plugins_runtime.launch.pods import (
    SPARE_PRIORITY,
    check_image,
    check_run_dir,
    container,
    node_selector,
    pod_spec,
    resources,
)
from axlearn_plugins_runtime.launch.supervised_job import make_setup
from axlearn_plugins_runtime.launch.task import FINAL

HOSTS = "host"
"""Name of the replicated job that trains. Pod names are JOBSET-host-SLICE-INDEX."""
MOUNT = "/etc/axlearn"
Manifest = dict[str, Any]


@attrs.frozen(kw_only=True)
class KubernetesOptions:
    """Options for `--on kubernetes`.

    Attributes:
        kind: `jobset` runs one pod for each host and restarts all of them together. `rayjob` runs a Ray cluster with the
            supervisor and hot swap of `--on ray`, and requires the KubeRay operator.
        image: Image of the containers, with axlearn-core and the plugins of the run.
        namespace, service_account, priority_class: Namespace, service account and priority class of the pods.
        queue: Name of a Kueue LocalQueue.
        claim: Name of a PersistentVolumeClaim.
        mount: Mount path of the claim in the pods.
        fs_group: Id of the group that owns the files of the claim, for an image whose user is not root.
        cloud: Cloud whose node labels select the hardware: `gke` or `none`.
        node_selector: Additional labels, as `KEY=VALUE,KEY=VALUE`.
        toleration: Key of a taint that the pods tolerate.
        host_network: Use the network of the node.
        restarts: Maximum number of restarts of the whole JobSet. Evictions do not count.
        grace: Seconds between an eviction notice and the end of the pod.
        hang_seconds: Seconds without progress after which a pod is restarted.
        save_seconds: The same limit during a save.
        start_seconds: The same limit for restoring, compiling, the first step, and an evaluation.
        python: Python interpreter in the image.
        ray_version: Version of Ray in the image, for `rayjob`.
        compile_cache: Cache compiled programs in the run directory.
    """

    kind: Literal["jobset", "rayjob"] | str = attrs.field(
        default="jobset", validator=attrs.validators.in_(("jobset", "rayjob"))
    )
    image: str | None = line()
    namespace: str | None = line()
    service_account: str | None = line()
    priority_class: str | None = line()
    queue: str | None = line()
    claim: str | None = line()
    mount: str = attrs.field(default="/axlearn", validator=attrs.validators.matches_re(r"/[^\s]+"))
    fs_group: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))
    cloud: str = attrs.field(default="gke", validator=attrs.validators.in_(("gke", "none")))
    node_selector: str | None = line()
    toleration: str | None = line()
    host_network: bool = False
    restarts: int = attrs.field(default=100, validator=attrs.validators.ge(0))
    grace: int = attrs.field(default=120, validator=attrs.validators.ge(10))
    hang_seconds: int = attrs.field(default=600, validator=attrs.validators.ge(60))
    save_seconds: int = attrs.field(default=2400, validator=attrs.validators.ge(60))
    start_seconds: int = attrs.field(default=3600, validator=attrs.validators.ge(60))
    python: str = attrs.field(default="python", validator=attrs.validators.min_len(1))
    ray_version: str = attrs.field(default="2.60.0", validator=attrs.validators.min_len(1))
    compile_cache: bool = True


class KubernetesLauncher:
    """Renders manifests and submits them with `kubectl`."""

    Options: type = KubernetesOptions

    def check(self) -> None:
        """See `Launcher`."""
        if shutil.which("kubectl") is None:
            raise RequestError(
                "--on kubernetes requires `kubectl`, which is not on the PATH\n"
                "    fix: install kubectl and choose a context, or print the manifests with --dry-run and apply them there"
            )

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """See `Launcher`."""
        manifests = render(job)
        if dry_run:
            print(to_yaml(manifests), end="")
            return 0
        *before, main = manifests
        if before:
            _kubectl("apply", before)
        # Use `create` instead of `apply`, so that an existing run with this name is not changed.
        print(_kubectl("create", [main]), end="", file=sys.stderr)
        space = f" --namespace {job.options.namespace}" if job.options.namespace else ""
        print(f"follow it: kubectl get {main['kind'].lower()} {job.name}{space}", file=sys.stderr)
        print(job.name)
        return 0


def render(job: Job) -> list[Manifest]:
    """Return the manifests of a job. The JobSet or RayJob is last.

    Raises:
        RequestError: Kubernetes does not support the job.
    """
    check_image(job)
    check_run_dir(job)
    files = [_config_map(job)] if job.document is not None else []
    if job.options.kind == "rayjob":
        return [*files, ray_job(job)]
    if job.processes_per_host > 1:
        raise RequestError(
            f"a JobSet pod runs one process\n    got: --processes-per-host {job.processes_per_host}\n"
            "    fix: remove it, as one process uses all chips of its host; or use --option kind=rayjob"
        )
    return [*files, *_spares(job), job_set(job)]


def to_yaml(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Return the manifests as one YAML text."""
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.explicit_start = True
    for manifest in manifests:
        yaml.dump(manifest, text)
    return text.getvalue()


def job_set(job: Job) -> Manifest:
    """Return a JobSet with a Job for each slice and an indexed pod for each host.

    If a pod ends with an error, its Job fails at once and all pods restart from the newest checkpoint. Exit codes in `FINAL` end
    the JobSet instead, because a retry would fail in the same way. An eviction does not count against `restarts`.
    """
    slices = _slices(job)
    per_slice = job.hosts // slices
    _check_pod_names(job, slices, per_slice)
    metadata = _metadata(job, job.name)
    if job.machine is not None and job.machine.target.platform == "tpu":
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    pods = {
        "parallelism": per_slice,
        "completions": per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_failures()},
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/name": "axlearn"}},
            "spec": pod_spec(job, _trainer(job, slices), volumes=_volumes(job)),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "failurePolicy": {
                "maxRestarts": job.options.restarts,
                "restartStrategy": "Recreate",
                "rules": _job_failures(),
            },
            "replicatedJobs": [{"name": HOSTS, "replicas": slices, "template": {"spec": pods}}],
        },
    }


def _pod_failures() -> list[Manifest]:
    return [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "train", "operator": "In", "values": sorted(FINAL)},
        },
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _job_failures() -> list[Manifest]:
    return [
        {
            "name": "eviction",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [".*DisruptionTarget.*"],
        },
        {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
    ]


def _check_pod_names(job: Job, slices: int, per_slice: int) -> None:
    longest = f"{job.name}-{HOSTS}-{slices - 1}-{per_slice - 1}-xxxxx"
    if len(longest) > 63:
        raise RequestError(
            f"the name {job.name!r} is too long: pods would be called {longest}, but at most 63 characters are allowed\n"
            f"    fix: use a --name with at most {len(job.name) - (len(longest) - 63)} characters"
        )


def _trainer(job: Job, slices: int) -> Manifest:
    """Return the container of a host, with the variables that it needs to join the job."""
    env = [
        _field("AXLEARN_ATTEMPT", "jobset.sigs.k8s.io/restart-attempt"),
        _field("AXLEARN_SLICE", "jobset.sigs.k8s.io/job-index"),
    ]
    variables = {
        **make_setup(job).environment,
        "AXLEARN_JOBSET": job.name,
        "AXLEARN_SLICES": str(slices),
        "AXLEARN_PROCESSES": str(job.processes),
        "AXLEARN_COORDINATOR": f"{job.name}-{HOSTS}-0-0.{job.name}",
        "AXLEARN_KEEP": " ".join(job.environment),
    }
    words = [
        job.options.python,
        "-m",
        "axlearn_plugins_runtime.launch.task",
        "kubernetes",
        *job.train_words(_experiment(job)),
    ]
    return container(job, "train", words, env=env, variables=variables, probes=True, run_file=_run_file(job))


def ray_job(job: Job) -> Manifest:
    """Return a RayJob: `axlearn launch --on ray` on a head without trainers, and a worker pod for each host and spare."""
    words = ["axlearn", "launch", *job.train_words(_experiment(job))[1:], "--on", "ray"]
    words += ["--hosts", str(job.hosts), "--spares", str(job.spares)]
    words += ["--processes-per-host", str(job.processes_per_host), "--name", job.name]
    for name, value in job.environment.items():
        words += ["--env", f"{name}={value}"]
    head = container(job, "head", None, run_file=_run_file(job), chips=False)
    worker = container(job, "worker", None, run_file=_run_file(job))
    workers = job.hosts + job.spares
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job, job.name),
        "spec": {
            "entrypoint": shlex.join(words),
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 2,
            "rayClusterSpec": {
                "rayVersion": job.options.ray_version,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": {"spec": pod_spec(job, head, volumes=_volumes(job), chips=False, restart=None)},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "hosts",
                        "replicas": workers,
                        "minReplicas": workers,
                        "maxReplicas": workers,
                        "rayStartParams": {},
                        "template": {"spec": pod_spec(job, worker, volumes=_volumes(job), restart=None)},
                    }
                ],
            },
        },
    }


def _spares(job: Job) -> list[Manifest]:
    """Return low-priority pods that reserve spare nodes. A trainer preempts them when its node fails."""
    if not job.spares:
        return []
    if job.machine is not None and job.machine.target.platform == "tpu":
        raise RequestError(
            f"a JobSet on TPUs uses whole slices, so {job.spares} spare hosts would not help\n"
            "    fix: use --spares 0 and a node pool with auto-repair, or --option kind=rayjob"
        )
    pause = {"name": "pause", "image": "registry.k8s.io/pause:3.10", "resources": resources(job)}
    labels = {"app.kubernetes.io/name": "axlearn-spare", "app.kubernetes.io/instance": job.name}
    spec: dict[str, Any] = {"priorityClassName": SPARE_PRIORITY, "terminationGracePeriodSeconds": 0}
    if selector := node_selector(job):
        spec["nodeSelector"] = selector
    spec["containers"] = [pause]
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": SPARE_PRIORITY},
            "value": -10,
            "description": "Reserves nodes until a trainer needs them.",
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**_metadata(job, f"{job.name}-spare", queue=False), "labels": labels},
            "spec": {
                "replicas": job.spares,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
    ]


def _slices(job: Job) -> int:
    machine = job.machine
    return machine.domains if machine is not None and machine.target.platform == "tpu" else 1


def _metadata(job: Job, name: str, *, queue: bool = True) -> Manifest:
    metadata: Manifest = {"name": name}
    if job.options.namespace:
        metadata["namespace"] = job.options.namespace
    metadata["labels"] = {"app.kubernetes.io/name": "axlearn", "app.kubernetes.io/instance": job.name}
    if queue and job.options.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = job.options.queue
    return metadata


def _config_map(job: Job) -> Manifest:
    files = {path.rpartition("/")[2]: text for path, text in job.files(MOUNT).items()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-run", queue=False),
        "data": {name: LiteralScalarString(text) if text.isascii() else text for name, text in files.items()},
    }


def _experiment(job: Job) -> str | None:
    return next(iter(job.files(MOUNT)), None)


def _run_file(job: Job) -> str | None:
    return None if job.document is None else MOUNT


def _volumes(job: Job) -> list[Manifest]:
    return [] if job.document is None else [{"name": "run-file", "configMap": {"name": f"{job.name}-run"}}]


def _field(name: str, label: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def _kubectl(verb: str, manifests: Sequence[Mapping[str, Any]]) -> str:
    result = subprocess.run(["kubectl", verb, "-f", "-"], input=to_yaml(manifests), capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip() or f"exit code {result.returncode}"
        exists = "already exists" in reason
        fix = (
            "use another --name, or `kubectl delete` it"
            if exists
            else "check the context and the permissions (`kubectl config`)"
        )
        raise WorkError(f"kubectl {verb} failed: {reason}\n    fix: {fix}")
    return result.stdout
