"""The batch script of Slurm: what it asks for, and what it does as a script. A real Slurm runs it in test_slurm_cluster."""

import subprocess

import pytest

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_gpu.gpus import H100
from axlearn_plugins_runtime.launch.exits import Exit
from axlearn_plugins_runtime.launch.job import Job, parse_options
from axlearn_plugins_runtime.launch.slurm import SlurmLauncher, SlurmOptions, render_script
from axlearn_plugins_runtime.launch.task import (
    coordinator_port,
    exit_code,
    kubernetes_environment,
    sky_environment,
    slurm_environment,
)
from axlearn_plugins_tpu.generations import V5P

DOCUMENT = "experiment: quickstart\nset:\n  # 'quotes', $dollars and @HOSTS@\n  max_steps: 3\n"


def job(options=None, **fields):
    fields = {"name": "toy", "experiment": "a/run.yaml", "document": DOCUMENT, "run_dir": "/shared/toy", **fields}
    return Job(options=SlurmOptions(**(options or {})), **fields)


def directives(script):
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_asks_for_hosts_spares_chips_and_time_to_save():
    options = {"partition": "gpu", "account": "lab", "time": "1-00:00:00", "gpu_type": "h100", "grace": 90}
    lines = directives(render_script(job(options, hosts=4, spares=2, machine=H100.machine("h100-8x4"))))
    expected = ["job-name=toy", "nodes=6", "ntasks-per-node=1", "gpus-per-node=h100:8", "requeue", "no-kill",
                "signal=B:USR1@90", "partition=gpu", "account=lab", "time=1-00:00:00", "exclusive"]  # fmt: skip
    assert set(expected) <= set(lines)


def test_the_script_is_shell_and_carries_the_run_file_word_for_word(tmp_path):
    script = render_script(
        job({"folder": str(tmp_path / "it's here"), "setup": "exit 7"}, environment={"A": "it's $x"})
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    run = subprocess.run(
        ["bash"], input=script, text=True, capture_output=True, env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path
    )
    assert run.returncode == 7, "up to the line of the option `setup`"
    assert (tmp_path / "it's here" / "run.yaml").read_text() == DOCUMENT


def test_variables_of_another_job_are_unset(tmp_path):
    script = render_script(job({"folder": str(tmp_path), "setup": "env > seen; exit 0"}, environment={"A": "it's $x"}))
    stale = {"MEGASCALE_COORDINATOR_ADDRESS": "old", "JAX_COORDINATOR_ADDRESS": "old:1", "RANK": "3", "OTHER": "stays"}
    subprocess.run(["bash"], input=script, text=True, env={"PATH": "/usr/bin:/bin", **stale}, cwd=tmp_path, check=True)
    variables = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert not {"MEGASCALE_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS", "RANK"} & variables.keys()
    assert (variables["OTHER"], variables["A"]) == ("stays", "it's $x")
    assert variables["JAX_COMPILATION_CACHE_DIR"] == "/shared/toy/launch/compiled"


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (job(machine=V5P.machine("tpu-v5p-128")), "does not support TPUs"),
        (job(run_dir="/a\nb"), "cannot be used in a batch script"),
        (job(run_dir="/a%j"), "cannot be used in a batch script"),
        (job(document="experiment: a\nAXLEARN_RUN_FILE\n"), "ends it in the batch script"),
        (job(processes_per_host=3, machine=H100.machine("h100-8x1")), "8 chips per host cannot be divided evenly"),
    ],
)
def test_what_slurm_cannot_do_is_refused_with_the_remedy(one, message):
    with pytest.raises(RequestError, match=f"(?s){message}.*fix: "):
        render_script(one)


@pytest.mark.parametrize(
    "option", [{"time": "soon"}, {"partition": "a\n#SBATCH --uid=0"}, {"grace": "1"}, {"nodes": "3"}]
)
def test_options_are_checked(option):
    with pytest.raises(RequestError):
        parse_options(SlurmOptions, option, "slurm")


