"""The hooks of this plugin. Imports no JAX."""

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_run_listeners() -> list[str]:
    """Lost processes of the job, and the compiled step."""
    return ["axlearn_plugins_runtime.job.peers:peer_watch", "axlearn_plugins_runtime.job.compiled_step:compiled_step"]
