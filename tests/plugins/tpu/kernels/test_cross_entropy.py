"""tokamax's output layer with loss: compared with the XLA reference in Pallas' interpreter, and compiled for abstract TPUs."""

import functools
import sys

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.contracts.mesh import DEFAULT_RULES, Mesh
from axlearn_core.kernels.selection import Selection, use
from axlearn_core.nn.sharding import logical_rules
from axlearn_plugins_tpu.kernels import tokamax
from axlearn_plugins_tpu.kernels.blocks import LOSS, LossBlocks
from axlearn_plugins_tpu.kernels.cross_entropy import _MODULE, MOSAIC
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp, Options
from axlearn_testing import Case, KernelSuite
from support import op_cases
from support.tpu_programs import GENERATIONS, compiled, not_only

NAME = "tokamax-mosaic-tpu"
SUPPORTED = [g for g in GENERATIONS if g != "tpu-v4-8"]


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def interpreted(monkeypatch):
    """Run kernels in the interpreter with TPU memories, initialized with NaN, and with several tiles in each dimension."""
    with tokamax.use_kernels(_MODULE) as kernels:
        options = {"interpret": pallas_tpu.InterpretParams()}
        run = {name: functools.partial(getattr(kernels.pl, name), **options) for name in ("pallas_call", "kernel")}
        monkeypatch.setattr(kernels, "pl", _With(kernels.pl, **run))
        if hasattr(pallas_tpu, "TensorCoreMesh"):  # JAX asks the mesh for it; pretend that a CPU mesh is a v5e
            chip = pallas_tpu.get_tpu_info_for_chip(pallas_tpu.ChipVersion.TPU_V5E, 1)
            chips = sys.modules[pallas_tpu.ChipVersion.__module__].registry
            monkeypatch.setitem(chips, jax.devices()[0].device_kind, lambda: chip)
            monkeypatch.setattr(kernels, "pltpu", _With(kernels.pltpu, TensorCoreMesh=_cores))
    monkeypatch.setitem(LOSS, "tpu-v5e", LossBlocks(rows=128, width=256, vocabulary=256))
    monkeypatch.setitem(LOSS, "tpu-v5p", LossBlocks(rows=128, width=256, vocabulary=128))
    jax.clear_caches()  # tokamax's functions are jitted, and earlier traces would not be interpreted
    yield
    jax.clear_caches()


def _cores(axis_name, num_cores=None):
    return pallas_tpu.TensorCoreMesh(axis_name=axis_name, num_cores=num_cores or pallas_tpu.get_tpu_info().num_cores)


class _With:
    """A module with some names replaced."""

    def __init__(self, module, **replaced):
        self.module, self.replaced = module, replaced

    def __getattr__(self, name):
        return self.replaced[name] if name in self.replaced else getattr(self.module, name)


def loss(length, width, vocabulary, dtype="float32", z_loss=0.0):
    """Make a case in which some positions have weight 0, like padding."""
    random = np.random.default_rng(length)
    weights = np.abs(random.standard_normal((2, length), np.float32)) * (random.random((2, length)) < 0.8)
    return Case(
        name=f"{length}x{width}x{vocabulary}-{dtype}-{z_loss}",
        run=functools.partial(op_cases._entropy, options=Options(dtype=dtype, z_loss=z_loss)),
        operands=(
            jnp.asarray(random.standard_normal((2, length, width), np.float32), dtype),
            jnp.asarray(0.1 * random.standard_normal((width, vocabulary), np.float32)),
            random.integers(0, vocabulary, (2, length)),
            jnp.asarray(weights / weights.sum()),
        ),
        tolerance=op_cases.TOLERANCE[dtype],
    )


@pytest.mark.slow_cases("test_values_and_gradients_match_reference[100x384x384-float32-0.01]")
@pytest.mark.usefixtures("interpreted")
class TestTheLoss(KernelSuite):
    """Test positions that do not fill a block. With 384, the second tile is partial unless it is narrower."""

    op, name = CrossEntropyOp, NAME
    cases = (loss(100, 384, 384, z_loss=1e-2), loss(64, 128, 256, "bfloat16"))

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())

    def _only(self, *implementations):
        return use(Selection(target="tpu-v5e", declared=lambda op: implementations))


