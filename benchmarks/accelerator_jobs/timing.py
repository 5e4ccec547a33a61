"""Timing of device code, and search for the largest batch that fits."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

WARMUPS = 2
SAMPLE_SECONDS = 0.02
"""Minimum seconds of a sample. It repeats short calls, which hides the host's overhead."""


def median_seconds(
    call: Callable[[], Any], wait: Callable[[Any], Any], *, seconds: float = 1.0, least: int = 5
) -> dict[str, Any]:
    """Return the median time of a call.

    Args:
        call: Starts work on the device and returns its result.
        wait: Blocks until the result is ready.
        seconds: Time to sample.
        least: Minimum number of samples.

    Returns:
        `seconds` (the median), `spread` (half of the 10th to 90th percentile range, relative to the median) and
        `samples`.
    """
    for _ in range(WARMUPS):
        start = time.perf_counter()
        wait(call())
        once = time.perf_counter() - start
    calls = max(1, min(50, round(SAMPLE_SECONDS / max(once, 1e-6))))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < least or (time.perf_counter() < end and len(samples) < 200):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        samples.append((time.perf_counter() - start) / calls)
    median = statistics.median(samples)
    ordered = sorted(samples)
    low, high = ordered[len(samples) // 10], ordered[-1 - len(samples) // 10]
    return {"seconds": median, "spread": (high - low) / 2 / median, "samples": len(samples), "calls": calls}


class OutOfMemoryError(Exception):
    """A program that does not fit, detected before it runs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of JAX, PyTorch or a compiler means that device memory is too small."""
    text = f"{type(error).__name__}: {error}"
    signs = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "out of memory", "Out of memory", "CUDA_ERROR_OUT_OF_MEMORY")
    return any(sign in text for sign in signs)


def largest_batch(batch: int, measure: Callable[[int], dict[str, Any]], release: Callable[[], None]) -> dict[str, Any]:
    """Return the figures of `measure(batch)` for the largest batch that fits. Halves the batch until it fits.

    Args:
        batch: Initial number of rows.
        measure: Raises the device's error if the batch does not fit.
        release: Frees the memory of a failed attempt.

    Raises:
        OutOfMemoryError: If a single row does not fit.
    """
    too_large: list[str] = []
    while batch >= 1:
        try:
            return measure(batch) | {"batch": batch} | ({"too_large": too_large} if too_large else {})
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            too_large.append(f"{batch} rows: {str(error).splitlines()[0][:160]}")
        gc.collect()  # the traceback keeps the arrays of the attempt alive
        release()
        batch //= 2
    raise OutOfMemoryError(f"one row does not fit: {'; '.join(too_large)}")


def check_fits(compiled: Any, device: Any) -> int:
    """Return the bytes that a compiled JAX program takes on a device.

    On TPUs, this is an upper bound because the statistics are too high.

    Raises:
        OutOfMemoryError: If the program needs more memory than the process may use. The TPU compiler checks this
        itself.
    """
    stats = compiled.memory_analysis()
    fresh = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    total = stats.argument_size_in_bytes + stats.temp_size_in_bytes + fresh
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit and total > limit and device.platform != "tpu":
        raise OutOfMemoryError(f"{total / 2**30:.1f} GiB, and the process may have {limit / 2**30:.1f} GiB")
    return total
