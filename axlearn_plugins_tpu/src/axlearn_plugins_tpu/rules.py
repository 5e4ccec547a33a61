"""Mesh rules and remat policies for TPUs. Does not import JAX.

Within a slice, parameters are sharded over all chips (FSDP), and the links are fast enough for that. Across slices, over
the slower network, replicas only sum their gradients. A v5e or v6e chip has at most a third of the memory of a v5p chip, so
its activations are offloaded to host memory or recomputed. AXLearn offloads every matmul on v5e (arXiv 2507.05411). At the
25 GB/s per chip that a search assumes (docs/search.md), that transfer would take longer than the step's computation, so only
attention is offloaded here. A v5e chip multiplies 8-bit integers twice as fast as bfloat16, so its linear layers are
quantized, as in AXLearn; `--without quantization` disables that.
"""

from axlearn_core.contracts.mesh import MeshRule, Size
from axlearn_core.contracts.remat import RematPolicy

ATTENTION = ("query", "key", "value", "attention_residuals", "attention_out")
"""Checkpoint names in attention. `attention_residuals` marks the forward results that splash attention's backward kernel
needs. The name `context` marks the same values again, in the layout that the output projection needs."""

POLICIES = (
    RematPolicy(
        name="tpu-attention", save=ATTENTION, description="Saves the results of attention; recomputes the feed-forward."
    ),
    RematPolicy(
        name="tpu-attention-offload",
        offload=ATTENTION,
        description="Offloads the results of attention to host memory; recomputes the feed-forward.",
    ),
    RematPolicy(
        name="tpu-products-offload",
        offload=(*ATTENTION, "mlp_gate", "mlp_up", "mlp_out"),
        description="Offloads every matmul to host memory; recomputes only cheap ops.",
    ),
)

FSDP: dict[str, Size] = {"data": "domains", "fsdp": -1}
BASE = ("scan", "precision:dtype=bfloat16")
LARGE_MEMORY = ("tpu-v4", "tpu-v5p", "tpu-7x")

PACKAGES = {
    "precision": "axlearn-plugins-tools",
    "quantization": "axlearn-plugins-quantization",
    "remat": "axlearn-plugins-tools",
    "scan": "axlearn-plugins-tools",
}


def _rule(target: str, *features: str, parameters: tuple[float, float] = (0, float("inf"))) -> MeshRule:
    return MeshRule(target=target, parameters=parameters, shape=FSDP, features=(*BASE, *features), packages=PACKAGES)


RULES = (
    *(_rule(f"{t}*", "remat:policy=tpu-attention") for t in LARGE_MEMORY),
    _rule("tpu-v5e*", "remat:policy=full", "quantization:format=int8"),
    _rule("tpu-v5e*", "remat:policy=tpu-attention-offload", "quantization:format=int8", parameters=(1e9, 20e9)),
    _rule("tpu-v6e*", "remat:policy=full"),
    _rule("tpu-v6e*", "remat:policy=tpu-attention-offload", parameters=(1e9, 20e9)),
)
