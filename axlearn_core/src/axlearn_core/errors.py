"""Exceptions, and helpers for "did you mean" messages.

Errors that a user can cause derive from `RequestError`, and commands exit with code 2. A valid request that fails, for
example because of a full disk or a diverged loss, raises a `WorkError`, and commands exit with code 1.
"""

import difflib
import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs


class AxlearnError(Exception):
    """Base class for the errors that this framework raises."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter print: only the message, because a traceback would hide it.

        `%debug` works as usual. `%tb` in a later cell shows the traceback.
        """
        shell: Any = importlib.import_module("IPython").get_ipython()
        cell = shell.execution_count
        if vars(self).setdefault("_shown_in_cell", cell) != cell:
            return shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__)
        return [*f"{type(self).__name__}: {escape_controls(str(self))}".splitlines(), "", "%tb shows the traceback"]


class WorkError(AxlearnError):
    """A valid request failed."""


class RequestError(AxlearnError):
    """The request was invalid. Nothing has been done or written."""

    exit_code = 2


class PluginError(RequestError):
    """A plugin cannot be loaded, does not support this version of the core, or conflicts with another plugin."""


class InputError(RequestError):
    """The training data is missing, empty, or invalid."""


class CheckpointError(RequestError):
    """A checkpoint or run directory is damaged, or belongs to a different experiment."""


class StorageError(WorkError):
    """Files in storage could not be listed, read, or written."""


class MissingFileError(StorageError):
    """The file does not exist in storage."""


def reason(error: BaseException) -> str:
    """Return the reason for an error on one line: the operating system's message, or else the error's own message."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).splitlines()[0]


@attrs.frozen(kw_only=True)
class Problem:
    """A problem in a config."""

    path: str
    message: str
    got: str | None = None
    expected: str | None = None
    nearest: Sequence[str] = ()
    fix: str | None = None
    location: str | None = None  # "run.yaml:12"

    def __str__(self) -> str:
        head = f"{self.location}: " if self.location else ""
        lines = [f"{head}{self.path or '(root)'}: {self.message}"]
        for label, text in (("got", self.got), ("expected", self.expected)):
            if text is not None:
                lines.append(f"    {label}: {text}")
        if self.nearest:
            lines.append(f"    did you mean: {', '.join(self.nearest)}?")
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)


SHOWN_PROBLEMS = 20
"""Number of problems to print. The rest are only counted."""


class ConfigError(RequestError):
    """One or more problems in a config."""

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        more = len(self.problems) - SHOWN_PROBLEMS
        lines = [str(p) for p in self.problems[:SHOWN_PROBLEMS]]
        return "\n".join(
            [*lines, *([f"and {counted(more, 'more problem')} ({len(self.problems):,} in all)"] if more > 0 else [])]
        )


_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def escape_controls(text: str) -> str:
    """Escape control characters, bidirectional overrides, and lone surrogates, for example as `\\x1b`.

    Messages may quote untrusted files.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def nearest(name: str, candidates: Iterable[str], limit: int = 3, *, cutoff: float = 0.55) -> tuple[str, ...]:
    """Return up to `limit` candidates with a similar spelling, best first.

    `cutoff` is the smallest similarity, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    return tuple(difflib.get_close_matches(name, sorted(set(candidates)), n=limit, cutoff=cutoff))


def unknown(kind: str, name: str, candidates: Iterable[str], *, listing: str | None = None) -> RequestError:
    """Return the error for a name that is not one of `candidates`. `listing` is a command that lists them."""
    names = sorted(set(candidates))
    close = nearest(name, names)
    lines = [f"unknown {kind} {name!r}"]
    if close:
        lines.append(f"    did you mean: {', '.join(close)}?")
    lines.append(f"    known: {', '.join(names) if names else 'none is installed'}")
    if listing:
        lines.append(f"    fix: `{listing}` lists them")
    return RequestError("\n".join(lines))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 file", "2 files", "1,204 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
