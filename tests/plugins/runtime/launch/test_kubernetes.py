"""Manifests for Kubernetes, held against the published schemas of JobSet and RayJob."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import attrs
import jsonschema
import pytest
from ruamel.yaml import YAML

from axlearn_core.contracts.target import Machine, Target
from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_gpu.gpus import H100
from axlearn_plugins_runtime.job.progress import Progress
from axlearn_plugins_runtime.launch.job import Job, parse_options
from axlearn_plugins_runtime.launch.kubernetes import KubernetesLauncher, KubernetesOptions, render, to_yaml
from axlearn_plugins_runtime.launch.task import FINAL
from axlearn_plugins_tpu.generations import V5P

SCHEMAS = next((p / "shared/schemas" for p in Path(__file__).parents if (p / "shared/schemas").is_dir()), None)
needs_schemas = pytest.mark.skipif(
    SCHEMAS is None, reason="needs the published CRDs in shared/schemas beside the repository"
)
DOCUMENT = "experiment: quickstart\nset:\n  max_steps: 3\n"


def job(options=None, **fields):
    options = {"image": "registry.example/axlearn:1", **(options or {})}
    fields = {"name": "toy", "experiment": "a/run.yaml", "document": DOCUMENT, "run_dir": "gs://bucket/toy", **fields}
    return Job(options=KubernetesOptions(**options), **fields)


def strict(schema):
    """A structural schema that refuses what it does not know, as the API server's field validation does."""
    if isinstance(schema, list):
        return [strict(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {k: strict(v) for k, v in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        schema["additionalProperties"] = False
    return schema


def schema_of(kind):
    names = {"JobSet": "jobset.x-k8s.io_jobsets.yaml", "RayJob": "ray.io_rayjobs.yaml"}
    crd = YAML(typ="safe").load((SCHEMAS / names[kind]).read_text())
    versions = {v["name"]: v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"]}
    return crd, {name: strict(schema) for name, schema in versions.items()}


def validate(manifest):
    crd, versions = schema_of(manifest["kind"])
    group, version = manifest["apiVersion"].split("/")
    assert group == crd["spec"]["group"]
    body = {k: v for k, v in manifest.items() if k != "metadata"}
    jsonschema.Draft202012Validator(versions[version]).validate(body)


def reread(manifests):
    """As `kubectl` would read what is printed."""
    return list(YAML(typ="safe").load_all(to_yaml(manifests)))


JOBS = {
    "cpu": job(hosts=3),
    "tpu": job(hosts=32, machine=V5P.machine("tpu-v5p-128x2")),
    "gpu": job({"queue": "team"}, hosts=64, spares=2, machine=H100.machine("h100-8x64")),
    "claim": job(
        {"claim": "runs", "mount": "/runs", "fs_group": 1000}, run_dir="/runs/toy", document=None, experiment="quickstart",
    ),
    "everything": job(
        {
            "namespace": "ml", "service_account": "trainer", "priority_class": "high", "queue": "team", "toleration": "spot",
            "cloud": "none", "node_selector": "kind=big, zone=a", "host_network": True, "claim": "runs",
        },
        hosts=2, environment={"NCCL_DEBUG": "INFO"}, machine=H100.machine("h100-8x2"),
    ),
}  # fmt: skip


@pytest.mark.fast_cases("everything-jobset")
@needs_schemas
@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
@pytest.mark.parametrize("name", JOBS)
def test_manifests_fit_the_published_schemas(name, kind):
    one = JOBS[name]
    one = attrs.evolve(one, options=attrs.evolve(one.options, kind=kind))
    *_, main = reread(render(one))
    assert main["kind"] == {"jobset": "JobSet", "rayjob": "RayJob"}[kind]
    validate(main)


@needs_schemas
def test_the_schemas_refuse_what_they_do_not_know():
    *_, main = render(JOBS["cpu"])
    main["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        validate(main)
    *_, main = render(JOBS["cpu"])
    main["spec"]["failurePolicy"]["rules"][0]["action"] = "Retry"
    with pytest.raises(jsonschema.ValidationError, match="Retry"):
        validate(main)


def pod(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_a_tpu_slice_is_a_job_and_a_host_a_pod():
    *_, main = render(JOBS["tpu"])
    (replicated,) = main["spec"]["replicatedJobs"]
    assert (replicated["replicas"], replicated["template"]["spec"]["completions"]) == (2, 16)
    assert pod(main)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert pod(main)["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert "exclusive-topology" in str(main["metadata"]["annotations"])


def test_gpus_come_by_the_name_of_the_target():
    *_, main = render(JOBS["gpu"])
    assert pod(main)["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert pod(main)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert main["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod(main)["tolerations"]


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
def test_a_group_may_write_to_the_claim(kind):
    def security_contexts(value):
        if isinstance(value, list):
            return [context for item in value for context in security_contexts(item)]
        if not isinstance(value, dict):
            return []
        own = [value.get("securityContext")] if "containers" in value else []
        return own + [context for item in value.values() for context in security_contexts(item)]

    options = attrs.evolve(JOBS["claim"].options, kind=kind)
    with_group = security_contexts(render(attrs.evolve(JOBS["claim"], options=options)))
    assert with_group
    assert all(context == {"fsGroup": 1000} for context in with_group)
    options = attrs.evolve(options, fs_group=None)
    assert set(security_contexts(render(attrs.evolve(JOBS["claim"], options=options)))) == {None}


def test_spares_hold_nodes_with_less_priority_than_trainers():
    _, priority, spare, main = render(JOBS["gpu"])
    assert spare["spec"]["replicas"] == 2
    template = spare["spec"]["template"]["spec"]
    assert template["priorityClassName"] == priority["metadata"]["name"]
    assert priority["value"] < 0
    assert template["nodeSelector"] == pod(main)["nodeSelector"]
    assert template["containers"][0]["resources"] == pod(main)["containers"][0]["resources"]


def test_permanent_exit_codes_fail_the_set_and_evictions_cost_nothing():
    *_, main = render(JOBS["cpu"])
    policy = main["spec"]["failurePolicy"]["rules"]
    assert [rule["action"] for rule in policy] == ["RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"]
    inner = main["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0, "one dead pod ends the attempt of all"
    codes = inner["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["values"] == sorted(FINAL)
    assert {2}.issubset(codes["values"])
    assert not {74, 75, 137, 143} & set(codes["values"])


def test_sigterm_reaches_the_trainer_and_the_run_file_is_mounted():
    config, main = render(JOBS["cpu"])
    (container,) = pod(main)["containers"]
    assert container["command"][:4] == ["python", "-m", "axlearn_plugins_runtime.launch.task", "kubernetes"], (
        "no shell between"
    )
    assert container["command"][5] == "/etc/axlearn/run.yaml"
    assert config["data"] == {"run.yaml": DOCUMENT}
    assert {"name": "AXLEARN_COORDINATOR", "value": "toy-host-0-0.toy"} in container["env"]
    assert main["spec"]["network"] == {
        "enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "toy",
    }  # fmt: skip


def test_the_probes_see_a_trainer_that_began_and_one_that_hangs(tmp_path):
    *_, main = render(JOBS["cpu"])
    (container,) = pod(main)["containers"]
    path = {e["name"]: e.get("value") for e in container["env"]}["AXLEARN_PROGRESS"]

    def probe(name):
        command = [word.replace(path, str(tmp_path / "progress")) for word in container[name]["exec"]["command"]]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    assert not probe("startupProbe")
    progress = Progress(tmp_path / "progress")
    progress.write("compile", 0)
    assert not probe("startupProbe"), "compiling is no progress yet"
    progress.write("step", 1)
    assert probe("startupProbe")
    assert probe("livenessProbe")

    def age(phase, minutes):
        progress.write(phase, 1)
        old = time.time() - 60 * minutes
        os.utime(tmp_path / "progress", (old, old))
        return probe("livenessProbe")

    assert [age("step", 8), age("step", 11), age("input", 11)] == [True, False, False]
    assert [age("save", 38), age("save", 41)] == [True, False]
    assert [age("evaluate", 58), age("evaluate", 61)] == [True, False]


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (job({"image": None}), "requires an image"),
        (job(run_dir="/home/me/run"), "pods would lose /home/me/run"),
        (job({"claim": "runs", "mount": "/runs"}, run_dir="/run/toy"), "expected: a URI, or a path on"),
        (job(processes_per_host=2), "a JobSet pod runs one process"),
        (job(name="x" * 52), r"too long: pods would be called .* at most 48 characters"),
        (job(spares=1, machine=V5P.machine("tpu-v5p-128")), "whole slices"),
        (job({"node_selector": "big"}), "expected: KEY=VALUE"),
        (job(machine=Machine(name="x-8", target=Target(name="x", platform="gpu"), chips=8, domains=1, chips_per_host=8)),
         "unknown GKE node labels for 'x'"),
    ],
)  # fmt: skip
def test_what_kubernetes_cannot_do_is_refused_with_the_remedy(one, message):
    with pytest.raises(RequestError, match=f"(?s){message}") as error:
        render(one)
    assert "fix: " in str(error.value)


@pytest.mark.parametrize(
    "option",
    [
        {"kind": "pod"}, {"cloud": "aws"}, {"hang-seconds": "5"}, {"image": "a\nb"}, {"mount": "relative"}, {"fs-group": "0"},
        {"fs-group": "axlearn"},
    ],
)  # fmt: skip
def test_options_are_checked(option):
    with pytest.raises(RequestError):
        parse_options(KubernetesOptions, option, "kubernetes")


def test_without_kubectl_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"kubectl.*\n.*fix: .*--dry-run"):
        KubernetesLauncher().check()


@pytest.mark.parametrize("exists", [False, True])
def test_what_is_submitted_is_what_a_dry_run_prints(monkeypatch, tmp_path, capsys, exists):
    """kubectl is one that keeps its input."""
    fail = 'echo "Error: jobsets \\"toy\\" already exists" >&2; exit 1' if exists else "true"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\ncat >> {tmp_path}/$1.yaml\n[ "$1" = create ] && {{ {fail}; }} || true\n')
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = KubernetesLauncher()
    launcher.check()
    assert launcher.launch(JOBS["gpu"], dry_run=True) == 0
    printed = capsys.readouterr().out
    assert not list(tmp_path.glob("*.yaml")), "a dry run starts nothing"
    if exists:
        with pytest.raises(WorkError, match=r"already exists\n.*another --name"):
            launcher.launch(JOBS["gpu"], dry_run=False)
    else:
        assert launcher.launch(JOBS["gpu"], dry_run=False) == 0
    assert (tmp_path / "apply.yaml").read_text() + (tmp_path / "create.yaml").read_text() == printed


@pytest.mark.slow
def test_one_run_file_goes_to_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text("experiment: quickstart\nset: {max_steps: 3, input.batch_size: 4}\n")
    words = [
        "launch",
        "run.yaml",
        "--on",
        "kubernetes",
        "--hosts",
        "2",
        "--option",
        "image=a:1",
        "--run-dir",
        "gs://b/r",
    ]
    process = subprocess.run(
        [sys.executable, "-m", "axlearn_core", *words, "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert [m["kind"] for m in YAML(typ="safe").load_all(process.stdout)] == ["ConfigMap", "JobSet"]
