"""Tasks for SkyPilot, checked by its parser in an environment of its own."""

import os
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from axlearn_core.errors import RequestError
from axlearn_plugins_gpu.gpus import H100
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.sky import COMMAND, SkyLauncher, SkyOptions, find_sky, make_task, to_yaml
from axlearn_plugins_tpu.generations import V5E, V5P

DOCUMENT = "experiment: quickstart\nset:\n  # 'quotes' and $dollars\n  max_steps: 3\n"


def job(options=None, **fields):
    fields = {"name": "toy", "experiment": "a/run.yaml", "document": DOCUMENT, "run_dir": "s3://bucket/toy", **fields}
    return Job(options=SkyOptions(**(options or {})), **fields)


JOBS = {
    "aws": job({"infra": "aws/us-east-1", "spot": True}, hosts=4, machine=H100.machine("h100-8x4")),
    "gcp": job({"infra": "gcp"}, hosts=4, machine=V5E.machine("tpu-v5e-16"), document=None, experiment="quickstart"),
    "azure": job(
        {"infra": "azure", "managed": False, "image": "docker:a/b:1"}, hosts=2, environment={"NCCL_DEBUG": "INFO"}
    ),
    "ssh": job({"infra": "ssh/lab"}, hosts=2),
    "kubernetes": job({"infra": "k8s/here"}, hosts=2, machine=H100.machine("h100-8x2")),
}


@pytest.mark.parametrize(
    ("name", "accelerators", "nodes"),
    [("aws", "H100:8", 4), ("gcp", "tpu-v5litepod-16", 1), ("azure", None, 2), ("kubernetes", "H100:8", 2)],
)
def test_hardware_comes_by_the_name_of_the_target(name, accelerators, nodes):
    task = make_task(JOBS[name])
    assert task["resources"].get("accelerators") == accelerators
    assert task["num_nodes"] == nodes, "a TPU slice is one node"


def test_the_run_file_is_carried_word_for_word(tmp_path):
    """The script runs here, with a trainer that prints what it is given."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"; cat "$5"; echo "pid $$"\n')
    (tmp_path / "python").chmod(0o755)
    task = YAML(typ="safe").load(to_yaml(make_task(JOBS["aws"])))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        out = process.communicate(timeout=20)[0]
    words, *rest = out.splitlines()
    assert words.startswith(
        "-m axlearn_plugins_runtime.launch.task sky train axlearn-toy/run.yaml --run-dir s3://bucket/toy"
    )
    assert rest == [*DOCUMENT.splitlines(), f"pid {process.pid}"], (
        "the trainer takes the shell's place, and its signals"
    )


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (job(run_dir="/home/me/run"), "is a local path"),
        (job(spares=1), "has no spare machines"),
        (job(processes_per_host=4), "one process"),
        (job(machine=V5P.machine("tpu-v5p-128x2")), "no name for the target 'tpu-v5p-128x2'"),
        (job(document="experiment: a\nAXLEARN_RUN_FILE\n"), "ends it in the script"),
    ],
)
def test_what_skypilot_cannot_do_is_refused_with_the_remedy(one, message):
    with pytest.raises(RequestError, match=f"(?s){message}.*fix: "):
        make_task(one)


def test_sky_is_found_by_its_variable(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(RequestError, match=r"the command `sky` is not on the PATH\n.*uv tool install"):
        SkyLauncher().check()
    monkeypatch.setenv(COMMAND, str(tmp_path / "sky"))
    with pytest.raises(RequestError, match=f"{COMMAND} is .* which is not a command"):
        find_sky()
    (tmp_path / "sky").write_text('#!/bin/sh\necho "$1 $2 $3 $4"; cat "$5"; exit 3\n')
    (tmp_path / "sky").chmod(0o755)
    assert SkyLauncher().launch(JOBS["aws"], dry_run=False) == 3, "the exit code is that of sky"
    words, _, text = capfd.readouterr().out.partition("\n")
    assert words == "jobs launch --name toy"
    SkyLauncher().launch(JOBS["aws"], dry_run=True)
    assert capfd.readouterr().out == text


PARSER = """
import sys, sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    resources = next(iter(task.resources))
    print(task.name, task.num_nodes, resources.accelerators, resources.use_spot, sorted(task.envs))
    assert "axlearn_plugins_runtime.launch.task sky train" in task.run
"""


@pytest.fixture(scope="module")
def sky_python(tmp_path_factory):
    """An interpreter with SkyPilot, in an environment of its own."""
    if path := os.environ.get("AXLEARN_SKY_PYTHON"):
        return path
    folder = tmp_path_factory.mktemp("sky")
    python = folder / "bin/python"
    for command in (
        ["uv", "venv", "-q", "--python", sys.executable, str(folder), "--allow-existing"],
        ["uv", "pip", "install", "-q", "--python", str(python), "skypilot>=0.14,<0.15"],
    ):
        try:
            # Outside of this repository, whose constraints are those of another environment.
            process = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder)
        except FileNotFoundError:
            pytest.skip("needs uv, to install SkyPilot in an environment of its own")
        if process.returncode:
            pytest.skip(f"needs SkyPilot, which uv could not install: {process.stderr.strip()[-300:]}")
    return str(python)


@pytest.mark.slow
def test_skypilots_own_parser_reads_the_tasks(sky_python, tmp_path):
    for name, one in JOBS.items():
        (tmp_path / f"{name}.yaml").write_text(to_yaml(make_task(one)))
    paths = [str(tmp_path / f"{name}.yaml") for name in JOBS]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    process = subprocess.run([sky_python, "-c", PARSER, *paths], capture_output=True, text=True, env=env, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    lines = [line for line in process.stdout.splitlines() if line.startswith("toy ")]
    assert lines[0].startswith("toy 4 {'H100': 8")
    assert " True " in lines[0]
    assert lines[1].startswith("toy 1 {'tpu-v5litepod-16': 1")
    assert len(lines) == len(JOBS)
    (tmp_path / "wrong.yaml").write_text(to_yaml(make_task(JOBS["aws"]) | {"nodes": 3}))
    process = subprocess.run(
        [sky_python, "-c", PARSER, str(tmp_path / "wrong.yaml")], capture_output=True, text=True, env=env
    )
    assert process.returncode != 0, "the parser refuses what it does not know"
