"""The policy of rollouts: the project's engine with the weights of a training run."""

import asyncio
import functools
import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import numpy as np

from axlearn_core.compose import Functional, ModelWeights
from axlearn_core.config import Configurable, Node, get_options, node, setting
from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_moe.replay import EXPERTS
from axlearn_plugins_rl.engine_sizes import ENGINE, fit_engine, limit_context
from axlearn_plugins_rl.recorded_experts import split_experts
from axlearn_plugins_rl.rollout_contracts import Completion, Segment
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_capabilities import RecordsTokens
from axlearn_plugins_serving.generation import Generation
from axlearn_plugins_serving.local_engine import LocalEngine
from axlearn_plugins_serving.open_engine import build_engine, remove_kernels
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.text.processor import TextProcessor


@attrs.define(eq=False)
class PolicyRequest:
    """A request of the policy.

    Attributes:
        request: What the engine computes.
        stops: Texts that end the completion.
        answer: The result, for the event loop.
        future: The future of the engine; None until the request starts.
    """

    request: Request
    stops: tuple[str, ...]
    answer: "asyncio.Future[Generation]"
    future: "Future[Generation] | None" = None


class AnswerDelivery:
    """Brings results from the engine's thread to an event loop, all that are ready in one turn of the loop.

    `asyncio.wrap_future` wakes the loop for each result. A step of the engine ends hundreds of short rollouts, so that takes longer
    than to compute them.

    Args:
        loop: The event loop of the answers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._ready: deque[PolicyRequest] = deque()
        self._is_scheduled = False

    def add(self, request: PolicyRequest, _: Any = None) -> None:
        """Deliver the result of a request, whose `future` is done. This may be called from any thread."""
        self._ready.append(request)
        if not self._is_scheduled and not self._loop.is_closed():
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False  # before the first result is taken, so that no later one is forgotten
        while self._ready:
            request = self._ready.popleft()
            answer, future = request.answer, request.future
            if future is None or answer.done():  # cancelled
                continue
            if future.cancelled():
                answer.cancel()
            elif error := future.exception():
                answer.set_exception(error)
            else:
                answer.set_result(future.result())


class EnginePolicy(Configurable):
    """Samples with an engine in this process. See `rollout_contracts.Policy`.

    Requests of the same turn of the event loop start together, so their results do not depend on timing.

    Attributes:
        engine: The engine.
        text: Converts between text and tokens.
        version: Version of the engine's weights.
        max_context: Maximum number of tokens in a context and its completion.
        sampling: Sampling parameters by name: `temperature`, `top_k`, `top_p` and `min_p`.
    """

    @node
    class Config(Configurable.Config["EnginePolicy"]):
        """The engine and the sampling parameters.

        Attributes:
            engine: Config of the engine. Its context is limited to the rows of the training batch.
            fit_engine: Whether to fit sizes of the engine that have their default values to the rollouts of a batch.
            temperature: Sampling temperature. The objective divides the logits by it too.
            top_k: Number of most likely tokens to sample from. None samples from all.
            top_p: Smallest probability mass of most likely tokens to sample from.
            min_p: Smallest probability of a token to sample, as a share of the highest probability.
            max_tokens: Maximum number of tokens in a completion. None fills the row.
            stop: Texts that end a completion, in addition to the end tokens of the model.
        """

        engine: ServingEngine.Config = ENGINE
        fit_engine: bool = setting(default=True, kind="execution", hide_default=True)
        temperature: float = setting(default=1.0, gt=0, le=100)
        top_k: int | None = setting(default=None, ge=1)
        top_p: float = setting(default=1.0, gt=0, le=1)
        min_p: float = setting(default=0.0, ge=0, le=1)
        max_tokens: int | None = setting(default=None, ge=1)
        stop: tuple[str, ...] = ()

        @property
        def limits(self) -> str:
            """The limits on the tokens to sample from, for messages, or an empty string."""
            values = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
            unlimited = (None, 1.0, 0.0)
            return ", ".join(
                f"{n}={v}" for (n, v), default in zip(values.items(), unlimited, strict=True) if v != default
            )

    def __init__(self, cfg: Config, *, engine: LocalEngine, text: TextProcessor):
        self.cfg, self.engine, self.text = cfg, engine, text
        self.max_context = engine.engine.max_context
        self.sampling: Mapping[str, float] = get_options(cfg, "temperature", "top_k", "top_p", "min_p")
        runner = engine.engine.runner
        self._records_experts = isinstance(runner, RecordsTokens) and EXPERTS in runner.records
        self._ids = itertools.count()
        self._waiting: list[PolicyRequest] = []

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        return self.engine.version

    async def sample(
        self, context: Sequence[int], *, seed: int, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Draw tokens after a context. See `rollout_contracts.Policy.sample`."""
        room = self.max_context - len(context)
        if room < 1:
            raise RequestError(
                f"the context is full\n    got: {len(context)} tokens\n    expected: fewer than {self.max_context}\n"
                "    fix: raise input.sequence_length"
            )
        limit = min(n for n in (max_tokens, self.cfg.max_tokens, room) if n is not None)
        options: Any = {**self.sampling, "records": self._records_experts}
        sampling = Sampling(**options, max_tokens=limit, seed=seed, logprobs=0, sampling_logprobs=True)
        request = Request(id=f"rollout-{next(self._ids)}", prompt=tuple(context), sampling=sampling, client="rollouts")
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._start_requests)
        entry = PolicyRequest(request, (*self.cfg.stop, *stop), loop.create_future())
        self._waiting.append(entry)
        try:
            return _build_completion(await entry.answer)
        except asyncio.CancelledError:
            if entry.future is not None:
                entry.future.cancel()
            raise

    def _start_requests(self) -> None:
        """Start the requests of this turn of the event loop.

        A request waits for an earlier one with the same prompt, and for everything before it. So the first request of each prompt
        starts before the others.
        """
        waiting, self._waiting = _put_copies_last(self._waiting), []
        delivery = AnswerDelivery(asyncio.get_running_loop())
        for stops, group in itertools.groupby(waiting, key=lambda entry: entry.stops):
            if not (entries := [entry for entry in group if not entry.answer.cancelled()]):
                continue
            try:
                futures = self.engine.submit_all([entry.request for entry in entries], stop=stops)
            except Exception as error:
                for entry in entries:
                    entry.answer.set_exception(error)
                continue
            for entry, future in zip(entries, futures, strict=True):
                entry.future = future
                future.add_done_callback(functools.partial(delivery.add, entry))


