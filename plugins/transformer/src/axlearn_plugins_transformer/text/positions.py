"""Saved data positions: their order, and checks that they match the data.

This module does not import Grain.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_core.errors import InputError

ORDER = 2
"""Version of the order in which data is read, saved with each position. Positions without a version use `order_1`."""

OLD_ORDER = (
    "the run continues in the data order of the older version that started it: if there is little data relative to the "
    "batch size, its batches can repeat rows. In a new run, the rows of a batch are different"
)
"""Note for a run that resumes from a position without the current `ORDER`."""


def is_current(state: Mapping[str, Any]) -> bool:
    """Return whether a position was saved with the order of this version."""
    return state.get("order") == ORDER


def check_position(state: Mapping[str, Any], small: Sequence[bool]) -> None:
    """Raise InputError if a shard's position belongs to data of a different size.

    Args:
        state: The position, in the current order.
        small: Whether each part of the data is small.
    """
    rows = state["rows"]
    saved_small = ["records" in part for part in rows.get("parts", [rows])]
    if saved_small != list(small):
        kinds = {True: "rows (of small data)", False: "records (of large data)"}
        raise InputError(
            "the saved data position does not fit this data\n"
            f"    got: a position in {', '.join(kinds[s] for s in saved_small)}\n"
            f"    expected: a position in {', '.join(kinds[s] for s in small)}\n"
            "    fix: resume with the original data and batch size; --restart begins at step 0"
        )
