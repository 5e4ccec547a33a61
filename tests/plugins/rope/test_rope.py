"""The frequencies equal the formulas of Hugging Face's `modeling_rope_utils`, written pair by pair."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import check, find, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.layer import Precision
from axlearn_core.plugins.registry import registry
from axlearn_plugins_rope.feature import Rope
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_rope.scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    ProportionalScaling,
    YarnScaling,
    base_frequencies,
)
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer


def rope(head_dim=16, **settings):
    return RotaryEmbedding.Config(**settings).build(head_dim=head_dim, rngs=nnx.Rngs(0), precision=Precision())


def frequencies(head_dim, theta=10000.0, scaling=None):
    return rope(head_dim, theta=theta, scaling=scaling).frequencies()


def default(dim, base):
    return [1.0 / base ** (2 * i / dim) for i in range(dim // 2)]


def dynamic_ntk(dim, base, factor, seq_len, max_position):
    base = base * ((factor * seq_len / max_position) - (factor - 1)) ** (dim / (dim - 2))
    return default(dim, base)


def yarn(dim, base, factor, original, beta_fast=32, beta_slow=1, truncate=True):
    def correction_dim(rotations):
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = correction_dim(beta_fast), correction_dim(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    result = []
    for i in range(dim // 2):
        position_frequency = base ** (2 * i / dim)
        extrapolation, interpolation = 1.0 / position_frequency, 1.0 / (factor * position_frequency)
        keep = 1 - min(max((i - low) / (high - low), 0), 1)
        result.append(interpolation * (1 - keep) + extrapolation * keep)
    return result


def llama3(dim, base, factor, low_factor, high_factor, original):
    result = []
    for frequency in default(dim, base):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high_factor:
            result.append(frequency)
        elif wavelength > original / low_factor:
            result.append(frequency / factor)
        else:
            smooth = (original / wavelength - low_factor) / (high_factor - low_factor)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return result


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_are_those_of_the_published_formulas(dim, theta):
    def same(scaling, expected):
        np.testing.assert_allclose(frequencies(dim, theta, scaling).radians, expected, rtol=1e-12)

    same(None, default(dim, theta))
    same(LinearScaling(factor=4.0), [f / 4 for f in default(dim, theta)])
    same(NTKScaling(factor=2.5), dynamic_ntk(dim, theta, 2.0, seq_len=7168, max_position=4096))  # 2 * 7/4 - 1 = 2.5
    same(YarnScaling(factor=16.0, original_length=4096), yarn(dim, theta, 16, 4096))
    uneven = YarnScaling(factor=40.0, original_length=4096, beta_fast=20.0, beta_slow=2.0, truncate=False)
    same(uneven, yarn(dim, theta, 40, 4096, 20, 2, truncate=False))
    same(Llama3Scaling(factor=8.0), llama3(dim, theta, 8, 1, 4, 8192))
    other = Llama3Scaling(factor=32.0, low_frequency_factor=2.0, high_frequency_factor=6.0, original_length=1024)
    same(other, llama3(dim, theta, 32, 2, 6, 1024))


def test_llama3_changes_slow_pairs_only():
    plain, scaled = default(128, 500000.0), frequencies(128, 500000.0, Llama3Scaling()).radians
    np.testing.assert_allclose(scaled[:28], plain[:28], rtol=1e-12)
    np.testing.assert_allclose(scaled[-20:], np.asarray(plain[-20:]) / 8, rtol=1e-12)
    assert (np.diff(scaled) < 0).all()


def test_yarn_scales_cosines_and_sines():
    assert frequencies(64, scaling=YarnScaling(factor=16.0, original_length=4096)).factor == pytest.approx(
        0.1 * math.log(16) + 1
    )
    cfg = YarnScaling(factor=16.0, original_length=4096, attention_factor=1.5)
    assert frequencies(64, scaling=cfg).factor == 1.5
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 16))
    q, k = rope(scaling=cfg)(x, x, jnp.arange(4)[None])
    np.testing.assert_allclose(jnp.linalg.norm(q, axis=-1), 1.5 * jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(q, k)


def test_each_pair_turns_by_its_angle():
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 5, 3, 8)))
    positions = np.asarray([[0, 1, 2, 0, 1], [7, 8, 9, 10, 300]])
    actual, _ = rope(8, theta=100.0)(jnp.asarray(x), jnp.asarray(x[:, :, :1]), jnp.asarray(positions))
    for b, s, n, i in np.ndindex(2, 5, 3, 4):
        turned = complex(x[b, s, n, i], x[b, s, n, i + 4]) * np.exp(1j * positions[b, s] * 100.0 ** (-i / 4))
        np.testing.assert_allclose(actual[b, s, n, [i, i + 4]], [turned.real, turned.imag], atol=2e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_fraction_of_a_head_turns(interleaved):
    """The rotated part has the angles of a smaller head, and the rest of the head stays unchanged."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 16))
    positions = jnp.asarray([[0, 1, 2, 0, 1], [7, 8, 9, 10, 300]])
    settings = {"theta": 100.0, "interleaved": interleaved, "scaling": LinearScaling(factor=2.0)}
    query, key = rope(16, fraction=0.5, **settings)(x, x[:, :, :1], positions)
    part, _ = rope(8, **settings)(x[..., :8], x[..., :8], positions)
    np.testing.assert_array_equal(query, jnp.concatenate([part, x[..., 8:]], axis=-1))
    np.testing.assert_array_equal(key, query[:, :, :1])
    angles = positions[0, 4] * 100.0 ** (-np.arange(4) / 4) / 2
    turned = x[0, 4, 0, 0:8:2] + 1j * x[0, 4, 0, 1:8:2] if interleaved else x[0, 4, 0, :4] + 1j * x[0, 4, 0, 4:8]
    turned = np.asarray(turned) * np.exp(1j * np.asarray(angles))
    expected = [turned.real, turned.imag]
    expected = np.stack(expected, -1).ravel() if interleaved else np.concatenate(expected)
    np.testing.assert_allclose(query[0, 4, 0, :8], expected, atol=1e-5)


