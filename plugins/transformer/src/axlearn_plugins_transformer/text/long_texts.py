"""The error for texts that have more tokens than a row of the batch."""

from collections.abc import Sequence

from axlearn_core.errors import InputError


def long_text_error(
    kind: str, lengths: Sequence[tuple[str, int]], *, total: int | None, limit: int, sequence_length: int, fix: str
) -> InputError:
    """Return the error for texts that do not fit into a row.

    Args:
        kind: Singular noun for a text, such as "conversation".
        lengths: Location and number of tokens of each text that is too long, in the order of the data.
        total: Number of texts, or None if only one was read.
        limit: Maximum number of tokens of a text.
        sequence_length: Value of `input.sequence_length`.
        fix: Fix to suggest as an alternative to raising `input.sequence_length`.
    """
    location, count = lengths[0]
    longest, most = max(lengths, key=lambda item: item[1])
    counts = ""
    if total is not None:
        counts = f"    too long: {len(lengths):,} of {total:,} {kind}s; the longest has {most:,} tokens ({longest})\n"
    return InputError(
        f"{location}: the {kind} is longer than a row\n    got: {count:,} tokens\n"
        f"    expected: at most {limit:,}, as input.sequence_length is {sequence_length}\n"
        f"{counts}    fix: raise input.sequence_length to at least {most - (limit - sequence_length)}, or {fix}"
    )
