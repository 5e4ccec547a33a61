"""`--on local`: the engine of `--on ray`, started on this machine."""

from axlearn_plugins_launch.ray import RayLauncher


class LocalLauncher(RayLauncher):
    """Starts Ray on this machine, each host an actor of its own, and supervises the trainers there."""
