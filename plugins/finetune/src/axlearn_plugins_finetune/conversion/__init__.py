"""Transfer the parameters of a run to a different model."""

from axlearn_plugins_finetune.conversion.carry import FRESH, ZERO, Bridge, bridges, transfer_params
from axlearn_plugins_finetune.conversion.convert import transfer_run

__all__ = ["FRESH", "ZERO", "Bridge", "bridges", "transfer_params", "transfer_run"]
