"""Self-contained HTML reports from the files of a run directory. Does not import JAX."""

from axlearn_plugins_tools.reporting.page import Report, write_report

__all__ = ["Report", "write_report"]
