"""Check that the model has a row for each token ID and label of a batch.

An ID without a row does not fail on a device: it reads another row, or gives a loss of NaN.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from axlearn_core.compose import Program
from axlearn_core.contracts.capabilities import HasClasses, vocabulary_size
from axlearn_core.errors import InputError

SETTINGS = {"tokens": "model.vocab_size", "targets": "model.vocab_size", "labels": "model.num_classes"}
"""Setting with the number of rows for the IDs in an entry of a batch."""


def count_rows(program: Program) -> dict[str, int]:
    """Return entry of a batch -> number of IDs that the model has rows for."""
    vocab_size, model = vocabulary_size(program.functional.describe()), program.config.model
    rows = {} if vocab_size is None else {"tokens": vocab_size, "targets": vocab_size}
    return {**rows, "labels": model.num_classes} if isinstance(model, HasClasses) else rows


def check_ids(batch: Mapping[str, Any], rows: Mapping[str, int]) -> None:
    """Check the IDs of this process's rows of a batch. Padding and IDs without weight may have any value.

    Args:
        batch: Arrays from the input. Arrays on devices are not checked.
        rows: Number of IDs by entry; see `count_rows`.

    Raises:
        InputError: The model has no row for an ID.
    """
    for name, count in rows.items():
        ids = batch.get(name)
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.size == 0:
            continue
        if ids.min() >= 0 and ids.max() < count:  # the usual case, in two fast passes
            continue
        wrong, counted = (ids < 0) | (ids >= count), batch.get("segment_ids" if name == "tokens" else "weights")
        if counted is not None and np.shape(counted) == ids.shape:
            wrong &= np.asarray(counted) != 0
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            raise InputError(
                f"input: {name}{list(place)} of a batch: the model has no row for this id\n    got: {ids[place]}\n"
                f"    expected: 0 to {count - 1}\n    fix: correct the input, or set {SETTINGS[name]}"
            )
