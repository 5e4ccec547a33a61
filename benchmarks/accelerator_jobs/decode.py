"""Part 5: decoding speed of a 7B model, compared with the time to read its weights from memory."""

import functools
import statistics
import time
from typing import Any

import numpy as np

from accelerator_jobs.context import Context
from accelerator_jobs.models import settings_of, shape_of
from accelerator_jobs.peaks import bandwidth
from accelerator_jobs.timing import median_seconds

PROMPT, TOKENS, BATCH, CACHE = 128, 64, 64, 1024
TOY_PROMPT, TOY_TOKENS, TOY_BATCH, TOY_CACHE = 16, 8, 4, 128


def measure(context: Context) -> None:
    """Record the rows `batch 1` (the generator) and `batch 64` (its step for several rows)."""
    device = context.device()
    from accelerator_jobs.local import machine_of
    from axlearn_plugins_transformer.generate import Generator

    generator = Generator(_model(context))
    target = machine_of(device).target
    speed = bandwidth(context) or target.hbm_bandwidth
    source = "measured by this run" if bandwidth(context) else "of the target's data sheet"
    limits = {"bandwidth": speed, "bandwidth_source": source if speed else None}
    context.attempt("batch 1", functools.partial(_generate, context, generator, limits), seconds=15)
    rows = TOY_BATCH if context.rehearsal else BATCH
    context.attempt(f"batch {rows}", functools.partial(_step_batch, context, generator, rows, limits), seconds=15)


def _model(context: Context) -> Any:
    """Return a model with random weights in bf16. A float32 copy would take twice as long to read."""
    import jax

    from axlearn_core import resolve
    from axlearn_core.compose.functional import Functional

    shape = shape_of("7b", rehearsal=context.rehearsal)
    config = resolve("llama2-7b", set=settings_of(shape) | {"model.param_dtype": "bfloat16"}).config
    functional = Functional.from_config(config.model)
    return functional.bind(jax.jit(functional.init)(jax.random.key(0)))


def _bytes(tree: Any) -> int:
    import jax

    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _limit(read: int, seconds: float, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the share of the memory bandwidth that a step reaches.

    Args:
        read: Minimum number of bytes that a step reads.
    """
    least = read / limits["bandwidth"] if limits["bandwidth"] else None
    return {
        "step_seconds": seconds,
        "bytes_read": read,
        "least_seconds": least,
        "bandwidth_share": least / seconds if least else None,
        **limits,
    }


def _weights_read(generator: Any) -> int:
    """Return the size of all weights except the embedding. A step only reads one row of the embedding."""
    return sum(x.nbytes for path, x in generator.arrays.items() if "embedding" not in path)


def _generate(context: Context, generator: Any, limits: dict[str, Any]) -> dict[str, Any]:
    prompt_length, tokens = (TOY_PROMPT, TOY_TOKENS) if context.rehearsal else (PROMPT, TOKENS)
    vocab = generator.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, prompt_length).tolist()
    list(generator(prompt, max_tokens=3))  # compiles
    times = [time.perf_counter()]
    for _ in generator(prompt, max_tokens=tokens):
        times.append(time.perf_counter())
    seconds = statistics.median(np.diff(times)[1:])
    model = generator.functions.bind(generator.arrays)
    cache = model.init_cache(1, -(-(prompt_length + tokens) // 128) * 128)
    figures = _limit(_weights_read(generator) + _bytes(cache), float(seconds), limits)
    return figures | {"tokens_per_second": 1 / float(seconds), "first_token_seconds": times[1] - times[0]}


def _step_batch(context: Context, generator: Any, rows: int, limits: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    length = TOY_CACHE if context.rehearsal else CACHE
    cache = generator.functions.bind(generator.arrays).init_cache(rows, length)
    read = _weights_read(generator) + _bytes(cache)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(arrays: Any, cache: Any, token: Any) -> Any:
        logits, cache = generator.functions.bind(arrays)(token[:, None], cache=cache)
        return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache

    loop_state = [jnp.zeros(rows, jnp.int32), cache]

    def call() -> Any:
        loop_state[0], loop_state[1] = step(generator.arrays, loop_state[1], loop_state[0])
        return loop_state[0]

    del cache
    timed = median_seconds(call, jax.block_until_ready, seconds=0.1 if context.rehearsal else 1.5)
    figures = _limit(read, timed["seconds"], limits)
    return figures | {"tokens_per_second": rows / timed["seconds"], "spread": timed["spread"], "cache_length": length}
