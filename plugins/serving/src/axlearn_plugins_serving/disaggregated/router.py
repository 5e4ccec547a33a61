"""The router: an engine with separate processes for prompts and outputs.

A request waits in the router until a worker has room. A prefill worker computes its prompt and writes the full blocks of the
cache to a file in shared memory. A decode worker reads the file, computes the few remaining tokens of the prompt, and continues.
If a worker dies, the router starts a new one, retries the requests that have no output yet, and ends the worker's other requests
with an error.
"""

import contextlib
import heapq
import itertools
import multiprocessing.connection
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_serving.admission import check_request
from axlearn_plugins_serving.contracts import HasGrammar, Output, QueueFullError, Request, Statistics
from axlearn_plugins_serving.disaggregated.engine_worker import Settings
from axlearn_plugins_serving.disaggregated.handoff import Transfer, shared_folder
from axlearn_plugins_serving.disaggregated.process import Kind, WorkerProcess
from axlearn_plugins_serving.disaggregated.router_messages import (
    Abort,
    Decode,
    Failed,
    Prefill,
    Prefilled,
    Ready,
    Report,
)
from axlearn_plugins_serving.measure import Meter
from axlearn_plugins_transformer.extras import ExtrasError

_POLL_SECONDS = 0.002
_ATTEMPTS = 3
"""Maximum number of attempts per request, and of starts per worker that dies before it is ready."""


@attrs.define(eq=False)
class _Entry:
    """An unfinished request.

    Attributes:
        arrival: Sequence number of the request.
        worker: Worker that runs the request; None while it waits.
        prefilled: Whether the prompt has been computed.
        transfer: File with the prompt's blocks; None if there is no file.
        cached_tokens: Number of prompt tokens that no worker had to compute; None until that is known.
        has_output: Whether the request has returned any output.
        attempts: Number of times that the request has been started.
        started: When it was sent to a worker for the first time, from `time.monotonic`; None before.
    """

    request: Request
    arrival: int
    worker: WorkerProcess | None = None
    prefilled: bool = False
    transfer: Transfer | None = None
    cached_tokens: int | None = None
    has_output: bool = False
    attempts: int = 0
    started: float | None = None


