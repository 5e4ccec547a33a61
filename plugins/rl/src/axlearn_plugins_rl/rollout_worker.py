"""The thread that rolls out examples: an event loop that runs one job at a time."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from axlearn_core.errors import WorkError
from axlearn_plugins_rl.engine_policy import EnginePolicy
from axlearn_plugins_rl.rollout_contracts import Reward, RolloutSource, WeightSync
from axlearn_plugins_rl.rollout_exchange import RolloutExchange

R = TypeVar("R")
RESOURCE = "rollout_worker"
"""Name of the worker in `Session.share`."""
CLOSE_SECONDS = 30.0
"""Seconds to wait for the thread when the run ends."""


class RolloutWorker:
    """Runs rollouts in a thread, in the order in which they were submitted. The loop and the evaluators share it.

    Only one job runs at a time, so all its tokens come from the weights that it loads.

    Args:
        policy: The policy. The worker closes its engine.
        sync: Brings weights to the engine.
        source: Turns examples into rollouts.
        reward: Scores the rollouts.
        fetch: Brings weights of the training program to the devices of this process. All processes must call it together.
        exchange: Exchanges results with the other processes.

    Attributes:
        policy: The policy. Only jobs may use it.
        source: Turns examples into rollouts.
        reward: Scores the rollouts.
        fetch: See the arguments.
        exchange: See the arguments.
    """

    def __init__(
        self,
        policy: EnginePolicy,
        sync: WeightSync,
        source: RolloutSource,
        reward: Reward,
        *,
        fetch: Callable[[Any], Any] = lambda weights: weights,
        exchange: RolloutExchange | None = None,
    ):
        self.policy, self.source, self.reward, self._sync = policy, source, reward, sync
        self.fetch, self.exchange = fetch, exchange or RolloutExchange()
        self._loop = asyncio.new_event_loop()
        self._order = asyncio.Lock()
        self._loaded: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Coroutine[Any, Any, R]]) -> "Future[R]":
        """Run a coroutine function after all earlier jobs. Cancel the future to stop it."""
        return asyncio.run_coroutine_threadsafe(self._run(job), self._loop)

    async def _run(self, job: Callable[[], Coroutine[Any, Any, R]]) -> R:
        async with self._order:
            return await job()

    def load(self, weights: Any, version: int, *, kind: str = "train") -> int:
        """Use weights for the rest of the job. Return the number of bytes that were copied.

        Args:
            weights: The model's weights, on the devices of this process. They are ignored if the engine has weights of this version
                and kind already.
            version: Version of the weights.
            kind: `train`, or another name for weights that differ from the training weights of the version.
        """
        if self._loaded == (kind, version):
            return 0
        copied = self._sync.push(weights, version)
        self._loaded = kind, version
        return copied

    def close(self) -> None:
        """Cancel all jobs, stop the thread and close the engine."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise WorkError(f"the thread of the rollouts did not stop within {CLOSE_SECONDS:.0f} s")
        self._loop.close()
        self.policy.engine.close()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)
