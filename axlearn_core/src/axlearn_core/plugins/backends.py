"""Prepare this process for JAX's device discovery. Does not import JAX."""

from axlearn_core.compat import has_jax_started, requested_platforms
from axlearn_core.errors import PluginError
from axlearn_core.plugins.manager import host


def prepare_backends() -> None:
    """Call the hook `axlearn_before_devices`, unless JAX has already started.

    Every entry point that may be the first to start JAX calls this. Without it, the compilers that plugins install for absent
    hardware print errors when JAX starts.
    """
    if has_jax_started():
        return
    try:
        plugins = host()
    except PluginError:
        return  # the first caller that needs a hook raises the error; other callers work without the broken plugin
    plugins.hook.axlearn_before_devices(platforms=requested_platforms())
