"""How processes end, told apart; what a trainer inherits; what is asked for wrongly."""

import json
import signal

import pytest

from axlearn_core.errors import InputError, RequestError, StorageError, WorkError
from axlearn_plugins_runtime.launch.environment import attempt_environment, trainer_environment
from axlearn_plugins_runtime.launch.exits import Death, Exit, classify_error, classify_exit, root_cause


@pytest.mark.parametrize(
    ("end", "tail", "phase", "kind"),
    [
        (Exit(code=0), "", "step", "finished"),
        (Exit(code=-signal.SIGKILL), "", "step", "infrastructure"),
        (Exit(code=-signal.SIGSEGV), "", "step", "infrastructure"),
        (Exit(code=-signal.SIGABRT), "terminate called after std::bad_alloc", "step", "infrastructure"),
        (Exit(code=-signal.SIGABRT), "JAX distributed service detected fatal errors", "step", "peer"),
        (Exit(code=128 + signal.SIGTERM), "", "save", "preempted"),
        (Exit(code=75), "watchdog: hang", "step", "stalled"),
        (Exit(code=2), "error: no such file", "start", "request"),
        (Exit(code=1, kind="user", message="ValueError: x"), "", "step", "user"),
        (Exit(code=1, kind="user", message="ValueError: x"), "", "input", "data"),
        (Exit(code=1, kind="peer", message="JaxRuntimeError: gloo"), "", "step", "peer"),
        (Exit(code=1), "Traceback\nMemoryError", "step", "user"),
    ],
)
def test_ends(end, tail, phase, kind):
    assert classify_exit(end, tail, phase)[0] == kind


def test_errors():
    class JaxRuntimeError(RuntimeError):
        pass

    assert classify_error(InputError("no data")) == "data"
    late = WorkError("after step 3: no data")
    late.__cause__ = InputError("no data")
    assert classify_error(late) == "data"
    assert classify_error(RequestError("wrong")) == "request"
    assert classify_error(StorageError("503")) == "infrastructure"
    assert classify_error(OSError(28, "No space left on device")) == "infrastructure"
    assert classify_error(JaxRuntimeError("UNAVAILABLE: connection reset by peer")) == "peer"
    assert classify_error(JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")) == "user"
    assert classify_error(ZeroDivisionError("division by zero")) == "user"


def test_a_killed_process_explains_those_that_lost_it():
    deaths = [Death(rank=0, kind="peer", reason=""), Death(rank=3, kind="infrastructure", reason="")]
    assert root_cause(deaths) is deaths[1]
    assert root_cause([]) is None


def test_nothing_of_another_job_is_inherited():
    stale = {
        "SLURM_NTASKS": "64",
        "SLURM_PROCID": "3",
        "MEGASCALE_COORDINATOR_ADDRESS": "old:8080",
        "JAX_COORDINATOR_ADDRESS": "old:1234",
        "JAX_NUM_PROCESSES": "64",
        "JAX_PROCESS_ID": "3",
        "OMPI_COMM_WORLD_SIZE": "2",
        "RAY_JOB_ID": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {"PATH": "/bin", "JAX_PLATFORMS": "cpu", "TPU_WORKER_ID": "2", "XLA_FLAGS": "--x"}
    assert trainer_environment(stale | environment) == environment
    assert trainer_environment({"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}  # nobody but the user set it
    assert trainer_environment(stale, keep=["SLURM_NTASKS"]) == {"SLURM_NTASKS": "64"}
    own = attempt_environment(job="j", coordinator="new:1", processes=2, rank=1)
    assert own["JAX_COORDINATOR_ADDRESS"] == "new:1"


def test_a_new_attempt_takes_the_run_over_at_once(tmp_path, monkeypatch):
    """Where rank 0 was on another machine, its file would count as alive for a minute."""
    from axlearn_core.checkpoint.storage import LocalStorage
    from axlearn_core.errors import CheckpointError
    from axlearn_plugins_runtime.job.holder import Holder

    monkeypatch.setenv("AXLEARN_JOB", "a job")
    first = Holder(LocalStorage(tmp_path), "the run", "id")
    first._ended.set()
    file = tmp_path / f".trainer-{first.number}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "elsewhere"}))
    monkeypatch.setenv("AXLEARN_JOB", "another job")
    monkeypatch.setattr("axlearn_plugins_runtime.job.holder.STALE_SECONDS", 3600)
    with pytest.raises(CheckpointError, match="in use by another trainer"):
        Holder(LocalStorage(tmp_path), "the run", "id")
    monkeypatch.setenv("AXLEARN_JOB", "a job")
    Holder(LocalStorage(tmp_path), "the run", "id").release()
