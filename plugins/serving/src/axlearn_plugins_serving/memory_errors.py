"""Explain allocations that fail when a server starts."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from axlearn_core.errors import WorkError, reason

SMALLER_CACHE = (
    "lower serving.runner.num_blocks if it is set, or else serving.runner.max_rows or serving.runner.max_context "
    "(--max-model-len), whose product is the number of tokens in the cache; or set serving.runner.cache_dtype=int8"
)
SMALLER_WEIGHTS = (
    "split the model over more devices with serving.tensor_parallel, or serve a quantized or smaller model"
)


@contextlib.contextmanager
def explain_memory(name: str, arrays: Callable[[], Any], fix: str) -> Iterator[None]:
    """Convert an error about memory to one that says what did not fit.

    Args:
        name: Name of the arrays that are allocated in this context.
        arrays: Returns a tree of arrays or their shapes. Called only after an error.
        fix: Settings that lower the size.

    Raises:
        WorkError: If the memory does not suffice.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays()))
        raise WorkError(
            f"out of memory: {name} does not fit on {jax.devices()[0].device_kind}\n"
            f"    asked for: {size / 2**30:,.2f} GiB in total\n    got: {reason(error)}\n    fix: {fix}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that the system or a device has too little memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
