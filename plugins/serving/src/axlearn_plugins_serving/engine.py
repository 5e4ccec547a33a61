"""`ServingEngine`: schedule requests, run steps and return tokens.

The engine plans the next step while the current one is in flight. Tokens stay on the devices, and the engine reads results
after it has submitted the next step. If a request turns out to have ended, its extra token is dropped. Constraints and drafts
depend on the last token, so if a request uses them, the engine reads the results before it plans the next step.
"""

import contextlib
import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.admission import check_request
from axlearn_plugins_serving.blocks import BlockPool
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.constraint_failure import ConstraintFailure
from axlearn_plugins_serving.contracts import Output, QueueFullError, Request, Row, Runner, Statistics, SubmittedStep
from axlearn_plugins_serving.draft_gate import DraftGate
from axlearn_plugins_serving.drafting import Drafter, DraftsTogether, ModelDrafter, add_drafts, can_draft
from axlearn_plugins_serving.embedded_prompts import EmbeddedPrompts
from axlearn_plugins_serving.engine_capabilities import (
    ChangesAdapters,
    CompilesFunctions,
    EmbedsTokens,
    HasPrefix,
    HasWindow,
    HoldsResources,
    KeepsStates,
    RecordsTokens,
    ReleasesMemory,
    RunsHeads,
    TakesExtras,
)
from axlearn_plugins_serving.measure import Meter
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.results import read_part
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_serving.scheduler import Limits, Part, PriorityScheduler, Scheduler, SchedulerOutput
from axlearn_plugins_serving.snapshots import Snapshots
from axlearn_plugins_serving.text_embedding import EmbeddingQueue
from axlearn_plugins_serving.token_masks import next_mask
from axlearn_plugins_transformer.extras import ExtrasError, check_extras
from axlearn_plugins_transformer.text.processor import TextProcessor


class _InFlightStep(NamedTuple):
    """A submitted step whose results have not been read yet."""

    plan: SchedulerOutput
    pending: SubmittedStep
    version: int