class RouterEngine:
    """An engine that runs requests in worker processes.

    See `axlearn_plugins_serving.contracts.Engine`.

    Args:
        settings: Settings of each worker. The router sets the folder.
        prefill: Number of processes that compute prompts.
        decode: Number of processes that generate outputs.
    """

    def __init__(self, settings: Settings, *, prefill: int = 1, decode: int = 1):
        if not settings.config.prefix_cache:
            raise RequestError(
                "separate prefill and decode processes need the prefix cache, which matches blocks to prompts\n"
                "    fix: leave serving.prefix_cache on"
            )
        self._folder = shared_folder()
        self._settings = attrs.evolve(settings, folder=self._folder.name)
        self._entries: dict[str, _Entry] = {}
        self._waiting: list[tuple[int, int, str]] = []
        self._arrivals = itertools.count()
        self._meter = Meter()
        self._closed = False
        self.version = 0
        self.restarts = 0
        self._deaths: dict[tuple[Kind, int], int] = {}
        counts: dict[Kind, int] = {"prefill": prefill, "decode": decode}
        self.workers = [
            WorkerProcess(kind, number, self._settings) for kind, count in counts.items() for number in range(count)
        ]
        try:
            ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._ready = ready
        self.start_compilations = sum(w.ready.compilations for w in self.workers if w.ready is not None)
        self.vocab_size, self.max_context, self.adapters = ready.vocab_size, ready.max_context, ready.adapters

    def add(self, request: Request) -> None:
        """See `Engine.add`."""
        if self._closed:
            raise RequestError("the engine is closed\n    fix: open a new engine")
        ready = self._ready
        check_request(
            request,
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            max_logit_bias=ready.max_logit_bias,
            adapters=ready.adapters,
        )
        if request.extras:
            raise ExtrasError(
                "separate prefill and decode processes read only tokens\n"
                f"    got: extras {', '.join(request.extras)}\n    fix: start the server without --prefill and --decode"
            )
        if request.embeds:
            raise RequestError(
                "separate prefill and decode processes compute no embeddings\n"
                "    fix: start the server without --prefill and --decode"
            )
        if request.constraint is not None and not isinstance(request.constraint, HasGrammar):
            raise RequestError(
                f"a {type(request.constraint).__name__} cannot be sent to the decode process\n"
                "    expected: a constraint with a `grammar` string\n"
                "    fix: start the server without --prefill and --decode"
            )
        if request.id in self._entries:
            raise RequestError(f"request {request.id!r} is not finished yet\n    fix: use a unique id for each request")
        waiting, most = len(self._waiting), self._settings.config.max_waiting
        if waiting >= most:
            seconds = self._meter.retry_after(waiting)
            raise QueueFullError(
                f"{waiting} requests are already waiting\n    expected: fewer than {most}\n    fix: try again in {seconds:.0f} s",
                seconds,
            )
        self._entries[request.id] = entry = _Entry(request, next(self._arrivals))
        self._enqueue(entry)

    def abort(self, id: str) -> None:
        """See `Engine.abort`."""
        if (entry := self._entries.get(id)) is not None:
            if entry.worker is not None:
                entry.worker.send(Abort(id))
            self._remove(entry)

    def step(self) -> Sequence[Output]:
        """Dispatch waiting requests and return the outputs that workers have sent."""
        self._dispatch()
        outputs: list[Output] = []
        ready = set(multiprocessing.connection.wait([w.connection for w in self.workers], _POLL_SECONDS))
        for worker in [w for w in self.workers if w.connection in ready]:
            try:
                for message in worker.receive():
                    outputs += self._handle_message(worker, message)
            except EOFError:
                outputs += self._replace(worker)
        self._dispatch()
        return outputs

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(self._entries)

    def statistics(self) -> Statistics:
        """Return statistics summed across all workers.

        The router counts waiting requests and tokens itself: two workers read the prompt of each request, and the second finds the
        blocks of the first in its cache.
        """
        statistics = [attrs.asdict(w.statistics) for w in self.workers if w.statistics is not None]
        sums = {a.name: sum(s[a.name] for s in statistics) for a in attrs.fields(Statistics) if a.name != "drafter"}
        drafter = next((s["drafter"] for s in statistics if s["drafter"] is not None), None)
        blocks = sum(w.ready.blocks for w in self.workers if w.ready is not None)
        running = len(self._entries) - len(self._waiting)
        counts = {
            "blocks": blocks,
            "waiting": len(self._waiting),
            "running": running,
            "prompt_tokens": self._meter.prompt_tokens,
            "cached_prompt_tokens": self._meter.cached_prompt_tokens,
            "output_tokens": self._meter.output_tokens,
        }
        if not self._entries:  # the latest report of a worker can be older than the end of its last request
            counts["used_blocks"] = 0
        return Statistics(**{**sums, **counts}, drafter=drafter)

    def update_weights(self, weights: Any, version: int | None = None, *, share: bool = False) -> int:
        """Raise an error, because weights cannot be sent to the worker processes."""
        raise RequestError("the weights of worker processes cannot be updated\n    fix: serve with a single engine")

    def close(self) -> None:
        """See `Engine.close`."""
        if not self._closed:
            self._closed = True
            self._entries.clear()
            for worker in self.workers:
                worker.close()
            self._folder.cleanup()

    def _wait_until_ready(self) -> Ready:
        waiting = list(self.workers)
        while waiting:
            multiprocessing.connection.wait([w.connection for w in waiting])
            for worker in list(waiting):
                with contextlib.suppress(EOFError):
                    list(worker.receive())
                if worker.failed is not None:
                    self._raise_failure(worker.failed)
                if worker.ready is not None:
                    waiting.remove(worker)
                elif worker.process.poll() is not None:
                    raise WorkError(
                        f"the {worker.name} exited with code {worker.process.returncode} before it was ready"
                    )
        ready = self.workers[0].ready
        assert ready is not None
        return ready

    @staticmethod
    def _raise_failure(failed: Failed) -> None:
        raise (RequestError if failed.request_wrong else WorkError)(failed.message)

    def _ready_workers(self, kind: Kind) -> list[WorkerProcess]:
        return [w for w in self.workers if w.kind == kind and w.ready is not None]

    def _enqueue(self, entry: _Entry) -> None:
        heapq.heappush(self._waiting, (entry.request.priority, entry.arrival, entry.request.id))

    def _dispatch(self) -> None:
        """Send waiting requests to workers that have room."""
        most = self._ready.max_rows
        while self._waiting:
            entry = self._entries.get(self._waiting[0][2])
            if entry is None or entry.worker is not None:  # the request has ended
                heapq.heappop(self._waiting)
                continue
            kind: Kind = "prefill" if self._wants_prefill(entry) else "decode"
            # Do not compute a prompt if its output would have to wait a long time, because its blocks would be evicted.
            decoding = sum(len(w.requests) for w in self.workers)
            if decoding >= 2 * most * max(1, len(self._ready_workers("decode"))):
                return
            free = [w for w in self._ready_workers(kind) if len(w.requests) < most * (1 if kind == "prefill" else 2)]
            if not free:
                return
            heapq.heappop(self._waiting)
            if not entry.prefilled:
                entry.attempts += 1
                started = self._meter.record_begin(len(entry.request.prompt), 0)
                entry.started = started if entry.started is None else entry.started
            self._send(entry, min(free, key=lambda w: len(w.requests)))

    def _wants_prefill(self, entry: _Entry) -> bool:
        request = entry.request
        too_short = len(request.prompt) <= self._ready.block_size
        return not (entry.prefilled or too_short or request.sampling.scores_prompt)

    def _send(self, entry: _Entry, worker: WorkerProcess) -> None:
        entry.worker = worker
        worker.requests.add(entry.request.id)
        constraint = entry.request.constraint
        grammar = constraint.grammar if isinstance(constraint, HasGrammar) else None
        request = attrs.evolve(entry.request, constraint=None)  # the worker rebuilds the constraint
        if worker.kind == "prefill":
            worker.send(Prefill(request))
            return
        transfer, entry.transfer = entry.transfer, None
        worker.send(Decode(request, transfer, grammar))

    def _handle_message(self, worker: WorkerProcess, message: Any) -> list[Output]:
        if isinstance(message, Prefilled):
            worker.requests.discard(message.id)
            entry = self._entries.get(message.id)
            if entry is None or entry.worker is not worker:  # the request has ended
                if message.transfer is not None:
                    message.transfer.remove()
                return []
            if message.failure is not None:
                self._remove(entry)
                return [message.failure]
            entry.worker, entry.prefilled, entry.transfer = None, True, message.transfer
            self._count_cached(entry, message.cached_tokens)
            self._enqueue(entry)
            return []
        if not isinstance(message, Report):
            return []
        outputs = []
        for output in message.outputs:
            entry = self._entries.get(output.id)
            if entry is None or entry.worker is not worker:
                continue
            entry.has_output = entry.has_output or bool(output.tokens)
            if entry.cached_tokens is None:  # a single worker computes the prompt and the output
                self._count_cached(entry, output.cached_tokens)
            self._meter.output_tokens += len(output.tokens)
            if output.finish is not None:
                self._remove(entry)
            outputs.append(attrs.evolve(output, started=entry.started, cached_tokens=entry.cached_tokens))
        return outputs

    def _count_cached(self, entry: _Entry, tokens: int) -> None:
        entry.cached_tokens = tokens
        self._meter.cached_prompt_tokens += tokens

    def _remove(self, entry: _Entry) -> None:
        id = entry.request.id
        if entry.worker is not None:
            entry.worker.requests.discard(id)
        if entry.transfer is not None:
            entry.transfer.remove()
        del self._entries[id]

    def _replace(self, worker: WorkerProcess) -> list[Output]:
        """Replace a worker that has exited. Retry its requests or return their errors."""
        worker.close()
        place: tuple[Kind, int] = worker.kind, worker.number
        self._deaths[place] = 1 if worker.ready is not None else self._deaths.get(place, 0) + 1
        print(f"warning: the {worker.name} exited with code {worker.process.returncode}", file=sys.stderr, flush=True)
        if self._deaths[place] >= _ATTEMPTS:
            raise WorkError(f"a {worker.kind} worker exited {_ATTEMPTS} times before it was ready")
        self.workers[self.workers.index(worker)] = WorkerProcess(worker.kind, worker.number, self._settings)
        self.restarts += 1
        outputs = []
        for entry in [e for e in self._entries.values() if e.worker is worker]:
            if entry.has_output or entry.attempts >= _ATTEMPTS:
                self._remove(entry)
                error = "the process that was running it has exited; try again"
                outputs.append(Output(id=entry.request.id, finish="error", error=error))
                continue
            entry.worker, entry.prefilled = None, False
            self._enqueue(entry)
        return outputs
