"""Part 2, first half: measured peaks of matrix products in bf16 and fp8, and of memory bandwidth."""

import functools
from typing import Any

from accelerator_jobs.context import Context
from accelerator_jobs.timing import median_seconds

SIZES = (8192, 16_384, 4096)
TOY_SIZES = (256,)
BYTES = 2 << 30
TOY_BYTES = 4 << 20
FP8 = "float8_e4m3fn"


def measure(context: Context) -> None:
    """Record rows `matmul bfloat16 N`, `matmul fp8 N`, `copy`, `triad`.

    The best of each kind are the peaks for other parts.
    """
    context.device()
    context.attempt("matmul bfloat16", functools.partial(_best, context, _bfloat16), seconds=5)
    context.attempt("copy", functools.partial(_bandwidth, context, 2), seconds=5)
    context.attempt("triad", functools.partial(_bandwidth, context, 3), seconds=5)
    context.attempt("matmul fp8", functools.partial(_best, context, _fp8), seconds=5)
    context.attempt("matmul fp8, scaled", functools.partial(_best, context, _scaled_fp8), seconds=5)


def peak(context: Context) -> float | None:
    """Return the FLOP/s of the best bf16 product in this run."""
    return context.earlier("peaks").get("matmul bfloat16", {}).get("flops_per_second")


def bandwidth(context: Context) -> float | None:
    """Return the higher bytes/s of copy and triad in this run."""
    rows = context.earlier("peaks")
    return max((rows.get(n, {}).get("bytes_per_second") or 0.0 for n in ("copy", "triad")), default=0.0) or None


def _best(context: Context, make: Any) -> dict[str, Any]:
    """Return the figures of the fastest size, and those of all sizes."""
    import jax

    results = []
    for size in TOY_SIZES if context.rehearsal else SIZES:
        run, lhs, right = make(size)
        compiled = jax.jit(run).lower(lhs, right).compile()
        timed = median_seconds(
            functools.partial(compiled, lhs, right), jax.block_until_ready, seconds=0.05 if context.rehearsal else 0.7
        )
        kernels = sorted(
            {
                word
                for word in ("cublas$lt$matmul$f8", "cublas$lt$matmul", "cublas$gemm", "triton")
                if word in compiled.as_text()
            }
        )
        results.append(
            timed | {"size": size, "flops_per_second": 2 * size**3 / timed["seconds"], "calls_in_hlo": kernels}
        )
    best = max(results, key=lambda f: f["flops_per_second"])
    return best | {"all": [{k: f[k] for k in ("size", "flops_per_second")} for f in results]}


def _operands(size: int, dtype: str) -> Any:
    import jax

    keys = jax.random.split(jax.random.key(0))
    # Use random data. Zeros take less power and run faster than real data.
    return [jax.jit(lambda k: jax.random.normal(k, (size, size)).astype(dtype))(k) for k in keys]


def _bfloat16(size: int) -> Any:
    return (lambda a, b: a @ b), *_operands(size, "bfloat16")


def _fp8(size: int) -> Any:
    import jax.numpy as jnp
    from jax import lax

    def run(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    return run, *_operands(size, FP8)


def _scaled_fp8(size: int) -> Any:
    """Multiply fp8 values and scales as quantized layers do. The compiler merges them into one product."""
    import jax.numpy as jnp

    def run(a: Any, b: Any) -> Any:
        return (a.astype(jnp.bfloat16) * jnp.bfloat16(0.5)) @ (b.astype(jnp.bfloat16) * jnp.bfloat16(0.25)).T

    return run, *_operands(size, FP8)


def _bandwidth(context: Context, arrays: int) -> dict[str, Any]:
    """Measure reading `arrays` - 1 arrays and writing one."""
    import jax
    import jax.numpy as jnp

    count = (TOY_BYTES if context.rehearsal else BYTES) // 4
    operands = [jnp.full(count, float(i + 1), jnp.float32) for i in range(arrays - 1)]
    run = jax.jit(lambda first, *rest: first + 3.0 * sum(rest) if rest else first + 1.0)
    timed = median_seconds(lambda: run(*operands), jax.block_until_ready, seconds=0.05 if context.rehearsal else 0.7)
    return timed | {"bytes_per_second": arrays * 4 * count / timed["seconds"], "bytes": arrays * 4 * count}
