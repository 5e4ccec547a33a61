"""The compiled library, registered with XLA where it is there."""

import jax

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
