"""Mesh rules and remat policies for Trainium2. Does not import JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_plugins_neuron.trainium import CORES

SPLIT = 3e9
"""Models with at least this many parameters split their layers over the cores of a chip."""

POLICIES = (
    RematPolicy(
        name="trn2-attention",
        save=("query|key|value", "context"),
        description="saves the projections and the context of attention",
    ),
)

_REMAT = ("remat:policy=trn2-attention",)
PACKAGES = {"remat": "axlearn-plugins-tools"}


def rules() -> list[MeshRule]:
    """Return the mesh rules: FSDP over all cores; large models use FSDP over chips and tensor parallelism within a chip.

    A machine with 1,024 chips has 4,096 devices, more than a batch has rows, so the cores of a chip share each row.
    """
    return [
        MeshRule(target="trn2-*", shape={"fsdp": -1}, features=_REMAT, packages=PACKAGES),
        MeshRule(
            target="trn2-*",
            parameters=(SPLIT, 1e15),
            shape={"fsdp": -1, "tensor": CORES},
            rules={"activation_embed": ("tensor",)},
            features=_REMAT,
            packages=PACKAGES,
        ),
    ]
