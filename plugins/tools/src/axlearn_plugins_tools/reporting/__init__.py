"""One self-contained HTML page about a run, from the files in its directory. Imports no JAX of its own."""

from axlearn_plugins_tools.reporting.page import write_report

__all__ = ["write_report"]
