"""Jobs of several processes on this machine, through the command line."""

import socket
import subprocess
import sys

from support import cli_runs


def start(arguments, count=2, devices=1, other=None, other_env=None, folders=None, program=("-m", "axlearn_core")):
    """Start the processes of a job.

    Args:
        program: Arguments of Python that come before the others.
        other: Arguments of the last process, if they differ.
        other_env: Additional environment variables of the last process.
        folders: Working directory of each process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    env = (
        cli_runs.environment()
        | flags
        | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    )
    return [
        subprocess.Popen(
            [sys.executable, *program, *(other if other and i == count - 1 else arguments)],
            env=env | {"JAX_PROCESS_ID": str(i)} | (other_env or {} if i == count - 1 else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folders[i] if folders else None,
        )
        for i in range(count)
    ]


def finish(processes, code=0):
    """Wait for the processes, check their exit codes, and return their standard errors."""
    texts = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(texts)[-4000:]
    return texts


def together(arguments, count=2, devices=1):
    finish(start(arguments, count, devices))