class ServingEngine(Configurable):
    """An engine for one model. See `axlearn_plugins_serving.contracts.Engine`."""

    @node
    class Config(Configurable.Config["ServingEngine"]):
        """Limits and components of an engine.

        Attributes:
            runner: Computes the steps. It is offered `model` and `program`.
            scheduler: Chooses what each step computes. It is offered `cache` and `limits`.
            drafter: Drafts tokens for greedy requests. It is offered `runner` and `text`. The model verifies the drafts if a step
                has room. None disables drafts.
            adapt_drafting: Whether to stop drafting while it makes tokens slower. The engine measures steps with and without it.
            max_waiting: Maximum number of waiting requests; additional requests are rejected.
            max_context: Maximum number of tokens in a prompt and its output. None uses the runner's limit: its
                `max_context`, or less if its cache is smaller.
            prefix_cache: Whether requests with a common prefix share the prefix's cached blocks.
            pipeline: Whether to plan a step while the previous one runs.
            tensor_parallel: Number of devices that split each matrix multiplication and the heads of the cache. None uses one
                device, or two virtual CPU devices if JAX has them and the model's sizes are divisible by two. `axlearn serve`
                creates them on machines with two or more cores.
            normalize_embeddings: Whether the server scales embeddings to length 1.
            hold_seconds: Decode up to `runner.decode_steps` tokens in one dispatch if they take at most this many seconds in
                total. A new request may wait this long for the step to end. If it is infinite, steps do not depend on measured
                times.
        """

        runner: Node[Runner] = ModelRunner.Config()
        scheduler: Node[Scheduler] = PriorityScheduler.Config()
        drafter: Node[Drafter] | None = None
        adapt_drafting: bool = True
        max_waiting: int = setting(default=1024, ge=1)
        max_context: int | None = setting(default=None, ge=2)
        prefix_cache: bool = True
        pipeline: bool = True
        tensor_parallel: int | None = setting(default=None, ge=1)
        normalize_embeddings: bool = True
        hold_seconds: float = setting(default=0.03, ge=0)

    def __init__(
        self,
        cfg: Config,
        *,
        runner: Runner,
        end_tokens: frozenset[int] = frozenset(),
        text: TextProcessor | None = None,
    ):
        """Build an engine.

        Args:
            cfg: Config of the engine.
            runner: Runner that was built from `cfg.runner`.
            end_tokens: Tokens that end every output.
            text: Text processor of the model, for drafters.
        """
        self.config, self.runner, self.end_tokens = cfg, runner, end_tokens
        self.vocab_size = runner.vocab_size
        self.version = 0
        self.adapters: tuple[str, ...] = tuple(runner.adapters)
        self.max_context = _context_length(cfg, runner)
        self.normalizes_embeddings = cfg.normalize_embeddings
        self.prefix = runner.prefix if isinstance(runner, HasPrefix) else 0
        self.cache = Cache(
            BlockPool(runner.num_blocks, runner.block_size),
            runner.max_rows,
            prefixes=cfg.prefix_cache,
            window=runner.window if isinstance(runner, HasWindow) else None,
            prefix=self.prefix,
            snapshots=_snapshots(cfg, runner),
        )
        self.limits = Limits(
            rows=runner.max_rows,
            step_tokens=runner.max_batch_tokens,
            prompt_tokens=runner.max_prompt_tokens,
            chunk=runner.chunk,
            prefix=self.prefix,
            positions=min(runner.max_blocks_per_request, runner.num_blocks) * runner.block_size,
        )
        self.scheduler: Scheduler = cfg.scheduler.build(cache=self.cache, limits=self.limits)
        self.drafter: Drafter | None = _build_drafter(cfg, runner, text)
        self._gate = DraftGate() if self.drafter is not None and cfg.adapt_drafting else None
        self._drafting = False  # whether the current step drafts
        self._decode_time: float | None = None  # when the results of a step that only decodes were read
        self.meter = Meter()
        self._states: dict[str, RequestState] = {}
        self.is_sleeping = False
        self._removing: set[str] = set()
        self._arrivals = itertools.count()
        embeds = isinstance(runner, EmbedsTokens) and bool(runner.embed_buckets)
        self._embeddings = EmbeddingQueue(runner) if embeds else None  # type: ignore[arg-type]
        self._embedded = EmbeddedPrompts(runner)
        self._in_flight: _InFlightStep | None = None
        self._closed = False

    def check(self, request: Request) -> None:
        """Raise `RequestError` if the engine cannot run a request now or later. This method may be called from any thread."""
        self._check_awake()
        check_request(
            request,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            max_logit_bias=self.runner.max_logit_bias,
            adapters=self.adapters,
            prefix=self.prefix,
        )
        if request.sampling.records and not (isinstance(self.runner, RecordsTokens) and self.runner.records):
            raise RequestError(
                "the layers of this model record nothing about tokens\n    fix: set records to false, or use a model whose layers "
                "record, such as one with the feature router-replay"
            )
        if request.extras:
            self._check_extras(request)
        if request.embeds and self._embeddings is None:
            raise RequestError(
                "this engine computes no embeddings\n    fix: set serving.runner.pooling to mean, last or cls"
            )

    def _check_extras(self, request: Request) -> None:
        names, runner = ", ".join(request.extras), self.runner
        refused = "an adapter" if request.adapter is not None else "embeds" if request.embeds else None
        if refused is not None:
            raise ExtrasError(
                f"a request with extras cannot use {refused}\n    got: extras {names}\n    fix: leave out one of the two"
            )
        if not (isinstance(runner, TakesExtras) and runner.extras):
            raise ExtrasError(
                f"this engine reads only tokens\n    got: extras {names}\n    fix: set serving.runner.extras=true"
            )
        runner.check_extras(len(request.prompt), check_extras(request.extras))

    def add(self, request: Request) -> None:
        """See `Engine.add`."""
        self.check(request)
        if request.extras:
            request = attrs.evolve(request, extras=check_extras(request.extras))
        if request.id in self._states or (self._embeddings is not None and request.id in self._embeddings):
            raise RequestError(f"request {request.id!r} is not finished yet\n    fix: use a unique id for each request")
        waiting = self._num_waiting()
        if waiting >= self.config.max_waiting:
            seconds = self.meter.retry_after(waiting)
            raise QueueFullError(
                f"{waiting} requests are already waiting\n    expected: fewer than {self.config.max_waiting}\n"
                f"    fix: try again in {seconds:.0f} s",
                seconds,
            )
        if request.embeds and self._embeddings is not None:
            self._embeddings.add(request)
            self.meter.prompt_tokens += len(request.prompt)
            return
        sampling = request.sampling
        limit = self.max_context - len(request.prompt)
        if sampling.max_tokens is not None:
            limit = min(limit, sampling.max_tokens)
        seed = secrets.randbits(32) if sampling.seed is None else _fold_seed(sampling.seed)
        state = RequestState(request, seed=seed, arrival=next(self._arrivals), limit=limit)
        self._states[request.id] = state
        self.scheduler.add(state)

    def abort(self, id: str) -> None:
        """See `Engine.abort`."""
        if (state := self._states.get(id)) is not None:
            self._remove_request(state)
            self._finish_removals()
        elif self._embeddings is not None:
            self._embeddings.abort(id)

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(self._states or self._embeddings)

    def step(self) -> Sequence[Output]:
        """See `Engine.step`."""
        self._check_open()
        started = time.perf_counter()
        try:
            outputs = self._run_step()
        except Exception:
            self._drop_requests()  # the state of the runner is unknown
            raise
        self._finish_removals()
        self.meter.record_step(time.perf_counter() - started)
        return outputs

    def spare_seconds(self) -> float:
        """See `Engine.spare_seconds`."""
        return 0.0 if self._in_flight is None else self.meter.spare_seconds(self._in_flight.plan)

    def statistics(self) -> Statistics:
        """See `Engine.statistics`."""
        pool = self.cache.pool
        return self.meter.statistics(
            waiting=self._num_waiting(),
            running=len(self.scheduler.running),
            blocks=pool.num_blocks,
            used_blocks=pool.used,
            cached_blocks=pool.idle,
            compilations=self.runner.compilations
            + (self.drafter.compilations if isinstance(self.drafter, CompilesFunctions) else 0),
            drafter=None if self.config.drafter is None else type(self.config.drafter).__qualname__.split(".")[0],
        )

    def update_weights(self, weights: Any, version: int | None = None, *, share: bool = False) -> int:
        """See `Engine.update_weights`."""
        self._check_awake()
        copied = self.runner.update_weights(weights, share=share)
        self.version = self.version + 1 if version is None else version
        self.cache.forget(list(self.scheduler.running))
        self._embedded.clear()
        return copied

    def sleep(self, level: int = 1) -> None:
        """See `Sleeps.sleep`."""
        self._check_open()
        if not isinstance(self.runner, ReleasesMemory):
            raise RequestError(f"a {type(self.runner).__name__} cannot free its memory")
        if level not in (1, 2):
            raise RequestError(f"the level is {level}\n    expected: 1 or 2")
        if self.busy():
            raise RequestError("requests are running\n    fix: wait for them to end, or abort them")
        if not self.is_sleeping:
            self.runner.release_memory(level)
            if isinstance(self.drafter, ReleasesMemory):
                self.drafter.release_memory(level)
            self.cache.forget([])
            self._embedded.clear()
            self.is_sleeping = True

    def wake_up(self) -> None:
        """See `Sleeps.wake_up`."""
        self._check_open()
        if self.is_sleeping and isinstance(self.runner, ReleasesMemory):
            self.runner.restore_memory()
            if isinstance(self.drafter, ReleasesMemory):
                self.drafter.restore_memory()
            self.is_sleeping = False

    def read_adapter(self, name: str, directory: str) -> Any:
        """See `ChangesAdapters.read_adapter`."""
        return self._adapter_runner().read_adapter(name, directory)

    def add_adapter(self, name: str, adapter: Any) -> None:
        """See `ChangesAdapters.add_adapter`."""
        self._check_awake()
        if name in self._removing:
            raise RequestError(f"requests still use the adapter {name}, which was removed\n    fix: try again later")
        self._adapter_runner().add_adapter(name, adapter)
        self.adapters = (*self.adapters, name)

    def remove_adapter(self, name: str) -> None:
        """See `ChangesAdapters.remove_adapter`."""
        self._check_awake()
        self._adapter_runner()
        if name not in self.adapters:
            raise RequestError(
                f"no adapter {name} is loaded\n    expected: one of {', '.join(self.adapters) or 'none'}"
            )
        self.adapters = tuple(other for other in self.adapters if other != name)
        self._removing.add(name)
        self._finish_removals()

    def _adapter_runner(self) -> ChangesAdapters:
        if not isinstance(self.runner, ChangesAdapters):
            raise RequestError(f"a {type(self.runner).__name__} cannot change its adapters")
        return self.runner

    def _finish_removals(self) -> None:
        """Free the slots of removed adapters that no request uses any more."""
        if not self._removing:
            return
        used = {state.request.adapter for state in self._states.values()}
        used |= set() if self._embeddings is None else self._embeddings.adapters()
        for name in self._removing - used:
            self._adapter_runner().remove_adapter(name)
            self.cache.forget_adapter(name)
            self._removing.discard(name)

    def close(self) -> None:
        """See `Engine.close`."""
        if not self._closed:
            self._drop_requests()
            self._closed = True
            if isinstance(self.runner, HoldsResources):
                self.runner.close()
            if isinstance(self.drafter, HoldsResources):
                self.drafter.close()
            self.drafter = None
            del self.runner

    def _run_step(self) -> list[Output]:
        outputs: list[Output] = []
        self._drafting = self._allows_drafts()
        waited = self._in_flight is not None and self._needs_results()
        if waited:
            outputs += self._read_results()
        plan = self.scheduler.plan(self._max_steps())
        self.meter.preemptions += plan.preemptions
        if self.drafter is not None and self._drafting:
            computes = isinstance(self.drafter, DraftsTogether)
            with self.meter.time_runner() if computes else contextlib.nullcontext():
                add_drafts(plan, self.drafter, self.cache, self.limits)
        rows = self._build_rows(plan, outputs)
        self.meter.record_plan(waited=waited)
        previous, self._in_flight = self._in_flight, None
        if rows:
            self._in_flight = self._submit(plan, rows)
            self.meter.record_submit(previous and previous.plan)
        if previous is not None:
            current, self._in_flight = self._in_flight, previous
            outputs += self._read_results()
            self._in_flight = current
        elif self._in_flight is not None and not self.config.pipeline:
            outputs += self._read_results()
        if self._embeddings:
            outputs += self._embeddings.read()
            self._embeddings.submit()
        return outputs

    def _num_waiting(self) -> int:
        return self.scheduler.waiting() + (0 if self._embeddings is None else len(self._embeddings))

    def _needs_results(self) -> bool:
        """Return True if the next step depends on the tokens in flight."""
        if self._in_flight is not None and any(part.draft for part in self._in_flight.plan.parts):
            return True  # it is unknown how many tokens the model accepts
        return any(s.inflight and (s.mask_needs_output or self._uses_drafts(s)) for s in self.scheduler.running)

    def _uses_drafts(self, state: RequestState) -> bool:
        return self._drafting and can_draft(state)

    def _allows_drafts(self) -> bool:
        """Return False if there is no drafter, or while drafts would make tokens slower."""
        return self.drafter is not None and (self._gate is None or self._gate.allows(len(self.scheduler.running)))

    def _max_steps(self) -> int:
        if self._drafting or any(state.resends_token for state in self.scheduler.running):
            return 1
        return self.runner.decode_steps if self.meter.fits(self.runner.decode_steps, self.config.hold_seconds) else 1

    def _build_rows(self, plan: SchedulerOutput, outputs: list[Output]) -> list[Row]:
        """Build the rows for a plan.

        End each request whose constraint fails, and remove its part from the plan.
        """
        rows, parts = [], []
        for part in plan.parts:
            state, mask = part.state, None
            if part.sample and state.needs_mask:
                mask = next_mask(state, self.end_tokens, self.vocab_size)
                if isinstance(mask, ConstraintFailure):
                    outputs.append(
                        Output(
                            id=state.request.id, finish="error", error=mask.message, request_wrong=mask.request_wrong
                        )
                    )
                    self._remove_request(state)
                    continue
            row = _build_row(part, mask)
            if state.request.extras and part.start < state.prompt_length:
                embeddings = self._embedded.read(part)
                if isinstance(embeddings, str):
                    outputs.append(Output(id=state.request.id, finish="error", error=embeddings, request_wrong=True))
                    self._remove_request(state)
                    continue
                row = attrs.evolve(row, embeddings=embeddings)
            if self.cache.snapshots is not None:
                end = part.start + part.count + (plan.steps - 1 if part.decodes else 0)
                snapshots = self.cache.plan_snapshots(state, part.start, end, self.runner.chunk)
                row, state.restored = attrs.evolve(row, state=state.restored, snapshots=snapshots), None
            rows.append(row)
            parts.append(part)
        plan.parts = parts
        return rows

    def _submit(self, plan: SchedulerOutput, rows: Sequence[Row]) -> _InFlightStep:
        for state in plan.admitted:
            if state.finished:
                continue
            assert state.slot is not None
            request = state.request
            self.runner.assign(state.slot, request.sampling, state.seed, state.output, request.adapter, request.prompt)
            if state.cached_tokens is None:
                state.cached_tokens = min(state.computed, state.prompt_length)
                state.started = self.meter.record_begin(state.prompt_length, state.cached_tokens)
        if plan.copies:
            self.runner.copy_blocks(plan.copies)
        with self.meter.time_runner():  # on CPU devices, this may wait for the step in flight
            pending = self.runner.submit(rows, plan.steps)
        if self.cache.snapshots is not None:
            self.cache.snapshots.submitted()
        for part in plan.parts:
            state = part.state
            state.computed = part.start + part.count + (plan.steps - 1 if part.decodes else 0)
            state.inflight += plan.steps if part.sample else 0
            state.resends_token = False
            self.cache.store(state)
            self.cache.trim(state)
        return _InFlightStep(plan, pending, self.version)

    def _read_results(self) -> list[Output]:
        """Wait for the step in flight and return its outputs."""
        assert self._in_flight is not None
        (plan, pending, version), self._in_flight = self._in_flight, None
        with self.meter.time_runner():
            results = pending.wait()
        outputs = []
        for part, result in zip(plan.parts, results, strict=True):
            state = part.state
            if state.finished:
                continue
            state.inflight -= plan.steps if part.sample else 0
            output = read_part(part, result, self.end_tokens, version)
            if output is None:
                continue
            self.meter.drafted_tokens += len(part.draft)
            self.meter.accepted_tokens += max(0, len(output.tokens) - 1) if part.draft else 0
            self.meter.output_tokens += len(output.tokens)
            if output.finish is not None:
                output = self._add_records(output, state)
                self._remove_request(state)
            outputs.append(output)
        self.meter.record_read(plan)
        if self._gate is not None:
            self._record_decoding(self._gate, plan, sum(len(output.tokens) for output in outputs))
        return outputs

    def _add_records(self, output: Output, state: RequestState) -> Output:
        """Add the records of all tokens before the last one, which no step has read."""
        if not state.request.sampling.records or not isinstance(self.runner, RecordsTokens):
            return output
        count = len(state.tokens) - (output.stop_token is None)
        return attrs.evolve(output, records=self.runner.read_records(state.blocks, count))

    def _record_decoding(self, gate: DraftGate, plan: SchedulerOutput, tokens: int) -> None:
        """Record the time per token of a step, if it and the one before it only decode."""
        now, previous, self._decode_time = time.perf_counter(), self._decode_time, None
        if not all(part.decodes or part.draft for part in plan.parts):
            return
        self._decode_time = now
        if previous is not None and any(can_draft(part.state) for part in plan.parts):
            gate.record(len(plan.parts), tokens, now - previous)

    def _remove_request(self, state: RequestState) -> None:
        state.finished = True
        del self._states[state.request.id]
        self.scheduler.remove(state)

    def _drop_requests(self) -> None:
        """Drop all requests and the contents of the cache."""
        for state in list(self._states.values()):
            self._remove_request(state)
        self.cache.forget([])
        self._in_flight = None
        if self._embeddings is not None:
            self._embeddings.clear()

    def _check_awake(self) -> None:
        self._check_open()
        if self.is_sleeping:
            raise RequestError("the engine sleeps\n    fix: call wake_up")

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed\n    fix: open a new engine")


