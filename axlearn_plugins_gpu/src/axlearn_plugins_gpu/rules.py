"""Mesh rules and remat policies for GPUs. Does not import JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_plugins_gpu.choices import LAYOUTS
from axlearn_plugins_gpu.gpus import TARGETS

POLICIES = (
    RematPolicy(
        name="gpu-attention",
        save=("query|key|value", "context", "attention_out"),
        description="saves the projections, context and output of attention, so its kernel does not run again",
    ),
)

_REMAT = ("remat:policy=gpu-attention",)
PACKAGES = {"remat": "axlearn-plugins-tools"}


def rules() -> list[MeshRule]:
    """Return the mesh rules: FSDP, plus tensor parallelism within each host for large models.

    Large models also split the residual stream across the GPUs of a host. The split is by width, unlike Megatron-LM's sequence
    parallelism, which splits by position (Korthikanti et al., 2022). Activations between layers then need an eighth of the
    memory, with the same NVLink traffic.
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
