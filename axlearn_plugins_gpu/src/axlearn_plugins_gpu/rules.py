"""How programs are laid out on GPUs, and what their backward passes keep. Imports no JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_plugins_gpu.targets import TARGETS

LARGE = 40e9
"""Parameters from which on the layers are split over the GPUs of a host: with the batch spread over hundreds of GPUs,
fetching whole layers over the network takes longer than computing with them."""

POLICIES = (
    RematPolicy(
        name="gpu-attention",
        save=("query|key|value", "context", "attention_out"),
        description="keeps the projections, the context and the output of attention: its kernel is not run again",
    ),
)

_REMAT = ("remat:policy=gpu-attention",)
PACKAGES = {"remat": "axlearn-plugins-features"}


def rules() -> list[MeshRule]:
    """Fully sharded data parallelism; for large models across hosts, and tensor parallelism within each.

    There the residual stream is split over the host as well (by width, where Megatron-LM's sequence parallelism splits it by
    position; Korthikanti et al., 2022): activations between layers take an eighth, for the same traffic over NVLink.
    """
    found = []
    for target in TARGETS:
        machines = f"{target.name}-*"
        found += [
            MeshRule(target=machines, shape={"fsdp": -1}, features=_REMAT, packages=PACKAGES),
            MeshRule(
                target=machines,
                parameters=(LARGE, 1e15),
                shape={"fsdp": -1, "tensor": "host"},
                rules={"activation_embed": ("tensor",)},
                features=_REMAT,
                packages=PACKAGES,
            ),
        ]
    return found