@pytest.mark.parametrize(("fraction", "size"), [(0.2, 3), (0.01, 0)])
def test_a_fraction_that_turns_no_pairs(fraction, size):
    with pytest.raises(RequestError, match=rf"head_dim must be even, got 16 \* fraction {fraction} = {size}") as error:
        rope(16, fraction=fraction)
    assert "fix: change fraction" in str(error.value)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_fraction_out_of_range(fraction):
    with pytest.raises(ConfigError, match="fraction: out of range"):
        RotaryEmbedding.Config(fraction=fraction)


@pytest.mark.parametrize("whole", [True, False])
def test_layers_share_cosines_of_whole_heads_on_cpus(whole):
    """For half heads, XLA on CPUs recomputes them in each layer, two or three times depending on its version."""
    turn, layers = rope(16), 3
    turn.whole_heads = whole

    def run(x, maps):
        positions = jnp.arange(x.shape[1])[None]
        for one in maps:
            query, key = turn(jnp.einsum("bsnh,hk->bsnk", x, one), x[:, :, :1], positions)
            x = query * jax.nn.sigmoid(jnp.sum(key, axis=-1, keepdims=True))
        return x

    maps = jnp.zeros((layers, 16, 16))
    program = jax.jit(run).lower(jnp.zeros((2, 8, 4, 16)), maps).compile().as_text()
    cosines, sines = (len(re.findall(rf"= \S+ {name}\(", program)) for name in ("cosine", "sine"))
    assert cosines == sines
    assert cosines == 1 if whole else cosines > layers


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_heads_turn_by_the_same_angles(dtype):
    halves, whole = rope(16), rope(16)
    whole.whole_heads = True
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 16)).astype(dtype)
    positions = jnp.arange(7)[None] * 50
    tolerance = 1e-6 if dtype == "float32" else 0.03
    for one, other in zip(halves(x, x, positions), whole(x, x, positions), strict=True):
        assert one.dtype == other.dtype == dtype
        np.testing.assert_allclose(one.astype("float32"), other.astype("float32"), atol=tolerance)


def test_scores_depend_on_the_distance_alone():
    q, k = (jax.random.normal(jax.random.key(i), (1, 6, 2, 16)) for i in range(2))

    def scores(start):
        a, b = rope()(q, k, jnp.arange(6)[None] + start)
        return jnp.einsum("btnh,bsnh->bnts", a, b)

    np.testing.assert_allclose(scores(0), scores(1000), atol=2e-3)
    assert not np.allclose(scores(0), jnp.einsum("btnh,bsnh->bnts", q, k), atol=0.1)


