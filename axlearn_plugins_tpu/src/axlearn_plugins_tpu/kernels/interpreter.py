"""Run Pallas kernels for TPUs on CPUs in the interpreter, which is slow and meant for tests and proofs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import pallas

from axlearn_plugins_tpu import compat

_interpreted: Any = jax.make_user_context(False)
"""Part of the key in JAX's caches, so that functions that were traced for a TPU are traced again."""


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Trace Pallas kernels for the interpreter.

    `force_tpu_interpret_mode` does not support kernels under `vmap` whose options describe the dimensions of their grid.
    """
    call = pallas.pallas_call

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        return call(kernel, *args, **{**options, "interpret": True})

    with compat.patch_pallas_call(run), _interpreted(True):
        yield
