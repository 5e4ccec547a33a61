"""Trainium: target and layouts, messages about the SDK, and the code around the SDK's kernels."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose import compose
from axlearn_core.compose.devices import topology_devices
from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.mesh import DEFAULT_RULES, Mesh
from axlearn_core.kernels.selection import REFERENCE_KERNEL
from axlearn_core.nn import sharding
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_neuron import flash_attention, sdk
from axlearn_plugins_neuron.trainium import TRN2
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import Causal, Full, Prefix, Segments


def test_a_chip_has_four_devices_and_a_quarter_each():
    machine = find_machine("trn2-16x64")
    assert (machine.chips, machine.devices, machine.domains, machine.devices_per_host) == (1024, 4096, 64, 64)
    assert TRN2.hbm_bytes * 4 == 96 * 2**30
    assert TRN2.peak_flops["bfloat16"] * 4 == 667e12
    assert "not Neuron's" in TRN2.stand_in


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"jax-neuronx": "0.1.3", "neuronx-cc": "2.21.1", "libneuronxla": "2.2.8201"}, None),
        (
            {"jax-neuronx": "0.0.0", "neuronx-cc": "2.21.1", "libneuronxla": "2.2.8201"},
            "jax-neuronx 0.0.0 is a placeholder",
        ),
        (
            {"jax-neuronx": "0.1.3", "neuronx-cc": "1.0.post1", "libneuronxla": "1.0"},
            "neuronx-cc 1.0.post1 is a placeholder",
        ),
        ({}, "neuronx-cc is not installed"),
    ],
)
def test_placeholders_are_told_from_the_sdk(monkeypatch, versions, message):
    def version(name):
        if name not in versions:
            raise sdk.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(sdk.metadata, "version", version)
    reason = sdk.unavailable_reason()
    assert reason is None if message is None else message in reason and "AWS's package index" in reason


def call(length=1024, heads=4, size=128, **options):
    x = jax.ShapeDtypeStruct((2, length, heads, size), "bfloat16")
    return AttentionOp(x, x, x, mask=Causal(), scale=0.1, **options)


def test_it_says_what_it_cannot_do():
    assert flash_attention.unsupported_reason(call()) is None
    assert "multiple of 512" in flash_attention.unsupported_reason(call(length=640))
    assert "at most 128" in flash_attention.unsupported_reason(call(size=256))
    assert "soft cap" in flash_attention.unsupported_reason(call(softcap=30.0))
    assert "bias" in flash_attention.unsupported_reason(call(bias=LinearBias((0.5,) * 4)))
    assert "not at the same positions" in flash_attention.unsupported_reason(call(key_slots=jnp.arange(1024)[None]))


class Kernels:
    """The SDK's two kernels in JAX, with the documented layouts. Both check their arguments."""

    def __init__(self):
        self.grids = []
        self.language = SimpleNamespace(nc=lambda n: n)

    def weights(self, q, k, bias, causal, scale):
        scores = jnp.einsum("bnht,bnhs->bnts", q, k).astype(jnp.float32) * scale
        if bias is not None:
            assert bias.shape == (1, 1, q.shape[3], k.shape[3])  # the only supported shape
            scores = scores + bias
        return jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf) if causal else scores

    def forward(
        self, grid, tile, q, k, v, seed, *, logit_bias, softmax_scale, use_causal_mask, mixed_precision, dropout_p
    ):
        rows, heads, size, length = q.shape
        assert grid == (rows, heads)
        assert k.shape == (rows, heads, size, length)
        assert v.shape == (rows, heads, length, size)
        assert length % tile == 0
        assert seed.shape == (1,)
        assert (mixed_precision, dropout_p) == (True, 0.0)
        self.grids.append(grid)
        scores = self.weights(q, k, logit_bias, use_causal_mask, softmax_scale)
        lse = jax.nn.logsumexp(scores, -1)
        out = jnp.einsum("bnts,bnsh->bnth", jnp.exp(scores - lse[..., None]), v)
        return out.astype(q.dtype), lse.reshape(rows, heads, length // 128, 128).swapaxes(2, 3)

    def __getitem__(self, grid):
        def backward(
            q, k, v, o, dy, lse, seed, *, logit_bias_ref, use_causal_mask, mixed_precision, dropout_p, softmax_scale
        ):
            assert q.shape == k.shape == v.shape == o.shape == dy.shape
            assert grid == q.shape[:2]
            scores = self.weights(q, k, logit_bias_ref, use_causal_mask, softmax_scale)
            p = jnp.exp(scores - lse.swapaxes(2, 3).reshape(*q.shape[:2], -1)[..., None])
            dv = jnp.einsum("bnts,bnht->bnhs", p, dy)
            dp = jnp.einsum("bnht,bnhs->bnts", dy, v)
            ds = p * (dp - jnp.sum(dy * o, 2)[..., None]) * softmax_scale
            dq, dk = jnp.einsum("bnts,bnhs->bnht", ds, k), jnp.einsum("bnts,bnht->bnhs", ds, q)
            return dq, dk, dv

        return backward


@pytest.fixture
def kernels(monkeypatch):
    result = Kernels()
    monkeypatch.setattr(flash_attention, "_kernels", lambda: (result.forward, result, result.language))
    return result


IDS = jnp.asarray(np.repeat([[1, 2, 2, 3], [1, 1, 2, 0]], 128, axis=1), jnp.int32)
MASKS = {
    "causal": Causal(),
    "full": Full(),
    "segments": Causal() & Segments(IDS, IDS),
    "prefix": Causal() | Prefix(jnp.asarray([5, 200], jnp.int32)),
}


@pytest.mark.fast_cases("full-True", "segments-False")
@pytest.mark.parametrize(("name", "split"), [("causal", False), ("segments", False), *((name, True) for name in MASKS)])
def test_values_and_gradients_match_reference(kernels, name, split):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(s, (2, 512, n, 16)) for s, n in zip(keys, (8, 4, 4), strict=True))

    def total(kernel, *args):
        return jnp.sum(jnp.sin(kernel(AttentionOp(*args, mask=MASKS[name], scale=0.25))))

    mesh = make_mesh(Mesh(shape={"fsdp": 2, "tensor": 4}), jax.devices()[:8])
    want = jax.value_and_grad(lambda *a: total(REFERENCE_KERNEL, *a), (0, 1, 2))(q, k, v)
    if split:
        with sharding.logical_rules(mesh, DEFAULT_RULES):
            got = jax.jit(jax.value_and_grad(lambda *a: total(flash_attention.NKI_FLASH, *a), (0, 1, 2)))(q, k, v)
        assert set(kernels.grids) == {(1, 2)}
    else:
        got = jax.value_and_grad(lambda *a: total(flash_attention.NKI_FLASH, *a), (0, 1, 2))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def test_layouts_by_size_of_the_model():
    def mesh(experiment):
        return ax.resolve(Request.from_arguments(experiment, target="trn2-16x64")).config.mesh

    assert dict(mesh("quickstart").shape) == {"fsdp": -1}
    for large in ("llama2-7b", "llama2-70b"):
        assert dict(mesh(large).shape) == {"fsdp": -1, "tensor": 4}


