import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Full, Prefix, Segments, SlidingWindow


def reference(q, k, v, visible, scale, softcap):
    """By loops over rows and heads, in float64."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        s = scale * q[b, :, n] @ k[b, :, n // group].T
        s = softcap * np.tanh(s / softcap) if softcap else s
        s = np.where(np.broadcast_to(visible, (q.shape[0], *visible.shape[1:]))[b], s, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        out[b, :, n] = (w / w.sum(-1, keepdims=True)) @ v[b, :, n // group]
    return out


def operands(length, heads=4, kv_heads=2, size=8, dtype=jnp.float32, batch=2, keys=None):
    shapes = [(batch, length, heads, size)] + [(batch, keys or length, kv_heads, size)] * 2
    draws = [np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(shapes)]
    return [jax.device_put(x.astype(dtype)) for x in draws]


def run(q, k, v, kernel=None, **options):
    """Run the op in one program."""
    return jax.jit(lambda q, k, v: AttentionOp(q, k, v, **options).run(kernel))(q, k, v)


IDS = jnp.asarray(np.repeat([[1, 2, 2, 3], [1, 1, 1, 2]], 64, axis=1), jnp.int32)
MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(100),
    "segments": Causal() & Segments(IDS, IDS),
    "window and segments": Causal() & SlidingWindow(40) & Segments(IDS, IDS),
    "prefix": (Causal() & SlidingWindow(70)) | Prefix(jnp.asarray([30, 0], jnp.int32)),
}


@pytest.mark.fast_cases(
    "prefix-2-None", "prefix-4-None", "segments-4-None", "window and segments-4-None", "window-2-None"
)
@pytest.mark.parametrize(("kv_heads", "softcap"), [(1, 5.0), (2, None), (4, None)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_reference_is_softmax_attention(mask, kv_heads, softcap):
    q, k, v = operands(256, kv_heads=kv_heads)
    actual = run(q, k, v, "xla", mask=mask, scale=0.3, softcap=softcap)
    expected = reference(q, k, v, np.asarray(mask.materialize((0, 256), (0, 256))), 0.3, softcap)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


BLOCKED = {k: v for k, v in MASKS.items() if k != "prefix"}  # a prefix of unknown length hides no block


GRID = [
    pytest.param(
        mask,
        heads,
        dtype,
        id=f"{name}-{heads}-{dtype}",
        marks=() if (heads[1] == 1) == (dtype == "float32") else pytest.mark.slow,
    )
    for name, mask in BLOCKED.items()
    for heads in ((4, 4), (4, 1))
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.fast_cases("causal-(4, 1)-float32")
@pytest.mark.parametrize(("mask", "heads", "dtype"), GRID)
def test_blocked_equals_reference_in_values_and_gradients(mask, heads, dtype):
    args = operands(256, *heads, dtype=dtype)
    weigh = jax.random.normal(jax.random.key(9), args[0].shape)

    def total(kernel):
        def run(q, k, v):
            out = AttentionOp(q, k, v, mask=mask, scale=0.4, softcap=8.0).run(kernel)
            return jnp.sum(out.astype(jnp.float32) * weigh), out

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))

    (_, expected), expected_grads = total("xla")(*args)
    (_, actual), found_grads = total("xla-blocked")(*args)
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for a, b in zip((actual, *found_grads), (expected, *expected_grads), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_blocked_multiplies_only_blocks_that_are_visible():
    q, k, v = operands(512, batch=1)

    def flops(mask, kernel):
        run = jax.jit(lambda q, k, v: AttentionOp(q, k, v, mask=mask, scale=1.0).run(kernel))
        return run.lower(q, k, v).compile().cost_analysis()["flops"]

    full = flops(Causal(), "xla")
    assert flops(Causal(), "xla-blocked") < 0.66 * full  # 10 of 16 blocks
    assert flops(Causal() & SlidingWindow(128), "xla-blocked") < 0.48 * full  # 7 of 16


@pytest.mark.fast_cases("4")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_queries_at_given_slots_are_rows_of_the_whole(kv_heads):
    q, k, v = operands(9, kv_heads=kv_heads)
    whole = np.asarray(run(q, k, v, mask=Causal(), scale=1.0))
    slots = np.asarray([[6], [3]], np.int32)
    queries = np.take_along_axis(np.asarray(q), slots[:, :, None, None], axis=1)
    keys = np.arange(9, dtype=np.int32)[None]
    one = run(queries, k, v, mask=Causal(), scale=1.0, query_slots=jnp.asarray(slots), key_slots=jnp.asarray(keys))
    np.testing.assert_allclose(one, np.take_along_axis(whole, slots[:, :, None, None], axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "mask", "reason"),
    [
        (130, Causal(), "not a multiple of 128"),
        (256, Full(), "does not hide any whole block"),
        (128 * 65, Causal(), "more than 64"),
    ],
)
def test_blocked_says_why_it_cannot(length, mask, reason):
    q, k, v = (jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32) for _ in range(3))
    with pytest.raises(RequestError, match=reason):
        jax.eval_shape(lambda q, k, v: AttentionOp(q, k, v, mask=mask, scale=1.0).run("xla-blocked"), q, k, v)


SINKS = jnp.asarray([3.0, -1.0, 0.5, 2.0])


def with_an_empty_key(q, k, v, visible, sinks, scale):
    """Attention in float64 over one more key, whose score is the sink of each head and whose value is zero."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    out, log_sum_exp = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        s = np.where(visible[0], scale * q[b, :, n] @ k[b, :, n * k.shape[2] // q.shape[2]].T, -np.inf)
        w = np.exp(np.concatenate([s, np.full((len(s), 1), float(sinks[n]))], axis=1))
        log_sum_exp[b, :, n] = np.log(w.sum(-1))
        out[b, :, n] = (w / w.sum(-1, keepdims=True))[:, :-1] @ v[b, :, n * k.shape[2] // q.shape[2]]
    return out, log_sum_exp


@pytest.mark.parametrize("kernel", ["xla", "xla-blocked"])
def test_a_sink_takes_weight_like_a_key_without_a_value(kernel):
    q, k, v = operands(256)
    mask = Causal() & SlidingWindow(100)
    visible = np.asarray(mask.materialize((0, 256), (0, 256)))
    actual = run(q, k, v, kernel, mask=mask, scale=0.3, sinks=SINKS, log_sum_exp=True)
    expected = with_an_empty_key(q, k, v, visible, SINKS, 0.3)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_parts_of_the_keys_combine_by_their_log_sum_exp():
    q, k, v = map(np.asarray, operands(64))
    whole = run(q, k, v, mask=Full(), scale=0.3)
    parts = [
        run(q, k[:, part], v[:, part], mask=Full(), scale=0.3, log_sum_exp=True)
        for part in (slice(0, 20), slice(20, 64))
    ]
    weights = np.exp(np.stack([log_sum_exp for _, log_sum_exp in parts]))
    weights = weights / weights.sum(axis=0)
    combined = sum(w[..., None] * np.asarray(out) for w, (out, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(combined, whole, rtol=2e-5, atol=2e-5)
