"""How programs are laid out on GPUs, and what their backward passes keep. Imports no JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_plugins_gpu.choices import LAYOUTS
from axlearn_plugins_gpu.gpus import TARGETS

POLICIES = (
    RematPolicy(
        name="gpu-attention",
        save=("query|key|value", "context", "attention_out"),
        description="keeps the projections, the context and the output of attention: its kernel is not run again",
    ),
)

_REMAT = ("remat:policy=gpu-attention",)
PACKAGES = {"remat": "axlearn-plugins-tools"}


def rules() -> list[MeshRule]:
    """Fully sharded data parallelism; for large models across hosts, and tensor parallelism within each.

    There the residual stream is split over the host too (by width, where Megatron-LM's sequence parallelism splits it by
    position; Korthikanti et al., 2022): activations between layers take an eighth, for the same traffic over NVLink.
    """
    return [
        MeshRule(
            target=f"{target.name}-*",
            parameters=layout.parameters,
            shape=layout.shape,
            rules=layout.rules,
            features=_REMAT,
            packages=PACKAGES,
        )
        for target in TARGETS
        for layout in LAYOUTS
    ]
