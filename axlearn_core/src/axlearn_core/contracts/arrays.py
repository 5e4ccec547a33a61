"""Recognize JAX, NumPy, traced, and abstract arrays. This module does not import JAX."""

from typing import Any, TypeGuard


def is_array(value: object) -> TypeGuard[Any]:
    """Return True if a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")
