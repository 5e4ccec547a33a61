"""The compiled library, registered with XLA where it is there."""

import jax

try:
    from axlearn_plugins_cpu import _native
except ImportError as error:
    missing: str | None = (
        f"axlearn-plugins-cpu has no compiled library here ({error}): install it where a C++ compiler is"
    )
    instructions = 0
else:
    missing = None
    """Why there is none; None where it is registered."""
    instructions = _native.instructions()
    """The best set of instructions of this processor: 1 for any, 2 with AVX2, 3 with AVX-512; 0 without the library."""
    for _name, _handler in _native.handlers().items():
        jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
