"""Recurrent layers in models: packed rows, generation, serving, and the layers of transformers."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import get, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_recurrent.convolution import ShortConvolution
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.cache_spec import empty_cache
from axlearn_plugins_transformer.generate import Generator
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_verify.properties.derivatives import with_all_experts
from support import serving_models
from support.needs import needs, require

FEATURES = {
    "delta": "gated-delta-net:attention_every=2",
    "kimi": "kimi-delta-attention:attention_every=2,rank=8",
    "mamba2": "mamba2:attention_every=2,head_dim=16,state_dim=16",
}
ONE = pytest.mark.fast_cases("delta*")


def make(feature):
    config = patch(resolve("quickstart").config, serving_models.SMALL)
    return resolve(config, with_=[feature]).config.model.build(rngs=nnx.Rngs(0))


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, 64, shape), jnp.int32)


@pytest.mark.slow
@ONE
@pytest.mark.parametrize("feature", FEATURES)
def test_a_document_does_not_depend_on_the_one_before_it(feature):
    model, tokens = make(FEATURES[feature]), draw(2, 40)
    lengths = ((13, 27), (20, 20))
    ids = jnp.asarray([np.repeat([1, 2], n) for n in lengths], jnp.int32)
    positions = jnp.asarray([np.concatenate([np.arange(n) for n in row]) for row in lengths], jnp.int32)
    packed = jax.jit(lambda: model(tokens, positions=positions, segment_ids=ids))()
    for row, (first, _) in enumerate(lengths):
        alone = jax.jit(lambda row=row, first=first: model(tokens[row : row + 1, first:]))()
        np.testing.assert_allclose(packed[row, first:], alone[0], atol=1e-5, rtol=1e-5)


@ONE
@pytest.mark.parametrize("feature", FEATURES)
def test_logits_are_the_same_in_any_chunks(feature):
    model, tokens = make(FEATURES[feature]), draw(2, 40)
    expected = jax.jit(lambda: model(tokens))()
    cache, parts, begin = model.init_cache(2, 48), [], 0
    step = jax.jit(lambda tokens, cache: model(tokens, cache=cache))
    for size in (5, 1, 17, 1, 16):
        part, cache = step(tokens[:, begin : begin + size], cache)
        parts.append(part)
        begin += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("feature", [*FEATURES.values(), "gated-delta-net:attention_every=0"])
@pytest.mark.parametrize(
    "sizes", [{}, {"runner.decode_steps": 3}, {"runner.num_blocks": 7, "runner.num_snapshots": 1}], ids=str
)
def test_a_server_gives_the_tokens_of_generate(feature, sizes):
    model, rng = make(feature), np.random.default_rng(0)
    prompts = [rng.integers(0, 64, n).tolist() for n in (3, 13, 70, 33)]
    prompts += [[*prompts[2][:64], 1, 2, 3], prompts[2]]
    generator = Generator(model)
    expected = [tuple(generator(prompt, max_tokens=40)) for prompt in prompts]
    settings = {"runner.max_rows": 3, "runner.max_context": 128, "hold_seconds": 9.0, **sizes}
    with serve(model, set=settings, warm_up=False) as engine:
        for _ in range(2):
            results = engine.generate(prompts, max_tokens=40, temperature=0)
            assert [result.tokens for result in results] == expected
        statistics = engine.statistics()
    assert statistics.cached_prompt_tokens > 0
    assert (statistics.preemptions > 0) == ("runner.num_blocks" in sizes)


@pytest.mark.slow
def test_a_server_keeps_one_state_per_request():
    model = make(FEATURES["delta"])
    with serve(
        model, set={"runner.max_rows": 3, "runner.num_snapshots": 2, "runner.max_context": 64}, warm_up=False
    ) as engine:
        cache = engine.engine.runner.cache
    assert cache[0]["state"].shape == (5, 4, 16, 16)
    assert cache[0]["query"].shape == (5, 3, 4, 16)
    assert cache[1]["pages"].shape[0] == 6, "pages of 32 tokens for three requests of 64"


@pytest.mark.slow
def test_latent_attention_next_to_a_recurrent_layer_is_paged():
    config = resolve(patch(resolve("quickstart").config, serving_models.SMALL), with_=[FEATURES["delta"], "mla"]).config
    model = config.model.build(rngs=nnx.Rngs(0))
    with serve(model, set={"runner.max_rows": 1, "runner.max_context": 64}, warm_up=False) as engine:
        assert "pages" in engine.engine.runner.cache[1]


def test_groups_of_a_state_space_layer_are_no_groups_of_experts():
    config = resolve("quickstart", with_=[FEATURES["mamba2"]]).config
    assert with_all_experts(config) == config
    config = resolve("quickstart", with_=["moe:num_experts=8,top_k=2"]).config
    assert get(with_all_experts(config), "model.decoder.layer.feed_forward.top_k") == 8


def test_parity_mode_is_refused():
    with (
        pytest.raises(RequestError, match="it has recurrent layers"),
        serve(make(FEATURES["delta"]), set={"runner.mode": "parity"}),
    ):
        pass


def test_padding_leaves_the_state_unchanged():
    layer = GatedDeltaNet.Config(num_heads=2, input_dim=8).build(rngs=nnx.Rngs(0), precision=Precision())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 8)), jnp.float32)
    cache = empty_cache(layer.cache_spec(), 1, 12)
    real = jnp.arange(12)[None] < 7
    run = jax.jit(lambda x, context: layer(x, context, cache)[1])
    padded, exact = run(x, Context(real=real)), run(x[:, :7], Context())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), padded, exact)


@pytest.mark.slow
def test_strengths_may_be_up_to_two():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 8)), jnp.float32)
    one, two = (
        GatedDeltaNet.Config(num_heads=2, input_dim=8, strength_scale=scale)
        .build(rngs=nnx.Rngs(0), precision=Precision())
        .gates(x)
        for scale in (1.0, 2.0)
    )
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(2 * one[1], two[1])
    assert float(two[1].max()) > 1


def test_a_prefix_that_attends_in_both_directions_is_refused():
    layer = GatedDeltaNet.Config(num_heads=2, input_dim=8).build(rngs=nnx.Rngs(0), precision=Precision())
    with pytest.raises(RequestError, match="no prefix can attend in both directions"):
        layer(jnp.zeros((1, 4, 8)), Context(prefix=jnp.asarray([2], jnp.int32)))


def test_a_cached_row_is_one_document():
    layer = GatedDeltaNet.Config(num_heads=2, input_dim=8).build(rngs=nnx.Rngs(0), precision=Precision())
    with pytest.raises(RequestError, match="one document per row"):
        layer(
            jnp.zeros((1, 4, 8)),
            Context(segment_ids=jnp.ones((1, 4), jnp.int32)),
            empty_cache(layer.cache_spec(), 1, 4),
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GatedDeltaNet.Config(num_heads=3, input_dim=8), "does not divide the width"),
        (Mamba2.Config(head_dim=24, input_dim=8), "the heads do not fill the inner width"),
    ],
    ids=["heads", "head_dim"],
)
def test_sizes_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        config.build(rngs=nnx.Rngs(0), precision=Precision())


def set_weights(layer, weights):
    """Set the parameters of a layer to tensors, by path."""
    state = nnx.state(layer, nnx.Param)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    assert flat.keys() == weights.keys()
    for path, value in weights.items():
        value = jnp.asarray(value.detach().numpy())
        assert value.shape == flat[path].get_value().shape, path
        flat[path].set_value(value)
    nnx.update(layer, nnx.from_flat_state([(tuple(path.split(".")), leaf) for path, leaf in flat.items()]))


def compare(layer, module, weights, length=70):
    torch = require("torch")
    set_weights(layer, weights)
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))
    expected = module(x)
    expected = (expected[0] if isinstance(expected, tuple) else expected).detach().numpy()
    result, _ = jax.jit(lambda x: layer(x, Context()))(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow  # the suite of layers compares with plain formulas; to import transformers takes eight seconds
@needs("torch", "transformers")
def test_gated_delta_net_equals_that_of_qwen3_next():
    torch = require("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    torch.manual_seed(0)
    config = hf.Qwen3NextConfig(
        hidden_size=32, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12,
        num_hidden_layers=4,
    )  # fmt: skip
    module = hf.Qwen3NextGatedDeltaNet(config, 0)
    torch.nn.init.normal_(module.norm.weight, 1.0, 0.1)
    groups, keys, values = 2, 8, 24  # two heads of values in each group
    mixed = module.in_proj_qkvz.weight.view(groups, -1, 32)
    query, key, value, gate = (part.permute(2, 0, 1) for part in mixed.split([keys, keys, values, values], dim=1))
    strength, decay = (
        p.permute(2, 0, 1).reshape(32, 4) for p in module.in_proj_ba.weight.view(groups, 4, 32).split(2, dim=1)
    )
    taps = [part.T for part in module.conv1d.weight[:, 0].split([16, 16, 48])]
    layer = GatedDeltaNet.Config(num_heads=4, num_key_heads=2, key_dim=8, value_dim=12, input_dim=32)
    compare(
        layer.build(rngs=nnx.Rngs(0), precision=Precision()),
        module,
        {
            "query.weight": query, "key.weight": key, "value.weight": value.reshape(32, 4, 12),
            "gate.weight": gate.reshape(32, 4, 12), "strength.weight": strength, "decay.weight": decay,
            "output.weight": module.out_proj.weight.T.reshape(4, 12, 32), "log_rate": module.A_log,
            "time_bias": module.dt_bias, "norm.weight": module.norm.weight,
            "convolutions.query.weight": taps[0].reshape(4, 2, 8), "convolutions.key.weight": taps[1].reshape(4, 2, 8),
            "convolutions.value.weight": taps[2].reshape(4, 4, 12),
        },
    )  # fmt: skip


@pytest.mark.slow
@needs("torch", "transformers")
def test_mamba2_equals_that_of_transformers():
    torch = require("torch")
    from transformers.models.mamba2 import modeling_mamba2 as hf

    torch.manual_seed(0)
    config = hf.Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, state_size=6, n_groups=2, expand=2, num_hidden_layers=1, chunk_size=16
    )
    module = hf.Mamba2Mixer(config, 0).eval()
    torch.nn.init.normal_(module.norm.weight, 1.0, 0.1)
    gate, value, key, query, step = module.in_proj.weight.T.split([64, 64, 12, 12, 8], dim=1)
    taps = [part.T for part in module.conv1d.weight[:, 0].split([64, 12, 12])]
    biases = module.conv1d.bias.split([64, 12, 12])
    layer = Mamba2.Config(
        num_heads=8, head_dim=8, state_dim=6, num_groups=2, input_dim=32, convolution=ShortConvolution.Config(bias=True)
    )
    weights = {
        "gate.weight": gate.reshape(32, 8, 8), "value.weight": value.reshape(32, 8, 8),
        "key.weight": key.reshape(32, 2, 6), "query.weight": query.reshape(32, 2, 6), "step.weight": step,
        "output.weight": module.out_proj.weight.T.reshape(8, 8, 32), "log_rate": module.A_log,
        "step_bias": module.dt_bias, "skip": module.D, "norm": module.norm.weight.reshape(8, 8),
    }  # fmt: skip
    for name, tap, bias, shape in zip(("value", "key", "query"), taps, biases, ((8, 8), (2, 6), (2, 6)), strict=True):
        weights[f"convolutions.{name}.weight"] = tap.reshape(4, *shape)
        weights[f"convolutions.{name}.bias"] = bias.reshape(shape)
    compare(layer.build(rngs=nnx.Rngs(0), precision=Precision()), module, weights)


@pytest.mark.slow
@needs("torch", "transformers")
def test_kimi_delta_attention_equals_that_of_transformers():
    torch = require("torch")
    from transformers.models.kimi_linear import modeling_kimi_linear as hf

    torch.manual_seed(0)
    config = hf.KimiLinearConfig(hidden_size=32, linear_num_heads=4, linear_head_dim=8, num_hidden_layers=4)
    module = hf.KimiLinearDeltaAttention(config, 0)
    torch.nn.init.normal_(module.o_norm.weight, 1.0, 0.1)
    gate = dict(module.forget_gate.named_parameters())
    torch.nn.init.normal_(gate["dt_bias"])
    torch.nn.init.uniform_(gate["A_log"])
    taps = [part.T.reshape(-1, 4, 8) for part in module.conv1d.weight[:, 0].split([32, 32, 32])]
    down, up = (next(v for k, v in gate.items() if k.endswith(f"{name}.weight")) for name in ("a_proj", "b_proj"))
    layer = GatedDeltaNet.Config(
        num_heads=4, key_dim=8, decay_per="element", rank=8, gate_activation="sigmoid", input_dim=32
    )
    layer = attrs.evolve(layer, norm=RMSNorm.Config(eps=1e-5))
    maps = {name: getattr(module, f"{name[0]}_proj").weight.T.reshape(32, 4, 8) for name in ("query", "key", "value")}
    weights = {f"{name}.weight": weight for name, weight in maps.items()}
    weights |= {f"convolutions.{name}.weight": tap for name, tap in zip(maps, taps, strict=True)}
    weights |= {
        "decay_down.weight": down.T, "decay.weight": up.T.reshape(8, 4, 8), "strength.weight": module.b_proj.weight.T,
        "gate_down.weight": module.g_a_proj.weight.T, "gate.weight": module.g_b_proj.weight.T.reshape(8, 4, 8),
        "output.weight": module.o_proj.weight.T.reshape(4, 8, 32), "log_rate": gate["A_log"].reshape(4),
        "time_bias": gate["dt_bias"].reshape(4, 8), "norm.weight": module.o_norm.weight,
    }  # fmt: skip
    compare(layer.build(rngs=nnx.Rngs(0), precision=Precision()), module, weights)
