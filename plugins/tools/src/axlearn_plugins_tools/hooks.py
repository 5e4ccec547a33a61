"""Hook implementations of this package."""

from __future__ import annotations

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_doctor_checks() -> list[str]:
    """Add a check to `axlearn plugins doctor` for replaced parts of the core."""
    return ["axlearn_plugins_tools.doctor.core_integrity:find_replaced_attributes"]