def call(width=256, vocabulary=512, softcap=None, target="tpu-v5e"):
    shapes = (((2, 64, width), "bfloat16"), ((width, vocabulary), "float32"), ((2, 64), "int32"), ((2, 64), "float32"))
    op = CrossEntropyOp(*(jax.ShapeDtypeStruct(*s) for s in shapes), Options(softcap=softcap))
    return op, KernelContext(platform="tpu", target=target)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"target": ""}, None),
        ({"softcap": 30.0}, "not support a soft cap"),
        ({"width": 64}, "the width 64 is not a multiple of 128"),
        ({"vocabulary": 320}, "the vocabulary 320 is not a multiple of 128"),
        ({"target": "tpu-v4"}, "not v4"),
    ],
)
def test_it_says_what_it_cannot_do(options, reason):
    answer = MOSAIC.supports(*call(**options))
    assert answer is None if reason is None else reason in answer


def test_a_vocabulary_that_is_split_is_refused():
    mesh = make_mesh(Mesh(shape={"tensor": 4, "fsdp": 2}), jax.devices()[:8])
    with logical_rules(mesh, DEFAULT_RULES):
        assert MOSAIC.supports(*call()) == "the vocabulary is split over 4 devices"


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_on_several_devices_it_is_the_same_also_where_it_is_taken_away():
    case = loss(128, 128, 256)
    mesh = make_mesh(Mesh(shape={"data": 2}), jax.devices()[:2])

    def run(kernel):
        return jax.value_and_grad(lambda h, w: 3 - case.run(kernel, h, w, *case.operands[2:]), (0, 1))(
            *case.operands[:2]
        )

    with use(Selection(target="tpu-v5e")):
        expected = run("xla")
    kernel_selection = Selection(target="tpu-v5e", declared=lambda op: [TestTheLoss().find_declaration(NAME)])
    with logical_rules(mesh, DEFAULT_RULES), use(kernel_selection):
        actual = jax.jit(lambda: run(NAME))()
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * float(jnp.abs(theirs).max()), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("tiles", [2, 3])
def test_two_cores_share_the_tiles_of_the_vocabulary_or_one_has_them_all(tiles):
    case = loss(64, 128, 128 * tiles)

    def run(selection, kernel):
        with use(selection):
            return jax.grad(lambda h, w: case.run(kernel, h, w, *case.operands[2:]), (0, 1))(*case.operands[:2])

    expected = run(Selection(target="tpu-v5p"), "xla")
    actual = run(Selection(target="tpu-v5p", declared=lambda op: [TestTheLoss().find_declaration(NAME)]), NAME)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * float(jnp.abs(theirs).max()), rtol=2e-5)


def test_only_by_name():
    kernel_selection = Selection(platform="tpu", target="tpu-v5e")
    kernel_selection.choose(call()[0])
    kernel_selection.choose(call()[0], NAME)
    assert [c.name for c in kernel_selection.choices] == ["xla", NAME]


def entropy(hidden, weight, targets, dtype="bfloat16"):
    weights = jnp.ones(targets.shape, jnp.float32)
    return CrossEntropyOp(hidden, weight, targets, weights, Options(dtype=dtype)).run(NAME)[0]


@pytest.mark.slow
@pytest.mark.parametrize("generation", not_only("tpu-v5e-4", SUPPORTED))
def test_it_compiles_forward_and_backward(generation):
    operands = ((2, 600, 1024), "bfloat16"), ((1024, 4352), "float32"), ((2, 600), "int32")
    program, names = compiled(generation, entropy, *operands)
    assert names == [NAME]
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.slow
@pytest.mark.parametrize("generation", SUPPORTED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_largest_tiles_compile_for_their_generation(generation, dtype):
    operands = ((1, 2048, 4096), dtype), ((4096, 32768), "float32"), ((1, 2048), "int32")
    program, _ = compiled(generation, functools.partial(entropy, dtype=dtype), *operands)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2


def test_every_entry_of_the_table_is_of_a_generation():
    assert {n.rsplit("-", 1)[0] for n in SUPPORTED} == LOSS.keys() - {""}
