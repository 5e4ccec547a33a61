"""How programs are laid out on TPUs. Imports no JAX."""

from axlearn_core.contracts.mesh import MeshRule

RULES = tuple(
    MeshRule(
        target=f"{target}-*",
        shape={"data": "domains", "fsdp": -1},
        features=("scan", "precision:dtype=bfloat16", "remat:save=[query,key,value,context,attention_out]"),
    )
    for target in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x")
)
