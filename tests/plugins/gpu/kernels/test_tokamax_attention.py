"""Attention by tokamax: supported calls, compilation for every GPU, and results in Triton's interpreter."""

import functools

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.kernels import selection
from axlearn_core.nn.remat import Remat
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.hooks import axlearn_kernels
from axlearn_plugins_gpu.kernels.blocks import MOSAIC, MOSAIC_LATER, TRITON_ATTENTION, attention_blocks
from axlearn_plugins_gpu.kernels.tokamax import LATER
from axlearn_plugins_gpu.kernels.tokamax_attention import MOSAIC_ATTENTION, TRITON
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import Causal, Full, Prefix, Segments, SlidingWindow
from axlearn_testing import Case
from support.gpu_programs import Interpreted, Program, attention_call, compiled, compiled_alone, kernel_calls


@pytest.mark.parametrize(
    ("options", "mosaic", "triton"),
    [
        ({}, None, None),
        ({"softcap": 50.0}, None, "backward pass does not support a soft cap"),
        ({"softcap": 50.0, "gradients": False}, None, None),
        ({"query": (2, 256, 8, 256), "target": "a100"}, "supports Hopper and Blackwell, and a100 is neither", None),
        ({"query": (2, 256, 8, 512)}, "no block sizes for heads of 512", "no block sizes for heads of 512"),
        ({"target": "b200", "query": (2, 256, 8, 64), "packed": True}, None, None),
        ({"target": "b200", "query": (2, 384, 8, 64)}, "384 is not a multiple of 256", None),
        ({"target": "b200", "query": (2, 4096, 8, 64)}, None, None),
        (
            {"target": "b200", "query": (2, 8192, 8, 64)},
            None if LATER else "up to 4096 positions on b200, not 8192",
            None,
        ),
        ({"target": "b200", "query": (2, 8192, 8, 64), "gradients": False}, None, None),
        ({"target": "b200"}, None if LATER else "backward pass has no block sizes for heads of 128 on b200", None),
        (
            {"target": "b200", "query": (2, 256, 8, 256)},
            "backward pass has no block sizes for heads of 256 on b200",
            None,
        ),
        ({"target": "b200", "query": (2, 256, 8, 256), "softcap": 50.0, "gradients": False}, None, None),
        ({"query": (2, 256, 8, 80)}, "no block sizes for heads of 80", "no block sizes for heads of 80"),
        ({"query": (2, 200, 8, 128)}, "200 is not a multiple of 128", "200 is not a multiple of 128"),
        ({"value": 64}, "differ in head size", "differ in head size"),
        ({"dtype": "float32"}, "bfloat16 or float16, got float32", "bfloat16 or float16, got float32"),
        ({"key_slots": jnp.arange(256)[None]}, "not at the same positions", "not at the same positions"),
        ({"bias": LinearBias((0.5,) * 8)}, "not support a bias on the scores (linearbias)", "not support a bias"),
        ({"target": "rtx"}, "is not known to run on", "is not known to run on"),
    ],
)
def test_it_says_what_it_cannot_do(library, first_kernel, options, mosaic, triton):
    for kernel, reason in ((MOSAIC_ATTENTION, mosaic), (TRITON, triton)):
        answer = kernel.supports(*attention_call(**options))
        assert answer is None if reason is None else reason in (answer or "")


@pytest.mark.parametrize("tables", [MOSAIC, MOSAIC_LATER, TRITON_ATTENTION], ids=["mosaic", "later", "triton"])
def test_every_entry_is_for_some_heads(tables):
    assert set(tables) <= {chip.capability for chip in CHIPS.values()}
    for capability, entries in tables.items():
        target = next(name for name, chip in CHIPS.items() if chip.capability == capability)
        assert {attention_blocks(tables, target, size) for size in range(64, 512, 64)} - {None} == set(entries)
        assert attention_blocks(tables, target, 96) is None


IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 5, (2, 256)), axis=1), jnp.int32)


def attend(query, key, value, ids, *, mask="causal", softcap=None, kernel=None):
    masks = {
        "full": Full(),
        "causal": Causal(),
        "window": Causal() & SlidingWindow(100),
        "packed": Causal() & Segments(ids, ids),
    }
    return AttentionOp(query, key, value, mask=masks[mask], scale=0.1, softcap=softcap).run(kernel)


def arrays(size):
    return [*(((2, 256, n, size), jnp.bfloat16) for n in (4, 2, 2)), ((2, 256), jnp.int32)]


