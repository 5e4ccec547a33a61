"""What counts as an array: JAX's, NumPy's, traced ones, and those that only describe one. Imports no JAX."""

from typing import Any, TypeGuard


def is_array(value: object) -> TypeGuard[Any]:
    """Whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")
