"""Parameters of a run carried over to another model."""

from axlearn_plugins_finetune.conversion.carry import FRESH, ZERO, Bridge, bridges, transfer_params
from axlearn_plugins_finetune.conversion.convert import carried

__all__ = ["FRESH", "ZERO", "Bridge", "bridges", "carried", "transfer_params"]
