"""Environment variables that a command sets before it imports JAX."""

import os


def hide_partitioner_warnings() -> None:
    """Hide XLA's warnings about inefficient meshes. The meshes of a proof only have to be correct."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