def _build_row(part: Part, mask: Any) -> Row:
    """Build the row for a part."""
    state, tokens, targets, following = part.state, (), None, None
    assert state.slot is not None
    if part.draft:
        tokens, targets = (state.tokens[-1], *part.draft), (*part.draft, 0)
    elif part.decodes:
        tokens = (state.tokens[-1],) if state.resends_token else ()
    else:
        end = part.start + part.count
        tokens = state.tokens[part.start : end]
        following = state.tokens[end] if end < len(state.tokens) else None
        if not state.sent_prompt_logprobs:
            targets = state.tokens[part.start + 1 : end + 1]
            targets += [0] * (part.count - len(targets))  # the token after the last one is unknown
    return Row(
        slot=state.slot, tokens=tokens, start=part.start, blocks=state.blocks, sample=part.sample, mask=mask,
        targets=targets, verifies=bool(part.draft), following=following,
    )  # fmt: skip


def _build_drafter(cfg: ServingEngine.Config, runner: Runner, text: TextProcessor | None) -> Drafter | None:
    """Build the drafter. Raise `RequestError` if it needs drafts that the runner does not compute."""
    drafts = isinstance(runner, RunsHeads) and runner.drafts
    if isinstance(cfg.drafter, ModelDrafter.Config) and not drafts:
        raise RequestError(
            "the runner does not draft tokens with heads of the model\n"
            f"    got: serving.drafter=model-drafter, and a {type(runner).__qualname__} without drafts\n"
            "    fix: set serving.runner.drafts=true, or serving.drafter=ngram-drafter or null"
        )
    return None if cfg.drafter is None else cfg.drafter.build(runner=runner, text=text)


