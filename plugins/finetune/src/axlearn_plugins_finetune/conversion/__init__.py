"""Transfer the parameters of a run to a different model."""

from axlearn_plugins_finetune.conversion.convert import transfer_run
from axlearn_plugins_finetune.conversion.param_transfer import FRESH, ZERO, Bridge, load_bridges, transfer_params

__all__ = ["FRESH", "ZERO", "Bridge", "load_bridges", "transfer_params", "transfer_run"]
