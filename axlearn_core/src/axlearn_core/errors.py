"""One tree of errors, and the "did you mean" helper.

Every error that a user can cause derives from `RequestError` and ends a command with exit code 2; work that was asked
for correctly and failed (a full disk, a diverged loss) derives from `WorkError` and ends it with exit code 1.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

import attrs


class AxlearnError(Exception):
    """The root of all errors that this framework raises on purpose."""

    exit_code = 1


class WorkError(AxlearnError):
    """The request was right; doing it failed."""


class RequestError(AxlearnError):
    """The request was wrong. Nothing has been done or written."""

    exit_code = 2


class PluginError(RequestError):
    """A plugin cannot be loaded, is for another version of the core, or claims what another one claims."""


class InputError(RequestError):
    """The training data is missing, empty or not what its reader expects."""


class CheckpointError(RequestError):
    """A checkpoint or run directory is damaged, or belongs to something else."""


class StorageError(WorkError):
    """A storage could not be listed, read or written."""


class MissingFileError(StorageError):
    """A storage has no file of this path."""


def reason(error: BaseException) -> str:
    """Why something failed, in one line: what the system says of it, or else the error's own text."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).splitlines()[0]


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is wrong with a config."""

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
"""As many problems are printed; of the rest, how many there are."""


class ConfigError(RequestError):
    """One or more problems in a config, all of them reported at once."""

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        more = len(self.problems) - SHOWN_PROBLEMS
        lines = [str(p) for p in self.problems[:SHOWN_PROBLEMS]]
        return "\n".join(
            [*lines, *([f"and {more:,} more problems ({len(self.problems):,} in all)"] if more > 0 else [])]
        )


_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def escape_controls(text: str) -> str:
    """`text` with what steers a terminal or turns its direction, and lone surrogates, as escapes such as `\\x1b`.

    Messages quote files of others.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """The `limit` candidates closest in spelling to `name`, best first; empty where nothing is close."""
    return tuple(difflib.get_close_matches(name, sorted(set(candidates)), n=limit, cutoff=0.55))


def unknown(kind: str, name: str, candidates: Iterable[str], *, listing: str | None = None) -> RequestError:
    """The error for a name that is not one of `candidates`; `listing` is the command that lists them."""
    names = sorted(set(candidates))
    close = nearest(name, names)
    lines = [f"unknown {kind} {name!r}"]
    if close:
        lines.append(f"    did you mean: {', '.join(close)}?")
    lines.append(f"    known: {', '.join(names) if names else 'none is installed'}")
    if listing:
        lines.append(f"    fix: `{listing}` lists them")
    return RequestError("\n".join(lines))
