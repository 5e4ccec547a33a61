"""Names in JAX and environment variables that this plugin changes, and why.

- `jnp.float32` means float64 while a check is repeated in float64, since layers name it for softmax, norms and losses. Remove it
  when those computations follow the precision of the layer.
- `TF_CPP_MIN_LOG_LEVEL` is set before JAX is imported.
"""

import contextlib
import os
from collections.abc import Iterator


def hide_partitioner_warnings() -> None:
    """Hide XLA's warnings about inefficient meshes. The meshes of a proof have to be correct, but not efficient."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Compute in float64, even in layers that ask for `jnp.float32`.

    This applies to all threads, because JAX records module calls in threads other than this one.
    """
    import jax
    import jax.numpy as jnp

    single, enabled = jnp.float32, jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        jnp.float32 = single  # type: ignore[misc]
        jax.config.update("jax_enable_x64", enabled)
