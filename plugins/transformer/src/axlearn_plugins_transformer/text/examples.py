"""Training examples: the tokens of a document as one array.

This module does not import Grain.
"""

from collections.abc import Sequence

import numpy as np

Example = np.ndarray
"""int32 [T, 3]: input token, target, and the bits of the target's float32 weight. One array, for Grain's packing."""


def example(inputs: Sequence[int], targets: Sequence[int], weights: Sequence[float] | float = 1.0) -> Example:
    """Build an `Example` of T tokens."""
    rows = np.empty((len(targets), 3), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = inputs, targets, np.asarray(weights, np.float32).view(np.int32)
    return rows
