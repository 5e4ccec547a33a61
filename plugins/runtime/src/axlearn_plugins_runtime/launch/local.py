"""`--on local`: a supervised run under Ray on this machine."""

from typing import Any

import attrs

from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.ray import RayLauncher, SupervisorOptions


@attrs.frozen(kw_only=True)
class LocalOptions(SupervisorOptions):
    """Options for `--on local`."""


class LocalLauncher(RayLauncher):
    """Starts Ray on this machine with an actor for each host, and supervises the trainers."""

    Options = LocalOptions
    spread = False

    def _connect(self, ray: Any, job: Job) -> None:
        try:
            ray.init(
                address="local",
                num_cpus=job.hosts + job.spares,  # one for each agent; the trainers share the machine
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:  # Ray raises plain `Exception` if it does not start in time
            raise RequestError(
                f"cannot start Ray on this machine: {error}\n    fix: see /tmp/ray/session_latest/logs"
            ) from error

    def _resources(self, job: Job) -> dict[str, float]:
        return {"CPU": 1.0}
