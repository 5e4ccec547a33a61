"""The bridge of the feature `multi-token-prediction`."""

from collections.abc import Callable, Sequence

import numpy as np

from axlearn_plugins_finetune.conversion.param_transfer import FRESH, Fill


def bridge(
    path: str, shape: Sequence[int], axes: Sequence[str | None], old: Callable[[str], np.ndarray | None]
) -> Fill | None:
    """Initialize the depths that the old model lacks; see `param_transfer.Bridge`."""
    return FRESH if path.startswith("mtp.") else None
