"""Runs made of runs: read one, carry its parameters over to another model, write the new one."""

from axlearn_plugins_runs.carry import FRESH, ZERO, Bridge, bridges, carry
from axlearn_plugins_runs.convert import carried
from axlearn_plugins_runs.runs import (
    Restored,
    appearing,
    check_new,
    config_of,
    restored,
    write_checkpoint,
    write_run,
)

__all__ = [
    "FRESH",
    "ZERO",
    "Bridge",
    "Restored",
    "appearing",
    "bridges",
    "carried",
    "carry",
    "check_new",
    "config_of",
    "restored",
    "write_checkpoint",
    "write_run",
]
