"""How programs are laid out on TPUs, and what their backward passes keep. Imports no JAX.

Within a slice parameters are sharded over all chips (FSDP), whose links keep up with it; across slices, over the slower
network, replicas only sum their gradients. A v5e or v6e chip has a third of the memory of a v5p chip or less, so that there
activations go to the host's memory, or are computed again. Every product in the host's memory, as AXLearn has it on v5e (arXiv
2507.05411), would take longer to send there and back than the step computes, at the 25 GB/s a chip that a search assumes
(docs/search.md). So only what attention computes goes there. A v5e chip multiplies 8-bit integers twice as fast as bfloat16, so
that there the linear maps are quantized, as AXLearn does; `--without quantization` takes that back.
"""

from axlearn_core.contracts.mesh import MeshRule, Size
from axlearn_core.contracts.remat import RematPolicy

ATTENTION = ("query", "key", "value", "attention_residuals", "attention_out")
"""What attention computes. `attention_residuals` is what splash attention's backward kernel takes of its forward one; the
tag `context` names the same numbers once more, in the layout that the output projection takes them in."""

POLICIES = (
    RematPolicy(
        name="tpu-attention", save=ATTENTION, description="Keeps what attention computes; the feed-forward runs again."
    ),
    RematPolicy(
        name="tpu-attention-offload",
        offload=ATTENTION,
        description="Keeps what attention computes in the host's memory; the feed-forward runs again.",
    ),
    RematPolicy(
        name="tpu-products-offload",
        offload=(*ATTENTION, "mlp_gate", "mlp_up", "mlp_out"),
        description="Keeps every matrix product in the host's memory; only what is cheap runs again.",
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