def _snapshots(cfg: ServingEngine.Config, runner: Runner) -> Snapshots | None:
    """Return the saved states of a model with recurrent layers, or None."""
    if not isinstance(runner, KeepsStates) or runner.num_snapshots is None:
        return None
    if cfg.drafter is not None:
        raise RequestError(
            "a model with recurrent layers cannot be served with a drafter, because its state cannot return to before a rejected "
            "draft\n"
            f"    got: serving.drafter={type(cfg.drafter).__qualname__}\n    fix: set serving.drafter=null"
        )
    return Snapshots(runner.max_rows, runner.num_snapshots)


def _context_length(cfg: ServingEngine.Config, runner: Runner) -> int:
    room = min(runner.max_blocks_per_request, runner.num_blocks) * runner.block_size
    room = min(room, runner.max_context)
    if cfg.max_context is not None and cfg.max_context > room:
        raise RequestError(
            f"the context cannot be {cfg.max_context} tokens\n    expected: at most {room}, the limit of the runner\n"
            "    fix: lower max_context, or raise runner.max_context (and runner.num_blocks, if it is set)"
        )
    return cfg.max_context or room


def _fold_seed(seed: int) -> int:
    """Fold a seed into 32 bits. Seeds below 2**32 do not change."""
    seed &= 2**64 - 1
    return (seed ^ (seed >> 32)) & (2**32 - 1)
