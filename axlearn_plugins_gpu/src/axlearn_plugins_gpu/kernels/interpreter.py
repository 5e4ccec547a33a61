"""Run Triton kernels on CPUs in the Pallas interpreter, which is slow and meant for tests and proofs."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas

from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.kernels import tokamax

_interpreted: Any = jax.make_user_context(False)
"""Part of the key in JAX's caches, so that functions that were traced for a GPU are traced again."""


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Trace Pallas kernels for the interpreter."""
    call, number = pallas.pallas_call, pallas.program_id

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        def hoisted(*operands: Any) -> Any:  # the interpreter does not support program ids within a loop or a branch
            numbers: list[Any] = []
            with contextlib.suppress(ValueError):  # past the last axis of the grid
                for axis in itertools.count():
                    numbers.append(number(axis))

            def program_id(axis: int) -> Any:
                return numbers[axis] if axis < len(numbers) else number(axis)

            with compat.patch_pallas("program_id", program_id):
                return kernel(*operands)

        return call(hoisted, *args, **{**options, "interpret": True})

    with compat.patch_pallas("pallas_call", run), _plain_indices(), _interpreted(True):
        yield


def _plain_indices() -> contextlib.AbstractContextManager[Any]:
    """Let the interpreter accept indices that are slices of plain integers, as in tokamax's kernels."""
    if tokamax.unavailable_reason():
        return contextlib.nullcontext()

    def convert(index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        return tuple(jnp.int32(i) if type(i) is int else i for i in index)

    return compat.patch_tokamax_indexer(convert)
