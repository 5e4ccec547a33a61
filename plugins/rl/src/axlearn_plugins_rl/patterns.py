"""Check regular expressions in configs, and extract text with them."""

import re
from collections.abc import Iterator

from axlearn_core.errors import Problem

ANSWER = r"(?s)<answer>(.*?)</answer>"
"""Matches an answer in tags. The first group is the answer."""


def pattern_problems(path: str, pattern: str | None) -> Iterator[Problem]:
    """Yield a problem if a pattern in the field `path` is not a regular expression."""
    if pattern is None:
        return
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield Problem(
            path=path,
            message=f"is not a regular expression: {error}",
            got=pattern,
            fix="see the syntax of Python's `re`",
        )


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of a pattern's last match in a text, the whole match if there are no groups, or None."""
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    if match is None:
        return None
    return (match[1] or "") if pattern.groups else match[0]


def extract_answer(pattern: str | re.Pattern[str], text: str) -> str:
    """Return the `last_match` of a pattern in a text, or the whole text if it does not match."""
    match = last_match(re.compile(pattern), text)
    return text if match is None else match
