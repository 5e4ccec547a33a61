"""cuDNN attention: supported calls, masks, and compiled programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.nn.remat import Remat
from axlearn_plugins_gpu.kernels.cudnn_attention import CUDNN
from axlearn_plugins_gpu.kernels.masks import split_mask
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import Causal, Full, Prefix, Segments, SlidingWindow
from support.gpu_programs import attention_call, compiled

IDS = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0, 0]], jnp.int32)
MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(3),
    "wide window": Causal() & SlidingWindow(12),
    "window without causal": SlidingWindow(4) & Full(),
    "segments": Causal() & Segments(IDS, IDS),
    "window and segments": Causal() & SlidingWindow(2) & Segments(IDS, IDS) & SlidingWindow(5),
    "prefix": (Causal() | Prefix(jnp.asarray([4], jnp.int32))) & Segments(IDS, IDS),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_kernels_are_told_of_a_mask_is_the_mask(name):
    mask, n = MASKS[name], IDS.shape[1]
    causal, window, rest = split_mask(mask, (n, n), aligned=True)
    query, key = np.arange(n)[:, None], np.arange(n)
    visible = np.ones((n, n), bool)
    if causal:
        visible &= key <= query
    if window is not None:
        assert causal
        visible &= key > query - window
    if rest is not None:
        visible = visible & np.asarray(rest.materialize((0, n), (0, n)))[0]
    np.testing.assert_array_equal(visible, np.asarray(mask.materialize((0, n), (0, n)))[0])


def test_masks_that_are_ranges_leave_nothing():
    assert [split_mask(MASKS[m], (12, 12), True)[2] for m in ("full", "causal", "window", "wide window")] == [None] * 4
    assert split_mask(Causal() & SlidingWindow(12), (12, 12), True)[1] is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"query": (2, 64, 8, 256)}, None),
        ({"query": (2, 64, 8, 192), "value": 128}, None),
        ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
        ({"query": (2, 64, 8, 256), "target": "a100"}, "256 is not a multiple of 8 up to 128"),
        ({"query": (2, 64, 8, 128), "value": 64, "target": "a100"}, "different head sizes require Hopper"),
        ({"query": (2, 64, 8, 60)}, "60 is not a multiple of 8"),
        ({"query": (2, 63, 8, 64)}, "not both even"),
        ({"query": (2, 63, 8, 64), "gradients": False}, None),
        ({"softcap": 50.0}, "not support a soft cap"),
        ({"bias": LinearBias((0.5,) * 8)}, "not support a bias"),
        ({"target": ""}, "not known to run on GPU 'unknown'"),
    ],
)
def test_it_says_what_it_cannot_do(options, reason):
    answer = CUDNN.supports(*attention_call(**options))
    assert answer is None if reason is None else reason in answer


def calls(text):
    """Return the numbers of (forward, backward) cuDNN attention calls in a compiled program."""
    actual = re.findall(r'custom_call_target="__cudnn\$fmha(\w*)"', text)
    return sum("Backward" not in f for f in actual), sum("Backward" in f for f in actual)


def attend(mask, scale=0.1):
    return lambda q, k, v: AttentionOp(q, k, v, mask=mask, scale=scale).run()


def operands(heads=8, groups=2, size=64, value=None, batch=8, length=128):
    return [
        ((batch, length, n, h), jnp.bfloat16, "fsdp")
        for n, h in ((heads, size), (groups, size), (groups, value or size))
    ]


@pytest.mark.parametrize(
    "target", ["h100", *(pytest.param(t, marks=pytest.mark.slow) for t in ("a100", "h200", "b200"))]
)
def test_it_compiles_forward_and_backward(target):
    for mask in (Causal(), Full()) if target == "h100" else (Causal(), Full(), Causal() & SlidingWindow(32)):
        text, choices = compiled(attend(mask), f"{target}-8x1", *operands(), gradients=True)
        assert choices == ["cudnn"]
        assert calls(text) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "h200", "b200"])
def test_large_heads_and_values_of_another_size_compile_from_hopper_on(target):
    for sizes in ({"size": 256}, {"size": 192, "value": 128}):
        text, choices = compiled(attend(Causal()), f"{target}-8x1", *operands(**sizes), gradients=True)
        assert (choices, calls(text)) == (["cudnn"], (1, 1))


def test_documents_in_a_row_and_heads_over_a_host_compile():
    ids = jnp.zeros((8, 128), jnp.int32)

    def run(q, k, v, ids):
        return AttentionOp(q, k, v, mask=Causal() & Segments(ids, ids), scale=0.1).run()

    shapes = [*operands(heads=16, groups=4), (ids.shape, jnp.int32, "fsdp")]
    text, choices = compiled(run, "h100-8x2", *shapes, gradients=True, tensor=8)
    assert (choices, calls(text)) == (["cudnn"], (1, 1))
    assert "ScaleBias" in text


def test_a_kept_context_keeps_the_kernel_from_running_again():
    run = attend(Causal())
    for save, runs in ((("context",), 1), ((), 2)):
        kept_output = Remat.Config(save=save).build().wrap(lambda q, k, v: run(jnp.sin(q), k, v), in_loop=False)
        text, _ = compiled(lambda q, k, v, f=kept_output: jnp.sin(f(q, k, v)), "h100-8x1", *operands(), gradients=True)
        assert calls(text) == (runs, 1)


def test_a_program_without_gradients_has_no_statistics():
    text, choices = compiled(attend(Causal()), "h100-8x1", *operands())
    assert (choices, calls(text)) == (["cudnn"], (1, 0))
    assert jax.devices()[0].platform == "cpu"