@pytest.mark.slow
def test_more_devices_than_xla_gives_to_a_process_are_partitioned_over():
    machine = find_machine("trn2-16x64")
    actual = topology_devices(machine)
    assert len(actual) == 4096
    grid = make_mesh(Mesh(shape={"fsdp": -1, "tensor": 4}), actual)
    part = jax.sharding.NamedSharding(grid, jax.sharding.PartitionSpec("fsdp", "tensor"))
    x = jax.ShapeDtypeStruct((2048, 64), jnp.float32, sharding=part)
    text = jax.jit(lambda x: x @ x.T).trace(x).lower(lowering_platforms=("cpu",)).compile().as_text()
    assert "num_partitions=4096" in text
    assert "all-gather" in text or "all-reduce" in text
    assert len(jax.devices()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["llama2-7b", "llama2-70b"])
def test_the_published_runs_partition_and_fit(experiment):
    actual = ax.resolve(Request.from_arguments(experiment, target="trn2-16x64"))
    program = compose(actual.config, topology_devices(actual.machine), machine=actual.machine)
    shape = (actual.config.input.batch_size, actual.config.input.sequence_length)
    dtypes = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32) | {"weights": np.float32}
    memory = program.compile("train", {k: jax.ShapeDtypeStruct(shape, d) for k, d in dtypes.items()}).memory_analysis()
    per_device = program.functional.num_parameters * 12 / math.prod(program.layout.mesh.devices.shape)
    assert per_device < memory.argument_size_in_bytes < 1.5 * per_device
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < TRN2.hbm_bytes
