"""A run goes on with another mesh, or with another number of devices or processes, as it does with the core's checkpointer."""

import socket
import subprocess
import sys

import pytest

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from support import api_runs, cli_runs

KINDS = {"orbax": OrbaxCheckpointer.Config, "sharded": ShardedCheckpointer.Config}
MESHES = [
    ({"fsdp": 8}, {"data": 4, "fsdp": 2}),
    ({"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}),
    ({"fsdp": 4, "tensor": 2}, {"fsdp": 8}),
]


def same(runs):
    assert cli_runs.losses(runs["orbax"]) == cli_runs.losses(runs["sharded"])
    states = {kind: cli_runs.stored_state(run) for kind, run in runs.items()}
    assert states["orbax"].keys() >= {"step", "rng"}
    assert states["orbax"] == states["sharded"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), MESHES, ids=str)
def test_a_run_goes_on_with_another_mesh(first, second, tmp_path):
    runs = {kind: tmp_path / kind for kind in KINDS}
    for kind, run in runs.items():
        for steps, shape in ((3, first), (6, second)):
            settings = {"mesh.shape": shape, "checkpointer": KINDS[kind](every_steps=3)}
            api_runs.train(run, steps=steps, **settings)
            if steps == 3:
                before = cli_runs.stored_state(run)
                api_runs.train(run, steps=3, **settings | {"mesh.shape": second})  # restores, and has nothing to do
                assert cli_runs.stored_state(run) == before
    same(runs)


def train(run, kind, steps, *words, processes=1):
    """A training by the command line; of one device in each process, unless `words` name a target."""
    settings = (f"checkpointer={{type: {kind}, every_steps: 2}}",)
    command = [
        sys.executable,
        "-m",
        "axlearn_core",
        *cli_runs.arguments(run, steps=steps, settings=settings, more=words),
    ]
    environment = cli_runs.environment()
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}"}
        environment |= {"JAX_NUM_PROCESSES": str(processes)}
    job = [
        subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    try:
        for process in job:
            _, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-3000:]
    finally:
        for process in job:
            process.kill()


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices_and_processes(tmp_path):
    runs = {kind: tmp_path / kind for kind in KINDS}
    for kind, run in runs.items():
        train(run, kind, 3, processes=2)
        train(run, kind, 5, "--target", "cpu-4", "--set", "mesh.shape={fsdp: 4}")
        train(run, kind, 7, processes=2)
        train(run, kind, 8)
    same(runs)
