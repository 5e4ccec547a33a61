"""Programs with every parallelism compile for absent accelerators."""

import jax
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.devices import topology_devices
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from support import toy_models
from support.needs import require

COMPILERS = {"tpu-v5p-16": "libtpu", "h100-8x1": "jax_plugins.xla_cuda12"}
CASES = {
    "pipeline": (["pipeline:microbatches=4"], {"pipeline": 2, "fsdp": 2, "tensor": 2}),
    "interleaved": (
        ["pipeline:microbatches=4,schedule=interleaved", "sequence-parallel"],
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
    ),
    "1f1b": (["pipeline:microbatches=4,schedule=1f1b", "sequence-parallel"], {"pipeline": 2, "fsdp": 2, "tensor": 2}),
    "ring": (["pipeline:microbatches=4", "context-parallel"], {"pipeline": 2, "seq": 2, "tensor": 2}),
    "experts": (["moe", "expert-parallel", "pipeline:microbatches=4"], {"pipeline": 2, "expert": 2, "fsdp": 2}),
    "offload": (["offload-optimizer", "optimizer-precision"], {"fsdp": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", COMPILERS)
def test_it_compiles(target, name):
    require(COMPILERS[target])
    machine = find_machine(target)
    features, shape = CASES[name]
    small = patch(toy_models.small("quickstart"), {"model.decoder.num_layers": 4})
    cfg = patch(resolve(small, with_=features, target=target).config, {"mesh.shape": shape})
    program = compose(
        patch(cfg, {"mesh": Mesh(shape=shape, rules=cfg.mesh.rules)}), topology_devices(machine), machine=machine
    )
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in toy_models.batch().items()}
    text = program.compile("train", specs).as_text()
    if "pipeline" in shape:
        assert "collective-permute" in text, "stages do not communicate"
    if name == "experts":
        assert "ragged-all-to-all" in text, "tokens are sent with room for all of them"
