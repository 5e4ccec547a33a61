"""Sparse upcycling (Komatsuzaki et al., 2022): a trained dense model becomes the start of a mixture of experts.

Every expert starts as a copy of the feed-forward layer that it comes from. Where the weights of a token's experts sum
to 1, the new model computes what the old one did, until training makes the experts differ.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_core.compose import Functional
from axlearn_plugins_finetune.conversion import FRESH, ZERO, transfer_params


def bridge(path: str, shape: Sequence[int], axes: Sequence[str | None], old: Callable[[str], np.ndarray | None]) -> Any:
    """What a mixture of experts has and a dense layer has not; see `axlearn_plugins_finetune.conversion.Bridge`.

    Routers are initialised. Shared experts too, but their last matrix is zero, so that at first they add nothing.
    """
    parts = path.split(".")
    if "shared" in parts:
        return ZERO if "down" in parts else FRESH
    if "router" in parts:
        return FRESH
    dense = old(path) if "experts" in axes else None
    if dense is None or dense.ndim != len(shape) - 1:
        return None
    axis = axes.index("experts")
    return np.repeat(np.expand_dims(dense, axis), shape[axis], axis=axis)


def upcycle(params: Mapping[str, Any], source: Functional, target: Functional, *, seed: int = 0) -> dict[str, Any]:
    """The parameters of `target`, made of those of a dense model that is equal to it but for its experts.

    Args:
        params: path -> array, of `source`.
        source: the dense model; layers that have experts already keep them.
        target: the model with experts.
        seed: of what is initialised.

    Returns:
        Path -> array, of `target`.

    Raises:
        CheckpointError: a parameter of `target` comes from nowhere or has another shape in `source`, or one of `source`
            would be lost.
    """
    return transfer_params(params, source, target, (bridge,), seed=seed)
