"""Environment variables of trainers, without variables from an outer scheduler or an earlier attempt."""

import re
from collections.abc import Iterable, Mapping

_STALE = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|PMI|PMIX|OMPI|PRTE|RAY|JOB_COMPLETION|JOBSET)_.*"
    r"|MEGASCALE_(COORDINATOR_ADDRESS|PORT|SLICE_ID|NUM_SLICES)"
    r"|JAX_(COORDINATOR_ADDRESS|COORDINATOR_BIND_ADDRESS|NUM_PROCESSES|PROCESS_ID|LOCAL_DEVICE_IDS)"
    r"|(MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK)"
)
"""Variables with the coordinator, rank or process count of a different job. Each attempt sets its own."""
_RAY_VARIABLES = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Variables that Ray sets for its own processes."""


def trainer_environment(host: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that a trainer inherits from its host.

    Args:
        host: Environment of the process that starts the trainer.
        keep: Names of variables that are always inherited.
    """
    keep_names = set(keep)
    under_ray = any(name.startswith("RAY_") for name in host)
    return {
        name: value
        for name, value in host.items()
        if name in keep_names or not (_STALE.fullmatch(name) or (under_ray and name in _RAY_VARIABLES))
    }


def attempt_environment(
    *, job: str, coordinator: str, processes: int, rank: int, slices: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that a trainer needs to join an attempt.

    Args:
        job: Id of the supervisor.
        coordinator: `host:port`, different for each attempt. A process that joins an older coordinator would end the job.
        processes: Number of processes in the attempt.
        rank: Rank of the trainer.
        slices: `MEGASCALE_NUM_SLICES` and `MEGASCALE_SLICE_ID` if there are several TPU slices.
    """
    variables = {
        "AXLEARN_JOB": job,
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(rank),
    }
    if slices:
        variables |= {**slices, "MEGASCALE_COORDINATOR_ADDRESS": coordinator.rpartition(":")[0]}
    return variables