def test_it_keeps_the_dtype_and_holds_no_parameters():
    layer = rope()
    x = jnp.ones((1, 3, 2, 16), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        assert layer(x, x, jnp.arange(3)[None])[0].dtype == jnp.bfloat16
    assert not jax.tree.leaves(nnx.state(layer))


@pytest.mark.parametrize(
    ("cfg", "path"),
    [
        (YarnScaling(factor=2.0, original_length=8, beta_slow=40.0), "beta_slow"),
        (Llama3Scaling(low_frequency_factor=5.0), "low_frequency_factor"),
        (LinearScaling(), "factor"),
    ],
)
def test_scalings_that_make_no_sense(cfg, path):
    with pytest.raises(ConfigError) as error:
        check(cfg)
    assert [p.path for p in error.value.problems] == [path]


def test_scalings_without_a_transition():
    """Kimi K2 and Llama 4 Scout scale each pair by the whole factor, or not at all."""
    base = base_frequencies(16, 1e4)
    equal = Llama3Scaling(factor=4.0, original_length=32, low_frequency_factor=1.0, high_frequency_factor=1.0)
    unscaled = 32 * base / (2 * np.pi) >= 1
    assert 0 < unscaled.sum() < 8
    np.testing.assert_allclose(equal.build()(16, 1e4).radians, np.where(unscaled, base, base / 4))
    yarn_scaled = YarnScaling(factor=4.0, original_length=32, beta_fast=1.0, beta_slow=1.0).build()(16, 1e4).radians
    ratios = yarn_scaled / base
    assert ratios[0] == 1
    np.testing.assert_allclose(ratios[-1], 1 / 4)
    assert np.sum((ratios > 1 / 4) & (ratios < 1)) <= 1


def test_an_odd_head_size_is_an_error():
    with pytest.raises(RequestError, match="head_dim must be even, got 7"):
        rope(7)


MODEL = CausalLM.Config(
    vocab_size=10,
    decoder=Decoder.Config(
        num_layers=2, hidden_dim=16, layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2))
    ),
)
PATH = "decoder.layer.attention.position"


def test_the_feature_places_rope_and_then_sets_options_on_what_is_there():
    result = Rope().apply(MODEL)
    assert find(result, PATH) == {PATH: RotaryEmbedding.Config(theta=10000.0)}
    assert find(Rope(theta=5e5).apply(MODEL), PATH) == {PATH: RotaryEmbedding.Config(theta=5e5)}
    scaled = patch(result, {f"{PATH}.theta": 77.0, f"{PATH}.scaling": LinearScaling(factor=2.0)})
    assert Rope().apply(scaled) == scaled
    assert find(Rope(theta=5.0).apply(scaled), PATH)[PATH] == RotaryEmbedding.Config(
        theta=5.0, scaling=LinearScaling(factor=2.0)
    )
    assert find(Rope(scaling=NTKScaling(factor=3.0)).apply(scaled), PATH)[PATH].theta == 77.0


def test_the_feature_replaces_another_encoding_and_touches_nothing_else():
    other = patch(MODEL, {PATH: RMSNorm.Config()})
    result = Rope().apply(other)
    assert result == patch(MODEL, {PATH: RotaryEmbedding.Config()})
    assert result.decoder.layer.feed_forward is other.decoder.layer.feed_forward


def test_the_feature_says_whether_it_is_in_effect():
    result = Rope(theta=3.0).apply(MODEL)
    assert Rope(theta=3.0).apply(result) == result
    assert Rope(theta=3.0).in_effect(result)
    assert Rope().in_effect(result)
    assert not Rope(theta=4.0).in_effect(result)
    assert not Rope().in_effect(MODEL)


def test_a_config_without_attention_is_an_error():
    with pytest.raises(ConfigError, match="rope finds no attention"):
        Rope().apply(RMSNorm.Config())


def test_all_names_are_registered():
    names = registry()
    parts = {"rope": RotaryEmbedding.Config, "linear-rope-scaling": LinearScaling, "ntk-rope-scaling": NTKScaling,
             "yarn-rope-scaling": YarnScaling, "llama3-rope-scaling": Llama3Scaling}  # fmt: skip
    for name, cls in parts.items():
        assert names.component(name) is cls
        assert names.get_name(cls) == name


@pytest.mark.parametrize("factor", [None, 4.0])
def test_proportional_scaling_rotates_the_fastest_pairs(factor):
    radians, scale = frequencies(24, 1e6, ProportionalScaling(fraction=0.3, factor=factor))
    expected = [value / (factor or 1) if i < 3 else 0.0 for i, value in enumerate(default(24, 1e6))]  # 0.3 * 24 // 2
    np.testing.assert_allclose(radians, expected, rtol=1e-6)
    assert scale == 1
