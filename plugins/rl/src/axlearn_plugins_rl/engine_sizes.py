"""Sizes of the engine that samples rollouts."""

import math
from typing import Any

import attrs

from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_serving.scheduler import PriorityScheduler

MAX_ROWS = 512
"""Maximum number of requests to run at the same time. More rows make a step longer, but no faster per token."""
CACHED_TOKENS = 2**17
"""Rows above `SAFE_ROWS` may need a cache of at most this many tokens."""
SAFE_ROWS = 64
DECODE_STEPS = 4
"""Maximum number of tokens to decode in one dispatch. More tokens save little time of the host, and the tokens after the end of an
answer are wasted."""
SHORT_CONTEXT, SHORT_CHUNK = 128, 8
"""Contexts of at most `SHORT_CONTEXT` tokens have prompts much shorter than the default chunk, which would be padding."""

ENGINE = ServingEngine.Config(
    runner=ModelRunner.Config(max_rows=SAFE_ROWS, row_buckets=(16,), chunk_buckets=(4,)), max_waiting=2**16
)
"""Default engine of rollouts. Its steps have few shapes, because many requests arrive at the same time."""


def limit_context(config: ServingEngine.Config, max_context: int) -> ServingEngine.Config:
    """Limit the context of an engine to a number of tokens."""
    runner = config.runner
    if not isinstance(runner, ModelRunner.Config) or runner.max_context <= max_context:
        return config
    return attrs.evolve(config, runner=attrs.evolve(runner, max_context=max_context))


def fit_engine(
    config: ServingEngine.Config, *, examples: int, group_size: int, max_tokens: int | None = None
) -> ServingEngine.Config:
    """Fit the sizes of an engine to batches of rollouts. A size that is not the default of `ENGINE` does not change.

    Args:
        config: Config of the engine.
        examples: Number of examples that start at the same time.
        group_size: Rollouts per example. Their prompts are equal, so the engine computes one of them.
        max_tokens: Maximum number of tokens in a completion. None fills the context.
    """
    runner = config.runner
    if not isinstance(runner, ModelRunner.Config) or not isinstance(ENGINE.runner, ModelRunner.Config):
        return config
    rows = min(examples * group_size, MAX_ROWS, max(SAFE_ROWS, CACHED_TOKENS // runner.max_context))
    runner = _set_unchanged(runner, ENGINE.runner, max_rows=rows)
    if runner.max_context <= SHORT_CONTEXT:
        runner = _set_unchanged(runner, ENGINE.runner, chunk=SHORT_CHUNK)
    decoded = (max_tokens or runner.max_context) - 1  # the step that ends the prompt draws the first token
    runner = _set_unchanged(runner, ENGINE.runner, decode_steps=max(1, min(DECODE_STEPS, decoded)))
    chunks = -(-runner.max_step_tokens // runner.chunk)
    runner = _set_unchanged(
        runner,
        ENGINE.runner,
        row_buckets=(max(1, runner.max_rows // 4),),
        chunk_buckets=(min(examples, max(1, chunks // 4)),),
    )
    scheduler = config.scheduler
    if isinstance(scheduler, PriorityScheduler.Config):
        tokens = runner.max_step_tokens + runner.max_rows
        scheduler = _set_unchanged(scheduler, PriorityScheduler.Config(), joint_prompt_tokens=tokens)
    config = _set_unchanged(config, ENGINE, hold_seconds=math.inf)
    return attrs.evolve(config, runner=runner, scheduler=scheduler)


def _set_unchanged(config: Any, default: Any, **values: Any) -> Any:
    """Set the fields that have their default values."""
    old, initial = attrs.asdict(config, recurse=False), attrs.asdict(default, recurse=False)
    return attrs.evolve(config, **{name: value for name, value in values.items() if old[name] == initial[name]})
