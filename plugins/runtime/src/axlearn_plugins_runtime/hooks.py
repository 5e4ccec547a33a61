"""The hooks of this plugin. Imports no JAX."""

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_run_listeners() -> list[str]:
    """The parts of jobs. Listeners of one position open in this order: the lock is taken before the working copy is fetched."""
    job = "axlearn_plugins_runtime.job"
    return [
        f"{job}.holder:lock_holder",
        f"{job}.mirror:mirror",
        f"{job}.peers:peer_watch",
        f"{job}.compiled_step:compiled_step",
        f"{job}.stops:stops",
        f"{job}.phases:phase_clock",
    ]
