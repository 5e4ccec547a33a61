"""Suite for process groups. Each test starts new processes, because a process can join only one job in its lifetime."""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from axlearn_core.config import Node

LAUNCHERS = ("SLURM_", "OMPI_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
"""Prefixes of the environment variables that identify a launcher."""

MEMBER = """
import pickle, sys
paths, config = pickle.load(sys.stdin.buffer)
sys.path[:] = paths
group = pickle.loads(config).build()
for _ in range(2):
    group.initialize()
pickle.loads(config).build().initialize()
import jax
jax.config.update("jax_num_cpu_devices", 2)  # raises if JAX has already initialized its devices
print("member", jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count())
"""


class ProcessGroupSuite:
    """Tests that every process group must pass.

    Attributes:
        config: Config of the process group. Its class must be importable.
        seconds: Time limit for the processes.
    """

    config: Node[Any]
    seconds: float = 120.0

    def environment(self, rank: int, count: int, address: str) -> Mapping[str, str] | None:
        """Return the variables that a launcher sets for one process, or None if the group does not use any.

        Args:
            rank: Rank of the process, from 0.
            count: Number of processes.
            address: `host:port` that the first process can listen on.
        """
        return None

    def members(self, environments: list[Mapping[str, str]]) -> list[str]:
        """Run one process per environment. Each joins three times, and prints its rank and devices."""
        names = [name for name in os.environ if not name.startswith(LAUNCHERS)]
        base = {name: os.environ[name] for name in names} | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        message = pickle.dumps((sys.path, pickle.dumps(self.config)))
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER],
                env=base | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for environment in environments
        ]
        try:
            for process in processes:
                assert process.stdin
                process.stdin.write(message)
                process.stdin.close()
                process.stdin = None
            outputs = [process.communicate(timeout=self.seconds) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors.decode(errors="replace")[-3000:]
        lines = [line for output, _ in outputs for line in output.decode().splitlines()]
        return sorted(line for line in lines if line.startswith("member"))

    def test_single_process_has_no_group(self) -> None:
        assert self.members([{}]) == ["member 0 1 2 2"], "expected rank 0 of 1, with two devices"

    def test_two_processes_form_one_job(self) -> None:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            address = f"localhost:{listener.getsockname()[1]}"
        environments = [self.environment(rank, 2, address) for rank in range(2)]
        if None in environments:
            pytest.skip("needs the environment variables of a launcher: define `environment`")
        members = self.members([e for e in environments if e is not None])
        assert members == ["member 0 2 2 4", "member 1 2 2 4"], "expected: rank, processes, local devices, all devices"
