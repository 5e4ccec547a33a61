"""`--on ray`: a supervised run on the machines of a Ray cluster."""

import shlex
from importlib.util import find_spec

import attrs

from axlearn_core.errors import RequestError
from axlearn_plugins_launch.job import Job


@attrs.frozen(kw_only=True)
class RayOptions:
    """Options of `--on ray`."""

    address: str = "auto"


class RayLauncher:
    """Starts an agent on each machine of a Ray cluster, and supervises the trainers there."""

    Options = RayOptions

    def check(self) -> None:
        """See `Launcher`."""
        if find_spec("ray") is None:
            raise RequestError(
                "--on ray and --on local need Ray, which is not installed\n"
                '    fix: pip install "axlearn-plugins-launch[ray]"'
            )

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """See `Launcher`."""
        if dry_run:
            print(shlex.join(("axlearn", *job.train_words())))
            return 0
        raise NotImplementedError
