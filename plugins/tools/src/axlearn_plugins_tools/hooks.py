"""The checks that this package adds to `axlearn plugins doctor`."""

from __future__ import annotations

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_doctor_checks() -> list[str]:
    """Whether a plugin replaced a part of the core."""
    return ["axlearn_plugins_tools.doctor.core_integrity:find_replaced_attributes"]