COMPILED = [("tokamax-triton", "a100", 256, "packed", None)]
MORE = [
    ("tokamax-mosaic", "h100", 64, "window", 30.0),
    *(("tokamax-mosaic", "h100", size, mask, 30.0) for size in (128, 256) for mask in ("causal", "packed")),
    ("tokamax-mosaic", "h200", 128, "window", 30.0),
    *(("tokamax-triton", target, size, "packed", None) for target in ("h100", "b200") for size in (64, 256)),
    *(("tokamax-triton", "a100", size, "window", None) for size in (64, 128)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "target", "size", "mask", "softcap"),
    [*COMPILED, *(pytest.param(*m, marks=pytest.mark.slow) for m in MORE)],
)
def test_it_compiles_forward_and_backward(library, kernel, target, size, mask, softcap):
    run = functools.partial(attend, mask=mask, softcap=softcap, kernel=kernel)
    for gradients in (False, True):
        text, choices = compiled(run, f"{target}-1x1", *arrays(size), gradients=gradients)
        assert choices == [kernel]
        count = 1 if not gradients else 3 if kernel == "tokamax-mosaic" else 2
        assert kernel_calls(text) == ((count, 0) if kernel == "tokamax-mosaic" else (0, count))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "packed", "window"])
def test_mosaic_compiles_for_blackwell(library, mask):
    back = [64, 128, 192] if LATER else [64]
    programs = [
        Program(f"{__name__}:attend", {"mask": mask, "softcap": 30.0, "kernel": "tokamax-mosaic"}, blackwell(size), g)
        for g, sizes in ((False, (64, 128, 192, 256)), (True, back))
        for size in sizes
    ]
    for program, actual in zip(programs, compiled_alone("b200-1x1", *programs), strict=True):
        kernels = (3 if LATER else 2) if program.gradients else 1
        assert (actual.mosaic, actual.triton, actual.chosen) == (kernels, 0, ["tokamax-mosaic"])
        assert actual.architectures == {"sm_100a"}
        assert "tcgen05.mma" in actual.ptx
        assert "wgmma" not in actual.ptx


def blackwell(size):
    return [(shape, str(jnp.dtype(dtype))) for shape, dtype in arrays(size)]


@pytest.mark.slow
def test_soft_caps_get_it_where_it_has_them(library):
    run = functools.partial(attend, softcap=20.0)
    assert compiled(run, "h100-1x1", *arrays(128))[1] == ["tokamax-mosaic"]
    assert compiled(run, "a100-1x1", *arrays(128))[1] == ["tokamax-triton"]
    assert compiled(run, "a100-1x1", *arrays(128), gradients=True)[1] == ["xla-blocked"]


@pytest.mark.slow
def test_what_it_keeps_is_the_context(library):
    def run(query, key, value, ids):
        return attend(jnp.sin(query), key, value, ids, kernel="tokamax-triton")

    for save, runs in ((("context",), 1), ((), 2)):
        wrapped = Remat.Config(save=save).build().wrap(run, in_loop=False)
        text, _ = compiled(lambda *args, f=wrapped: jnp.sin(f(*args)), "h100-1x1", *arrays(64), gradients=True)
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == runs + 1


def called(kernel, query, key, value, mask, **options):
    return AttentionOp(query, key, value, mask=mask, scale=0.2, **options).run(kernel)


def cases():
    rng = np.random.default_rng(1)
    prefix = jnp.asarray([3, 140], jnp.int32)
    for name, mask, groups in (
        ("causal", Causal(), 2),
        ("full", Full(), 1),
        ("window", Causal() & SlidingWindow(100), 2),
        ("packed", Causal() & SlidingWindow(70) & Segments(IDS, IDS), 4),
        ("prefix", (Causal() | Prefix(prefix)) & Segments(IDS, IDS), 2),
    ):
        operands = [
            jnp.asarray(rng.normal(size=(2, 256, n, 64)).astype(np.float32), "bfloat16") for n in (4, groups, groups)
        ]
        yield Case(name=name, run=called, operands=(*operands, mask), tolerance=3e-2)


@pytest.mark.slow_cases("test_values_and_gradients_match_reference")
class TestTriton(Interpreted):
    op = AttentionOp
    cases = tuple(c for c in cases() if c.name == "packed")

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())


@pytest.mark.slow
class TestTritonOnTheOtherCases(TestTriton):
    cases = tuple(c for c in cases() if c.name != "packed")


def test_a_soft_cap_keeps_large_scores_finite(interpreted):
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 128, 2, 64)) * n, "bfloat16") for n in (3, 3, 1))
    declared = [attrs.evolve(d, platforms=()) for d in axlearn_kernels() if d.op == AttentionOp.path()]
    with selection.use(selection.Selection(target="h100", gradients=False, declared=lambda op: declared)):
        got = called("tokamax-triton", q, k, v, Causal(), softcap=50.0)
    expected = np.asarray(called("xla", q, k, v, Causal(), softcap=50.0), np.float32)
    assert np.linalg.norm(np.asarray(got, np.float32) - expected) < 3e-2 * np.linalg.norm(expected)
