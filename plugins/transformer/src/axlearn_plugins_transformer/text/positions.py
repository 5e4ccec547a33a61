"""Saved positions of the data: what they are of, and what older versions wrote. Imports no Grain."""

from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_core.errors import InputError

ORDER = 2
"""The version of the order in which shards read, saved with their positions. 1, which was not saved, gave shards with
equal numbers of documents the same shuffles."""

OLD_ORDER = (
    "the data position is of an older version, which shuffled in another way: until its pass over the data ends, "
    "some documents can come twice or not at all"
)
"""What to tell a person when a run goes on from a position without the current `ORDER`."""

_PERIOD = 10_000  # order 1: entries of the pattern of a mixture over which shards were spread


def read_position(state: Mapping[str, Any], shard: int, num_shards: int, small: Sequence[bool]) -> dict[str, Any]:
    """A shard's position, as this version saves it.

    Args:
        state: the position, which an older version may have saved.
        shard: whose position it is.
        num_shards: of the run.
        small: of each part of the data, whether its rows are dealt.

    Raises:
        InputError: the position is one in data of another size.
    """
    rows = state["rows"] if "order" in state else _from_order_1(state, shard * _PERIOD // num_shards)
    parts = rows.get("parts", [rows])
    dealt = ["records" in part for part in parts]
    if dealt != list(small):
        kinds = {True: "rows (of small data)", False: "records (of large data)"}
        old = "" if "order" in state else ", as an older version saved it for data of any size"
        raise InputError(
            "the saved data position does not fit this data\n"
            f"    got: a position in {', '.join(kinds[d] for d in dealt)}{old}\n"
            f"    expected: a position in {', '.join(kinds[s] for s in small)}\n"
            "    fix: resume with the data, batch size and version that the run began with; --restart begins at step 0"
        )
    return {"order": ORDER, "rows": rows}


def is_current(state: Mapping[str, Any]) -> bool:
    """Whether a shard's position was saved with the order of this version."""
    return state.get("order") == ORDER


def _from_order_1(state: Mapping[str, Any], start: int) -> Mapping[str, Any]:
    """The rows of a mixture were numbered from another start in each shard."""
    return {"turn": state["index"] - start, "parts": state["parents"]} if "parents" in state else state
