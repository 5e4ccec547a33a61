"""Formats of other libraries that adapters can be exported in. Imports no JAX."""

from typing import Any, Protocol

from axlearn_core.plugins.registry import registry


class AdapterFormat(Protocol):
    """Writes adapters for another library. A plugin registers the class as the component `NAME-adapters`."""

    def export(self, run_dir: str, directory: str, *, base: str | None, step: int | None) -> None:
        """Writes the adapters of a run.

        Args:
            run_dir: a run with adapters.
            directory: where; files of the same names are replaced.
            base: the base model that the files name.
            step: the checkpoint; None takes the newest.

        Raises:
            RequestError: the run has no adapters, or the format has no place for them.
            WorkError: the directory cannot be written.
        """
        ...


def adapter_format(name: str) -> AdapterFormat:
    """The format that a plugin registers; raises `RequestError`, with the package that brings it, if none does."""
    config: Any = registry().component(f"{name}-adapters")
    return config.owner()
