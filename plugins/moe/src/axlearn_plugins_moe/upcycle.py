"""Sparse upcycling: initialize experts from a trained dense model.

See Komatsuzaki et al., 2022. Every expert starts as a copy of the feed-forward layer that it replaces. If the weights
of a token's experts sum to 1, the new model initially computes the same function as the dense model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_core.compose import Functional
from axlearn_plugins_finetune.conversion import FRESH, ZERO, transfer_params


def bridge(path: str, shape: Sequence[int], axes: Sequence[str | None], old: Callable[[str], np.ndarray | None]) -> Any:
    """Return the initial value of a parameter that the dense model lacks.

    See `axlearn_plugins_finetune.conversion.Bridge`. Routers and shared experts are initialized randomly, except that the last
    matrix of a shared expert is zero, so it initially contributes nothing.
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
    """Return parameters for `target`, built from a dense model.

    The models must differ only in their experts.

    Args:
        params: Parameters of `source`, path -> array.
        source: The dense model. Layers that already have experts keep them.
        target: The model with experts.
        seed: Random seed for newly initialized parameters.

    Returns:
        Parameters of `target`, path -> array.

    Raises:
        CheckpointError: `source` has no parameter for one of `target`, the shapes differ, or a parameter of `source`
            would be lost.
    """
    return transfer_params(params, source, target, (bridge,), seed=seed)
