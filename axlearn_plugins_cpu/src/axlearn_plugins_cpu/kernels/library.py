"""The compiled library, registered with XLA where it is there."""

from typing import Any

import jax
import numpy as np

from axlearn_core.nn.sharding import placement

FIX = "install axlearn-plugins-cpu from a wheel, or anew where a C++ compiler is (pip install --force-reinstall --no-cache-dir)"

try:
    from axlearn_plugins_cpu import _native

    for _name, _handler in _native.handlers().items():
        jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
except (ImportError, RuntimeError) as error:  # not built, or made for versions of XLA that are no longer taken
    missing: str | None = f"it has no library here ({error}): {FIX}"
    instructions = 0
else:
    missing = None
    """Why there is none; None where it is registered."""
    instructions = _native.instructions()
    """The best set of instructions of this processor: 1 for any, 2 with AVX2, 3 with AVX-512; 0 without the library."""


def attributes(op: Any, instructions: int = 0) -> dict[str, Any]:
    """What handlers of attention have in common.

    Args:
        op: has `scale`, `window` and `softcap`.
        instructions: a set of them; 0 is the processor's best where it runs.
    """
    place = placement()
    return {
        "scale": np.float32(op.scale),
        "window": np.int64(op.window or 0),
        "softcap": np.float32(op.softcap or 0.0),
        # Which share the processors.
        "devices": np.int64(1 if place is None else max(1, len(place.mesh.local_devices))),
        "instructions": np.int64(instructions),
    }
