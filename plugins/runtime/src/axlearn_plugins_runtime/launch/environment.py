"""Environment variables of trainers: those of the host, without what another scheduler or an earlier attempt left."""

import re
from collections.abc import Iterable, Mapping

_STALE = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|PMI|PMIX|OMPI|PRTE|RAY|JOB_COMPLETION|JOBSET)_.*"
    r"|MEGASCALE_(COORDINATOR_ADDRESS|PORT|SLICE_ID|NUM_SLICES)"
    r"|JAX_(COORDINATOR_ADDRESS|COORDINATOR_BIND_ADDRESS|NUM_PROCESSES|PROCESS_ID|LOCAL_DEVICE_IDS)"
    r"|(MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK)"
)
"""What names a coordinator, a rank or a number of processes of another job: an attempt has its own."""
_OF_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Ray sets these for its own processes."""


def trainer_environment(host: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """The variables that a trainer inherits from its host.

    Args:
        host: of the process that starts it.
        keep: names that always stay.
    """
    keep_names = set(keep)
    under_ray = any(name.startswith("RAY_") for name in host)
    return {
        name: value
        for name, value in host.items()
        if name in keep_names or not (_STALE.fullmatch(name) or (under_ray and name in _OF_RAY))
    }


def attempt_environment(
    *, job: str, coordinator: str, processes: int, rank: int, slices: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Where and as which process a trainer joins an attempt.

    Args:
        job: the id of the supervisor.
        coordinator: `host:port`, new for each attempt: a process that meets an older coordinator ends everybody.
        processes: of the attempt.
        rank: of this one.
        slices: for several TPU slices, `MEGASCALE_NUM_SLICES` and `MEGASCALE_SLICE_ID`.
    """
    own = {
        "AXLEARN_JOB": job,
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(rank),
    }
    if slices:
        own |= {**slices, "MEGASCALE_COORDINATOR_ADDRESS": coordinator.rpartition(":")[0]}
    return own
