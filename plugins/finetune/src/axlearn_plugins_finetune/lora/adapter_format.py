"""Adapter export formats for other libraries. This module does not import JAX."""

from typing import Any, Protocol

from axlearn_core.plugins.registry import registry


class AdapterFormat(Protocol):
    """A writer of adapters for another library. A plugin registers the class as the `NAME-adapters` component."""

    def export(self, run_dir: str, directory: str, *, base: str | None, step: int | None) -> None:
        """Write the adapters of a run.

        Args:
            run_dir: A run with adapters.
            directory: Output directory. Existing files are replaced.
            base: Name of the base model in the files.
            step: Step of the checkpoint. None means the newest.

        Raises:
            RequestError: The run has no adapters, or the format does not support them.
            WorkError: The directory cannot be written.
        """
        ...


def adapter_format(name: str) -> AdapterFormat:
    """Return a registered format. Raise `RequestError`, which names the package to install, if the format is unknown."""
    config: Any = registry().component(f"{name}-adapters")
    return config.owner()
