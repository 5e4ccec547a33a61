"""Check properties of a case, in one process or in several."""

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs

from axlearn_core.errors import AxlearnError
from axlearn_plugins_verify.prove.case import Case
from axlearn_plugins_verify.prove.contract import Outcome, Property
from axlearn_plugins_verify.prove.helper_process import HelperProcess

HOLDS, FAILS, SKIPPED, NOT_RUN = "holds", "FAILS", "skipped", "not run"
STEP_PROPERTIES = ("mesh", "microbatches", "scan", "remat", "padding", "derivatives", "gradients")
"""Properties that compare training steps, and so share compiled functions. The longest comes first."""
SEPARATE_PROPERTIES = (
    "export",
    "causality",
    "packed-documents",
    "decode",
    "resume",
    "paged-decode",
    "kernels",
    "settings",
)
"""Properties that share few functions with a training step. The longest comes last."""
PROPERTIES_PER_PROCESS = 4
"""Each process checks at least so many properties, because it takes some seconds to start and compiles some functions again."""


@attrs.frozen(kw_only=True)
class Check:
    """A property that was checked with one seed.

    Attributes:
        name: Name of the property.
        summary: The statement that the property makes, as one sentence.
        seed: Seed for the weights and batches.
        status: `holds`, `FAILS`, `skipped` or `not run`.
        outcome: Result, or None if the check was skipped, not run, or ended with an error.
        reason: Why the property was skipped or not run, or the error that ended the check.
        seconds: Time of the check.
    """

    name: str
    summary: str
    seed: int
    status: str
    outcome: Outcome | None = None
    reason: str = ""
    seconds: float = 0.0


def default_jobs() -> int:
    """Return the default number of processes: two, or one on a machine with a single core."""
    return min(2, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def check_property(name: str, part: Property, case: Case) -> Check:
    """Check one property. An error of the check counts as a failure, because the config cannot be used in this way."""
    begun = time.monotonic()
    status, outcome, reason = SKIPPED, None, ""
    try:
        reason = part.skip_reason(case) or ""
        if not reason:
            outcome = part.check(case)
            status = HOLDS if outcome.holds else FAILS
    except AxlearnError as error:
        status, reason = FAILS, str(error)
    except Exception as error:  # JAX raises many kinds of errors for a faulty layer
        status, reason = FAILS, f"{type(error).__name__}: {_first_line(error)}"
    seconds = time.monotonic() - begun
    return Check(
        name=name,
        summary=part.summary,
        seed=case.seed,
        status=status,
        outcome=outcome,
        reason=reason,
        seconds=seconds,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _place(name: str) -> tuple[int, int]:
    """Return the place of a property in the order in which several processes check them."""
    for number, names in ((0, STEP_PROPERTIES), (2, SEPARATE_PROPERTIES)):
        if name in names:
            return number, names.index(name)
    return 1, 0


def _until_empty(take: Callable[[], str]) -> Iterator[str]:
    """Yield what `take` returns until it raises IndexError."""
    while True:
        try:
            yield take()
        except IndexError:
            return


class Checks:
    """The checks of a proof.

    Each property is first checked with the first seed. If it holds, the same process checks it with the other seeds, because that
    process has compiled its functions.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        chosen: Mapping[str, Property],
        *,
        has_time: Callable[[], bool],
        progress: Callable[[Check], None],
    ):
        """Create the checks.

        Args:
            cases: The case with each seed.
            chosen: Properties by name.
            has_time: Returns False after the time limit.
            progress: Called for each check, in the order of the seeds and the properties.
        """
        self._cases, self._chosen, self._has_time, self._progress = tuple(cases), chosen, has_time, progress
        self._waiting: collections.deque[str] = collections.deque()
        self._lock = threading.Lock()
        self._done: dict[tuple[int, str], Check | None] = {}
        self._ordered = self._order()
        self._next = next(self._ordered, None)

    def run(self, jobs: int) -> tuple[Check, ...]:
        """Check all properties in up to `jobs` processes, and return the checks in order."""
        helpers = max(0, min(jobs, len(self._chosen) // PROPERTIES_PER_PROCESS) - 1)
        self._waiting.extend(sorted(self._chosen, key=_place) if helpers else self._chosen)
        with contextlib.ExitStack() as stack:
            # This process starts at one end of the properties, and the helpers at the other, so that few functions are compiled
            # twice.
            threads = [
                threading.Thread(target=self._work, args=(helper.check, self._waiting.pop))
                for _ in range(helpers)
                if (helper := HelperProcess.start(self._cases)) is not None
                and stack.enter_context(contextlib.closing(helper))
            ]
            for thread in threads:
                thread.start()
            self._work(self._check_here, self._waiting.popleft)
            for thread in threads:
                thread.join()
            self._finish()
        return tuple(check for check in (self._done[key] for key in self._order()) if check is not None)

    def _order(self) -> Iterator[tuple[int, str]]:
        yield from ((number, name) for number in range(len(self._cases)) for name in self._chosen)

    def _work(self, check: Callable[[int, str], Check | None], take: Callable[[], str]) -> None:
        """Check waiting properties with the first seed, and then those that hold with the other seeds.

        Args:
            check: Checks a property with the seed of a number, or returns None if it no longer can.
            take: Returns the next property, or raises IndexError.
        """
        checked: list[str] = []
        for number in range(len(self._cases)):
            for name in _until_empty(take) if number == 0 else checked:
                if not self._holds_before(number, name):
                    self._record(number, name, None)  # the first seed gives the reason
                    continue
                result = check(number, name) if self._has_time() else self._not_run(number, name)
                if result is None:
                    return  # the helper has ended; see `_finish`
                self._record(number, name, result)
                if number == 0:
                    checked.append(name)

    def _finish(self) -> None:
        """Check here what a helper that ended early has left."""
        for number, name in self._order():
            if (number, name) in self._done:
                continue
            if not self._holds_before(number, name):
                self._record(number, name, None)
            else:
                check = self._check_here if self._has_time() else self._not_run
                self._record(number, name, check(number, name))

    def _check_here(self, number: int, name: str) -> Check:
        return check_property(name, self._chosen[name], self._cases[number])

    def _not_run(self, number: int, name: str) -> Check:
        return Check(
            name=name,
            summary=self._chosen[name].summary,
            seed=self._cases[number].seed,
            status=NOT_RUN,
            reason="the time limit was reached",
        )

    def _holds_before(self, number: int, name: str) -> bool:
        """Return whether a property holds with all earlier seeds."""
        earlier = (self._done[n, name] for n in range(number))
        return all(check is not None and check.status == HOLDS for check in earlier)

    def _record(self, number: int, name: str, check: Check | None) -> None:
        """Keep a check, and report those whose predecessors are known."""
        with self._lock:
            self._done[number, name] = check
            while self._next in self._done:
                if (ready := self._done[self._next]) is not None:
                    self._progress(ready)
                self._next = next(self._ordered, None)
