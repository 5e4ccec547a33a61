"""Self-contained HTML reports from the files of a run directory. Does not import JAX."""

from axlearn_plugins_tools.reporting.page import write_report

__all__ = ["write_report"]
