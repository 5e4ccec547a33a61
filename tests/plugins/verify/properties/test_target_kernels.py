"""Kernels of other hardware: sizes of the calls, planted faults, and kernels that cannot run here."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Segments, SlidingWindow
from axlearn_plugins_verify.properties import target_kernels
from axlearn_plugins_verify.properties.kernels import Kernels
from support import proof_cases
from support.needs import require

SHORT = ("input.sequence_length=256", "input.batch_size=2", "model.dtype=bfloat16")


def case(machine, *features, settings=()):
    config = resolve("quickstart", target=machine, with_=list(features), set=[*SHORT, *settings]).config
    return proof_cases.ProofCase(config, target=find_machine(machine).target)


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention():
    ids = array(8, 4096, dtype="int32")
    heads = (array(8, 4096, 32, 128), array(8, 4096, 8, 128), array(8, 4096, 8, 128))
    return AttentionOp(*heads, mask=Causal() & SlidingWindow(1024) & Segments(ids, ids), scale=0.1)


def test_a_shrunk_call_keeps_its_groups_and_its_window():
    small = target_kernels.shrink_op(attention(), lambda op: op.query.shape[1] % 128 == 0)
    (_, length, heads, size), groups = small.query.shape, small.key.shape[2]
    assert heads > groups > 1
    assert length < 4096
    assert length % 128 == 0
    assert size < 128
    assert small.flops() <= target_kernels.FLOPS
    assert f"slidingwindow({1024 * length // 4096})" in small.mask.describe()


def test_a_kernel_that_accepts_no_other_size_keeps_them():
    assert target_kernels.shrink_op(attention(), lambda op: False) == attention()


def test_samples_are_valid():
    op = attention().resize({4096: 64}).sample(np.random.default_rng(0))
    (ids,) = (part for part in op.mask.parts if isinstance(part, Segments))
    np.testing.assert_array_equal(ids.queries, ids.keys)
    assert 1 < int(ids.queries.max()) < 64
    grouped = GroupedMatmulOp(array(64, 8), array(4, 8, 8), array(4, dtype="int32")).sample(np.random.default_rng(0))
    assert int(grouped.sizes.sum()) == 64
    assert int(grouped.sizes.min()) == 0


@pytest.mark.slow
def test_a_tpu_kernel_is_interpreted():
    require("libtpu")
    proof_case = case("tpu-v5e-8")
    assert Kernels().skip_reason(proof_case) is None
    outcome = Kernels().check(proof_case)
    assert outcome.holds, outcome
    assert "splash of attention" in outcome.compared
    assert "also in float32" in outcome.compared


def scale_keys(monkeypatch):
    from axlearn_plugins_tpu.kernels import splash

    original = splash._Splash.__call__
    monkeypatch.setattr(
        splash._Splash, "__call__", lambda self, op: original(self, attrs.evolve(op, key=1.02 * op.key))
    )


def drop_documents(monkeypatch):
    from axlearn_plugins_tpu.kernels import splash

    original = splash._Splash.__call__
    monkeypatch.setattr(
        splash._Splash, "__call__", lambda self, op: original(self, attrs.evolve(op, mask=op.mask.parts[0]))
    )


def round_products(monkeypatch):
    from axlearn_plugins_gpu.kernels import grouped_matmul

    original = grouped_matmul._Triton.__call__

    def rounded(self, op):
        return original(self, attrs.evolve(op, lhs=op.lhs.astype(jnp.float8_e4m3fn).astype(op.lhs.dtype)))

    monkeypatch.setattr(grouped_matmul._Triton, "__call__", rounded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "machine", "features", "package", "op"),
    [
        (scale_keys, "tpu-v5e-8", (), "libtpu", "attention"),
        (drop_documents, "tpu-v5e-8", (), "libtpu", "attention"),
        (round_products, "h100-8x1", ("moe",), "tokamax", "grouped_matmul"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_wrong_kernel_is_found(plant, machine, features, package, op, monkeypatch):
    require(package)
    plant(monkeypatch)
    outcome = Kernels().check(case(machine, *features))
    assert not outcome.holds, outcome
    assert outcome.difference.layer == op
    assert outcome.difference.tensor == "output"
    assert f"on {machine.rpartition('-')[0]}" in outcome.difference.detail


@pytest.mark.slow
def test_a_wrong_gradient_is_found(monkeypatch):
    require("libtpu")
    from axlearn_plugins_tpu.kernels import splash

    original = splash._Splash.__call__

    def stopped(self, op):
        return original(self, attrs.evolve(op, value=jax.lax.stop_gradient(op.value)))

    monkeypatch.setattr(splash._Splash, "__call__", stopped)
    outcome = Kernels().check(case("tpu-v5e-8"))
    assert outcome.difference.tensor == "gradient of value"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("h100-8x1", "cudnn of attention is not compared: it is part of cuDNN, which runs only on NVIDIA GPUs"),
        ("trn2-16x1", "nki-flash of attention is not compared: "),
    ],
)
def test_kernels_that_cannot_run_are_named(machine, reason):
    proof_case = case(machine)
    if machine.startswith("h100"):
        assert Kernels().skip_reason(proof_case) == reason
    else:  # XLA's kernel takes its place until the SDK is installed
        calls, lines = target_kernels.target_calls(proof_case.original, proof_case.target)
        assert [call.implementation.name for call in calls] == ["xla-blocked"]
        assert lines[0].startswith(reason)
        assert "is not installed" in lines[0]


def test_a_kernel_without_an_interpreter_says_where_it_runs():
    kernel = KernelImplementation(name="mine", op=AttentionOp.path(), load="mine:KERNEL", platforms=("xpu",))
    call = target_kernels.KernelCall(attention(), None, kernel)
    assert call.unavailable_reason() == "runs only on xpu, and has no interpreter"
