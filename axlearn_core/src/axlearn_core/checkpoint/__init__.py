"""Checkpoints: Orbax behind our node. `checkpoint.manifest` reads what is in one without JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axlearn_core.checkpoint.orbax import OrbaxCheckpointer

__all__ = ["OrbaxCheckpointer"]


def __getattr__(name: str) -> Any:
    if name != "OrbaxCheckpointer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from axlearn_core.checkpoint.orbax import OrbaxCheckpointer

    return OrbaxCheckpointer
