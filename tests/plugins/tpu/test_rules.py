"""Mesh rules and remat policies. The published experiments compile for their machines and fit."""

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.devices import topology_devices
from axlearn_core.config import get
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_rule
from axlearn_plugins_tools.features.remat_tags import RematPolicyTags
from axlearn_plugins_tpu.generations import TARGETS
from axlearn_plugins_tpu.rules import ATTENTION, POLICIES, RULES
from support.needs import require


@pytest.mark.slow_cases("llama2-7b-tpu-v6e-256-shape4-tpu-attention-offload")
@pytest.mark.parametrize(
    ("experiment", "target", "shape", "remat"),
    [
        ("llama2-70b", "tpu-v5p-2048", {"data": 1, "fsdp": -1}, "tpu-attention"),
        ("llama2-7b", "tpu-7x-256x2", {"data": 2, "fsdp": -1}, "tpu-attention"),
        ("llama2-7b", "tpu-v5e-256x4", {"data": 4, "fsdp": -1}, "tpu-attention-offload"),
        ("llama2-70b", "tpu-v5e-256", {"data": 1, "fsdp": -1}, "full"),
        ("llama2-7b", "tpu-v6e-256", {"data": 1, "fsdp": -1}, "tpu-attention-offload"),
        ("llama2-70b", "tpu-v6e-256", {"data": 1, "fsdp": -1}, "full"),
    ],
)
def test_how_experiments_are_laid_out(experiment, target, shape, remat):
    resolved = resolve(experiment, target=target)
    assert dict(resolved.config.mesh.shape) == shape
    assert not resolved.notes
    policies = {p.name: p for p in POLICIES}
    got = get(resolved.config, "model.decoder.stack.remat")
    if remat in policies:
        assert got == RematPolicyTags.Config(save=policies[remat].save, offload=policies[remat].offload)
    else:
        assert get(resolved.config, "model.decoder.stack.remat.save") == ()
    assert get(resolved.config, "model.dtype") == "bfloat16"
    assert get(resolved.config, "model.param_dtype") == "float32"


@pytest.mark.parametrize(
    ("target", "words", "quantized"),
    [("tpu-v5e-256", {}, True), ("tpu-v5e-256", {"without": ["quantization"]}, False), ("tpu-v6e-256", {}, False)],
)
def test_linear_maps_are_quantized_on_v5e(target, words, quantized):
    require("axlearn_plugins_quantization")
    resolved = resolve("llama2-7b", target=target, **words)
    kind = type(get(resolved.config, "model.decoder.layer.feed_forward.up")).__qualname__
    assert kind == ("QuantizedLinear.Config" if quantized else "Linear.Config")


def test_what_the_user_says_of_remat_wins():
    resolved = resolve("llama2-7b", target="tpu-v5p-512", with_=["remat:save=[query]"])
    assert get(resolved.config, "model.decoder.stack.remat.save") == ("query",)


def test_every_rule_holds_for_some_machine_and_every_machine_has_one():
    rules = []
    for target in TARGETS:
        for name in target.examples:
            for parameters in (10, 7e9, 70e9, 1e12):
                mesh_rule = find_rule(target.machine(name), {}, lambda n=parameters: int(n))
                assert mesh_rule is not None
                rules.append(mesh_rule[1])
    assert all(rule in rules for rule in RULES)


def memory(experiment, target, **options):
    """Return GiB per device: (arguments, temporaries, host memory). Raise if the program does not fit."""
    require("libtpu")
    resolved = resolve(experiment, target=target, **options)
    program = compose(resolved.config, topology_devices(resolved.machine), machine=resolved.machine)
    size = (get(resolved.config, "input.batch_size"), get(resolved.config, "input.sequence_length"))
    shapes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32, "segment_ids": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(size, dtype) for name, dtype in shapes.items()}
    lowered = program.lower("train", batch)
    assert {c.op.name: c.name for c in program.choices()}["attention"] == "splash"
    statistics = lowered.compile().memory_analysis()
    sizes = (statistics.argument_size_in_bytes, statistics.temp_size_in_bytes, statistics.host_temp_size_in_bytes)
    return tuple(n / 2**30 for n in sizes)


TINY = [
    "model.decoder.num_layers=2", "model.decoder.hidden_dim=128", "model.decoder.layer.attention.num_heads=1",
    "model.decoder.layer.feed_forward.hidden_dim=256", "model.vocab_size=256", "input.batch_size=8",
    "input.sequence_length=128",
]  # fmt: skip


@pytest.mark.slow
def test_a_training_step_compiles_for_slices_over_a_network():
    arguments, temporaries, _ = memory("llama2-7b", "tpu-v5e-4x2", set=TINY)
    assert 0 < arguments < 0.1
    assert 0 < temporaries < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [p.name for p in POLICIES])
def test_every_policy_keeps_what_it_says_where_it_says(policy):
    policy_memory = memory("llama2-7b", "tpu-v5p-8", set=TINY, with_=[f"remat:policy={policy}"])
    assert (policy_memory[2] > 0) is ("offload" in policy)
    assert "attention_residuals" in ATTENTION


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "copies", "most"), [({}, 8, 92), ({"mesh.targets": {}}, 1, 60)], ids=["searched", "fsdp"]
)
def test_llama2_70b_fits_on_512_chips_of_v5p(settings, copies, most):
    """Global batch 1024 x 4096, as published. The compiler raises if it does not fit in 95.74 GiB."""
    arguments, temporaries, _ = memory("llama2-70b", "tpu-v5p-1024", set=settings)
    assert 1.4 * copies < arguments < 1.7 * copies  # 12 bytes per parameter and 512 chips
    assert arguments + temporaries < most
