"""Part 2, second half: attention by each supported kernel, as a share of the matmul peak."""

import functools
from typing import Any

from accelerator_jobs.context import Context
from accelerator_jobs.peaks import peak
from accelerator_jobs.timing import is_out_of_memory, median_seconds

WIDTH = 4096
TOKENS = 16_384
SHAPES = ((128, 4096), (64, 4096), (256, 4096), (128, 16_384), (64, 16_384), (256, 16_384))
"""Head sizes and lengths, the most important first. All have `WIDTH` values per token and `TOKENS` tokens in total."""
TOY_WIDTH, TOY_TOKENS = 256, 256
TOY_SHAPES = ((64, 128), (128, 128), (256, 256))
LONGEST_PLAIN = 4096
"""Maximum length for the reference, which writes all scores to memory."""


def flops(batch: int, heads: int, length: int, size: int, *, backward: bool) -> float:
    """Return the FLOPs of causal attention.

    Counts half of all pairs, with two products forward and five backward (Dao, 2023).
    """
    forward = 4 * batch * heads * length * length * size / 2
    return 2.5 * forward if backward else forward


def measure(context: Context) -> None:
    """Record rows `HEADxLENGTH kernel` with the figures of both passes."""
    device = context.device()
    from accelerator_jobs.local import machine_of
    from axlearn_core.kernels import selection
    from axlearn_plugins_transformer.kernels.attention import AttentionOp

    machine = machine_of(device)
    ranked = sorted(selection.installed(AttentionOp), key=lambda k: -k.priority)
    for size, length in TOY_SHAPES if context.rehearsal else SHAPES:
        for implementation in ranked:
            name = f"{size}x{length} {implementation.name}"
            if implementation.platforms and machine.target.platform not in implementation.platforms:
                context.record(name, skipped=f"runs on {', '.join(implementation.platforms)}")
            elif implementation.name == selection.REFERENCE and length > LONGEST_PLAIN:
                context.record(name, skipped="the reference stores all scores, which do not fit in memory")
            else:
                run = functools.partial(_timed, context, machine, implementation, size, length)
                context.attempt(name, run, seconds=6)


def _timed(context: Context, machine: Any, implementation: Any, size: int, length: int) -> dict[str, Any]:
    import jax

    from axlearn_core.compose.compiler import lowering
    from axlearn_core.errors import RequestError

    width, tokens = (TOY_WIDTH, TOY_TOKENS) if context.rehearsal else (WIDTH, TOKENS)
    heads, batch = width // size, tokens // length
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (batch, length, heads, size)
    query, key, value, gradient = (jax.jit(lambda k: jax.random.normal(k, shape, "bfloat16"))(k) for k in keys)
    figures: dict[str, Any] = {"batch": batch, "heads": heads, "priority": implementation.priority}
    seconds = 0.05 if context.rehearsal else 0.5
    try:
        with lowering(machine.target):
            forward = _program(machine, implementation.name, False).lower(query, key, value).compile()
        timed = median_seconds(functools.partial(forward, query, key, value), jax.block_until_ready, seconds=seconds)
        figures |= _shares(context, "forward", timed, flops(batch, heads, length, size, backward=False))
        with lowering(machine.target):
            both = _program(machine, implementation.name, True).lower(query, key, value, gradient).compile()
        timed = median_seconds(
            functools.partial(both, query, key, value, gradient), jax.block_until_ready, seconds=seconds
        )
        total = sum(flops(batch, heads, length, size, backward=b) for b in (False, True))
        figures |= _shares(context, "both", timed, total)
    except RequestError as error:
        return figures | {"refused": " ".join(str(error).split())[:300]}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return figures | {"skipped": "out of memory"}
    return figures


def _program(machine: Any, kernel: str, gradients: bool) -> Any:
    """Return the forward pass, or both passes if there is a gradient of the result."""
    import jax

    from axlearn_core.kernels import selection
    from axlearn_plugins_transformer.kernels.attention import AttentionOp
    from axlearn_plugins_transformer.kernels.masks import Causal

    def run(query: Any, key: Any, value: Any) -> Any:
        return AttentionOp(query, key, value, mask=Causal(), scale=query.shape[-1] ** -0.5).run(kernel)

    def both(query: Any, key: Any, value: Any, gradient: Any) -> Any:
        out, transpose = jax.vjp(run, query, key, value)
        return out, transpose(gradient)

    def traced(*operands: Any) -> Any:
        kernel_selection = selection.Selection(
            platform=machine.target.platform, target=machine.target.name, gradients=gradients
        )
        with selection.use(kernel_selection):
            return (both if gradients else run)(*operands)

    return jax.jit(traced)


def _shares(context: Context, name: str, timed: dict[str, Any], work: float) -> dict[str, Any]:
    rate, best = work / timed["seconds"], peak(context)
    share = {f"{name}_share": rate / best} if best else {}
    return {
        f"{name}_seconds": timed["seconds"],
        f"{name}_spread": timed["spread"],
        f"{name}_flops_per_second": rate,
    } | share