def _put_copies_last(waiting: Sequence[PolicyRequest]) -> list[PolicyRequest]:
    """Sort requests by the number of earlier requests with the same prompt."""
    counts: Counter[Sequence[int]] = Counter()
    keyed = []
    for entry in waiting:
        prompt = entry.request.prompt
        keyed.append((counts[prompt], entry))
        counts[prompt] += 1
    return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0])]


def _build_completion(generation: Generation) -> Completion:
    sample = generation.sample
    if sample.finish not in ("stop", "length"):
        raise WorkError(f"the engine ended a rollout with {sample.finish!r}\n    expected: stop or length")
    logprobs, tokens = sample.drawn_logprobs or (), sample.drawn_tokens
    recorded = None if sample.records is None else sample.records[EXPERTS]
    kept_tokens = [entry.kept for entry in logprobs if entry.kept is not None]
    context_experts, experts = split_experts(recorded, len(generation.prompt), len(tokens))
    segment = Segment(
        tokens=np.asarray(tokens, np.int32),
        drawn=True,
        logprobs=np.asarray([entry.sampling_logprob for entry in logprobs], np.float32),
        model_logprobs=np.asarray([entry.logprob for entry in logprobs], np.float32),
        version=sample.versions[-1][0] if sample.versions else None,
        experts=experts,
        kept=np.stack(kept_tokens) if kept_tokens else None,
    )
    return Completion(
        segment=segment,
        text=sample.text or "",
        finish="stop" if sample.finish == "stop" else "length",
        context_experts=context_experts,
    )


def open_policy(
    cfg: EnginePolicy.Config,
    *,
    model: Node[Any],
    program: Any,
    weights: ModelWeights,
    text: TextProcessor,
    max_context: int,
    examples: int = 1,
    group_size: int = 1,
) -> EnginePolicy:
    """Build the policy of a training run.

    Args:
        cfg: Config of the policy.
        model: Config of the model.
        program: A program of the model on the devices that sample.
        weights: The model's weights.
        text: Converts between text and tokens.
        max_context: Maximum number of tokens in a context and its completion.
        examples: Number of examples of a batch that this process rolls out.
        group_size: Number of rollouts per example.
    """
    config = limit_context(cfg.engine, max_context)
    if cfg.fit_engine:
        config = fit_engine(config, examples=examples, group_size=group_size, max_tokens=cfg.max_tokens)
    served = Functional.from_config(remove_kernels(model)).describe()
    engine = build_engine(served, program=program, text=text, config=config, warm_up=False, weights=lambda: weights)
    return cfg.build(engine=LocalEngine(engine, text), text=text)


def is_parity(cfg: EnginePolicy.Config) -> bool:
    """Return True if the engine computes the same bits as a training step with batch-invariant kernels."""
    runner = cfg.engine.runner
    return isinstance(runner, ModelRunner.Config) and runner.mode == "parity"
