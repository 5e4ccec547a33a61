"""Arrays that earlier versions left to Orbax: formats 1 and 2 of a checkpoint. Nothing is written this way any more."""

from collections.abc import Mapping
from pathlib import Path

import jax

from axlearn_core.checkpoint.manifest import STATE
from axlearn_core.checkpoint.state import abstract_leaf


def read_orbax(checkpoint: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays by dotted path, in the shardings of `abstract`, of those that Orbax keeps in a checkpoint's directory."""
    if not abstract:
        return {}
    import orbax.checkpoint.experimental.v1 as ocp  # takes most of a second, and newer checkpoints do without

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load(str(checkpoint / STATE), {p: abstract_leaf(x) for p, x in abstract.items()})