def test_without_sbatch_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"`sbatch`.*\n.*fix: .*--dry-run"):
        SlurmLauncher().check()


@pytest.mark.parametrize("code", [0, 1])
def test_what_is_submitted_is_what_a_dry_run_prints(monkeypatch, tmp_path, capsys, code):
    """sbatch is one that keeps its input."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f'#!/bin/sh\n/bin/cat "$2" > {tmp_path}/kept\necho "77;cluster"\necho "Invalid account" >&2\nexit {code}\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    launcher, one = SlurmLauncher(), job(run_dir=str(tmp_path / "run"))
    launcher.check()
    assert launcher.launch(one, dry_run=True) == 0
    script = capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"
    if code:
        with pytest.raises(WorkError, match=r"refused the job: Invalid account\n.*fix: "):
            launcher.launch(one, dry_run=False)
    else:
        assert launcher.launch(one, dry_run=False) == 0
        assert capsys.readouterr().out == "77\n"
    assert (tmp_path / "kept").read_text() == script


SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "9", "SLURM_NTASKS_PER_NODE": "4",
         "AXLEARN_ATTEMPT": "873", "AXLEARN_COORDINATOR": "n7", "AXLEARN_PROCESSES": "8"}  # fmt: skip


def test_a_task_of_slurm_finds_its_place():
    place = slurm_environment(SLURM | {"AXLEARN_LOCAL_CHIPS": "8"})
    assert place["JAX_COORDINATOR_ADDRESS"] == f"n7:{coordinator_port(873)}"
    assert (place["JAX_PROCESS_ID"], place["JAX_NUM_PROCESSES"], place["JAX_LOCAL_DEVICE_IDS"]) == ("5", "8", "2,3")
    assert "JAX_LOCAL_DEVICE_IDS" not in slurm_environment(SLURM)


def test_an_attempt_has_a_port_of_its_own():
    ports = [
        coordinator_port(97 * job + 211 * requeue + count)
        for job in (1, 2)
        for requeue in (0, 1)
        for count in range(20)
    ]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports), "below those that Linux gives to connections"


def test_a_pod_of_a_second_slice_finds_its_place():
    pod = {"AXLEARN_ATTEMPT": "2", "AXLEARN_COORDINATOR": "toy-host-0-0.toy", "AXLEARN_PROCESSES": "32", "AXLEARN_SLICES": "2",
           "AXLEARN_SLICE": "1", "JOB_COMPLETION_INDEX": "3", "AXLEARN_JOBSET": "toy"}  # fmt: skip
    place = kubernetes_environment(pod)
    assert (place["JAX_PROCESS_ID"], place["MEGASCALE_SLICE_ID"], place["MEGASCALE_NUM_SLICES"]) == ("19", "1", "2")
    assert place["MEGASCALE_COORDINATOR_ADDRESS"] == "toy-host-0-0.toy"
    assert (
        place["JAX_COORDINATOR_ADDRESS"]
        != kubernetes_environment(pod | {"AXLEARN_ATTEMPT": "3"})["JAX_COORDINATOR_ADDRESS"]
    )


def test_a_node_of_skypilot_finds_its_place():
    node = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9\n", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_TASK_ID": "managed-2026-11-22_1"}  # fmt: skip
    place = sky_environment(node)
    assert place["JAX_COORDINATOR_ADDRESS"].startswith("10.0.0.4:")
    assert (place["JAX_PROCESS_ID"], place["JAX_NUM_PROCESSES"]) == ("1", "2")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (Exit(code=0), 0),
        (Exit(code=2, kind="request", message="wrong"), 2),
        (Exit(code=1, kind="user", message="ValueError: x"), 1),
        (Exit(code=1, kind="data", message="a bad file"), 65),
        (Exit(code=1, kind="peer", message="gloo: connection closed"), 74),
        (Exit(code=1, kind="infrastructure", message="no space"), 74),
        (Exit(code=75), 75),
        (Exit(code=143), 143),
    ],
)
def test_exit_codes_tell_kinds_apart(end, code):
    assert exit_code(end)[0] == code
