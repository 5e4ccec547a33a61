"""The policy of rollouts: the project's engine with the weights of a training run."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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

WaitingRequest = tuple[Request, tuple[str, ...], "asyncio.Future[asyncio.Future[Generation]]"]
"""A request, its stop texts, and the future of its submission."""


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
        self._waiting: list[WaitingRequest] = []

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
        started: asyncio.Future[asyncio.Future[Generation]] = loop.create_future()
        self._waiting.append((request, (*self.cfg.stop, *stop), started))
        return _build_completion(await (await started))

    def _start_requests(self) -> None:
        """Start the requests of this turn of the event loop.

        A request waits for an earlier one with the same prompt, and for everything before it. So the first request of each prompt
        starts before the others.
        """
        waiting, self._waiting = _put_copies_last(self._waiting), []
        for stops, entries in itertools.groupby(waiting, key=lambda entry: entry[1]):
            requests, starts = zip(*((request, started) for request, _, started in entries), strict=True)
            try:
                futures = self.engine.submit_all(requests, stop=stops)
            except Exception as error:
                for started in starts:
                    if not started.cancelled():
                        started.set_exception(error)
                continue
            for started, future in zip(starts, futures, strict=True):
                if started.cancelled():
                    future.cancel()
                else:
                    started.set_result(asyncio.wrap_future(future))


def _put_copies_last(waiting: Sequence[WaitingRequest]) -> list[WaitingRequest]:
    """Sort requests by the number of earlier requests with the same prompt."""
    counts: Counter[Sequence[int]] = Counter()
    keyed = []
    for entry in waiting:
        prompt = entry[0].prompt
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
        config = fit_engine(config, examples=examples, group_size=group_size)
    served = Functional.from_config(remove_kernels(model)).describe()
    engine = build_engine(served, program=program, text=text, config=config, warm_up=False, weights=lambda: weights)
    return cfg.build(engine=LocalEngine(engine, text), text=text)


def is_parity(cfg: EnginePolicy.Config) -> bool:
    """Return True if the engine computes the same bits as a training step with batch-invariant kernels."""
    runner = cfg.engine.runner
    return isinstance(runner, ModelRunner.Config) and runner.mode == "parity"
