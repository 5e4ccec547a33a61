"""Saved positions of the data: which order they are of, and whether they fit the data. Imports no Grain."""

from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_core.errors import InputError

ORDER = 2
"""The version of the order in which data is read; it is saved with each position. `order_1` is the one that was not saved."""

OLD_ORDER = (
    "the run goes on in the order of data that it began with, which is that of an older version: if there is less data "
    "than a batch takes several times, its batches can repeat rows. A new run has different rows in every batch"
)
"""What to tell a person when a run goes on from a position without the current `ORDER`."""


def is_current(state: Mapping[str, Any]) -> bool:
    """Whether a position was saved with the order of this version."""
    return state.get("order") == ORDER


def check_position(state: Mapping[str, Any], small: Sequence[bool]) -> None:
    """Raises `InputError` if a shard's position is one in data of another size.

    Args:
        state: the position, of the current order.
        small: of each part of the data, whether its rows are dealt.
    """
    rows = state["rows"]
    dealt = ["records" in part for part in rows.get("parts", [rows])]
    if dealt != list(small):
        kinds = {True: "rows (of small data)", False: "records (of large data)"}
        raise InputError(
            "the saved data position does not fit this data\n"
            f"    got: a position in {', '.join(kinds[d] for d in dealt)}\n"
            f"    expected: a position in {', '.join(kinds[s] for s in small)}\n"
            "    fix: resume with the data and batch size that the run began with; --restart begins at step 0"
        )
