"""What the core itself says through hooks."""

from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_targets() -> list[Target]:
    """The CPU, which has no peak that holds for all of them: no MFU is shown on it."""
    return [Target(name="cpu", device_kinds=("cpu",))]
