"""Hooks of this plugin. Does not import JAX."""

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_run_listeners() -> list[str]:
    """Return the listeners of this plugin.

    Listeners with the same position open in this order, so the lock is taken before the working copy is fetched.
    """
    job = "axlearn_plugins_runtime.job"
    return [
        f"{job}.holder:lock_holder",
        f"{job}.mirror:mirror",
        f"{job}.peers:peer_watch",
        f"{job}.compiled_step:compiled_step",
        f"{job}.stops:early_stop",
        f"{job}.phases:phase_clock",
    ]
