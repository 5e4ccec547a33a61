"""Small values that the processes of a job exchange about their rollouts."""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from axlearn_core.checkpoint.barrier import gather_objects
from axlearn_core.errors import WorkError
from axlearn_plugins_rl.group_scores import decode_scores, encode_scores
from axlearn_plugins_rl.process_share import ProcessShare
from axlearn_plugins_rl.rollout_contracts import Group

R = TypeVar("R")
WAIT_SECONDS = 6 * 3600.0
"""Seconds to wait for the rollouts of another process. JAX ends the job much earlier if a process is lost."""
_attempts = itertools.count()


class PeerError(WorkError):
    """Raised if the rollouts failed on another process, which raises the error itself."""


@attrs.frozen
class GatheredGroups:
    """Groups of all processes.

    Attributes:
        groups: The groups, in the order of the processes. Those of other processes have only scores, metrics and lengths; see
            `group_scores.decode_scores`.
        scalars: Scalars of each process.
    """

    groups: Sequence[Group]
    scalars: Sequence[Mapping[str, float]]


class RolloutExchange:
    """Exchanges values between all processes of a job, through its coordinator.

    Every process calls the same methods in the same order. A process that fails sends its error instead of a value. In a job with
    one process, nothing is sent.

    The thread of the rollouts has an order of its own, for `gather_from_rollouts`.

    Args:
        share: The share of this process.

    Attributes:
        share: The share of this process.
    """

    def __init__(self, share: ProcessShare | None = None):
        self.share = share or ProcessShare()
        # After a rollback, values of the earlier attempt may still be on their way.
        self._channel = f"rollouts/{next(_attempts)}"

    def gather(self, value: Any, work: str, *, error: Exception | None = None) -> list[Any]:
        """Return the JSON values of all processes.

        Args:
            value: Value of this process.
            work: The work that the value is a result of, for error messages.
            error: Error of this process, which it sends in place of the value.

        Raises:
            PeerError: Another process has sent an error. A process that has sent an error raises its own.
        """
        return self._gather(value, work, error, f"{self._channel}/batches/")

    async def gather_from_rollouts(self, value: Any, work: str, *, error: Exception | None = None) -> list[Any]:
        """Do the same as `gather`, in a job of the thread of the rollouts."""
        if self.share.count == 1:
            return self._gather(value, work, error, "")
        return await _run_in_thread(lambda: self._gather(value, work, error, f"{self._channel}/rounds/"))

    def gather_groups(
        self, compute: Callable[[], tuple[Sequence[Group], Mapping[str, float]]], work: str
    ) -> "GatheredGroups":
        """Gather the scores of groups.

        Args:
            compute: Returns the groups of this process, and scalars. If it raises an error, all processes raise one.
            work: See `gather`.
        """
        value, failure, groups = None, None, ()
        try:
            groups, scalars = compute()
            if self.share.count == 1:
                return GatheredGroups(groups, [scalars])
            value = {"groups": [encode_scores(group) for group in groups], "scalars": dict(scalars)}
        except Exception as error:
            failure = error
        rows = self.gather(value, work, error=failure)
        return GatheredGroups(self.join(groups, [row["groups"] for row in rows]), [row["scalars"] for row in rows])

    def join(self, groups: Sequence[Group], rows: Sequence[Sequence[Any]]) -> list[Group]:
        """Return the groups of all processes, from those of this process and the encoded groups of each process."""
        parts = [[decode_scores(tree) for tree in row] for row in rows]
        parts[self.share.index] = list(groups)
        return [group for part in parts for group in part]

    @contextlib.contextmanager
    def together(self, work: str) -> Iterator[None]:
        """Raise an error on every process if the block raises one on any process."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.gather(None, work, error=failure)

    def _gather(self, value: Any, work: str, error: Exception | None, channel: str) -> list[Any]:
        if self.share.count == 1:
            if error is not None:
                raise error
            return [value]
        if error is None:
            try:
                json.dumps(value)
            except (TypeError, ValueError) as caught:  # such as a metric that is a NumPy array
                error = caught
        sent = {"value": value} if error is None else {"error": f"{type(error).__name__}: {error}"}
        rows = gather_objects(sent, work, WAIT_SECONDS, channel=channel)
        if error is not None:
            raise error
        failures = {process: row["error"] for process, row in enumerate(rows) if "error" in row}
        for process, text in failures.items():
            raise PeerError(
                f"{work} failed on process {process}: {text.splitlines()[0]}\n    fix: see the error of process {process}"
            )
        return [row["value"] for row in rows]


async def _run_in_thread(call: Callable[[], R]) -> R:
    """Run a call that blocks. The thread does not keep the process from ending."""
    loop, result = asyncio.get_running_loop(), asyncio.Future[R]()

    def finish(set_result: Callable[[Any], None], value: Any) -> None:
        if not result.done():  # cancelled
            set_result(value)

    def run() -> None:
        try:
            answer = result.set_result, call()
        except Exception as error:
            answer = result.set_exception, error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, *answer)

    threading.Thread(target=run, name="rollout-exchange", daemon=True).start()
    return await result
