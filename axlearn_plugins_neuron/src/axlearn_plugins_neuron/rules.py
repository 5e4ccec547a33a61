"""How programs are laid out on Trainium2, and what their backward passes keep. Imports no JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_plugins_neuron.trainium import CORES

SPLIT = 3e9
"""Parameters from which on layers are split over the cores of a chip."""

POLICIES = (
    RematPolicy(
        name="trn2-attention",
        save=("query|key|value", "context"),
        description="keeps the projections and the context of attention",
    ),
)

_REMAT = ("remat:policy=trn2-attention",)
PACKAGES = {"remat": "axlearn-plugins-tools"}


def rules() -> list[MeshRule]:
    """Fully sharded data parallelism over all cores; from a few billion parameters on over chips, split within each.

    A machine of 1,024 chips has 4,096 devices, more than a batch has rows: the cores of a chip share each row.
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
