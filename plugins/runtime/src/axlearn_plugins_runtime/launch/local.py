"""`--on local`: the engine of `--on ray`, started on this machine."""

from typing import Any

import attrs

from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.ray import RayLauncher, SupervisorOptions


@attrs.frozen(kw_only=True)
class LocalOptions(SupervisorOptions):
    """Options of `--on local`."""


class LocalLauncher(RayLauncher):
    """Starts Ray on this machine, each host an actor of its own, and supervises the trainers there."""

    Options = LocalOptions
    spread = False

    def _connect(self, ray: Any, job: Job) -> None:
        try:
            ray.init(
                address="local",
                num_cpus=job.hosts + job.spares,  # one for each agent; the trainers share what the machine has
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:  # where the machine is too busy to start it in time, Ray raises that class itself
            raise RequestError(
                f"Ray cannot be started here: {error}\n    fix: see /tmp/ray/session_latest/logs"
            ) from error

    def _resources(self, job: Job) -> dict[str, float]:
        return {"CPU": 1.0}
