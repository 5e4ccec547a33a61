"""Runs made of runs: read one, carry its parameters over to another model, write the new one."""

from axlearn_plugins_finetune.runs.carry import FRESH, ZERO, Bridge, bridges, transfer_params
from axlearn_plugins_finetune.runs.convert import carried
from axlearn_plugins_finetune.runs.runs import appearing, check_new, local_target, open_run, write_run, write_weights

__all__ = [
    "FRESH", "ZERO", "Bridge", "appearing", "bridges", "carried", "check_new", "local_target", "open_run", "transfer_params",
    "write_run", "write_weights",
]  # fmt: skip
