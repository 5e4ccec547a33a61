"""Load the compiled library and register its handlers with XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.nn.sharding import placement

FIX = (
    "reinstall axlearn-plugins-cpu from a wheel, or with a C++ compiler (pip install --force-reinstall --no-cache-dir)"
)

try:
    from axlearn_plugins_cpu import _native

    for _name, _handler in _native.handlers().items():
        jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
except (ImportError, RuntimeError) as error:  # not built, or built for an unsupported version of XLA
    unavailable_reason: str | None = f"the compiled library is not available ({error}): {FIX}"
    instructions = 0
else:
    unavailable_reason = None
    """Reason why the library is unavailable, or None if it is registered."""
    instructions = _native.instructions()
    """Best instruction set of this processor: 1 for the baseline, 2 for AVX2, 3 for AVX-512; 0 without the library."""


def sinks(op: Any) -> jax.Array:
    """Return the sinks of an op as the handlers expect them: float32 [N], or empty if there are none."""
    return jnp.zeros((0,), jnp.float32) if op.sinks is None else op.sinks.astype(jnp.float32)


def attributes(op: Any, instructions: int = 0) -> dict[str, Any]:
    """Return the attributes that all attention handlers share.

    Args:
        op: Op with `scale`, `window` and `softcap`.
        instructions: Instruction set to use; 0 selects the processor's best one at run time.
    """
    place = placement()
    return {
        "scale": np.float32(op.scale),
        "window": np.int64(op.window or 0),
        "softcap": np.float32(op.softcap or 0.0),
        # The local devices share the processors.
        "devices": np.int64(1 if place is None else max(1, len(place.mesh.local_devices))),
        "instructions": np.int64(instructions),
    }
