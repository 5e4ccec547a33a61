"""Features and settings on attention of third parties: subclasses with sinks, and wrappers with `inner`."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import Configurable, Node, get, node, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train import TrainLoop
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_finetune.lora.start import StartFromRun
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_runtime.corruption import CorruptionCheck
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import Attention, PositionEncoding
from axlearn_plugins_transformer.attention_variants.alibi import Alibi
from axlearn_plugins_transformer.attention_variants.paged_latent_cache import PagedLatentCache
from axlearn_plugins_transformer.feed_forward import FeedForward
from axlearn_plugins_transformer.paged_cache import PagedCache
from support import dropping_features, toy_models
from support.dropping_features import OutputGate, SinkAttention

ATTENTION = "model.decoder.layer.attention"
POSITION = f"{ATTENTION}.position"


class WrappedEncoding(Configurable):
    @node
    class Config(Configurable.Config["WrappedEncoding"]):
        inner: Node[PositionEncoding] | None = None


class WrappedFeedForward(Configurable):
    @node
    class Config(Configurable.Config["WrappedFeedForward"]):
        inner: Node[FeedForward] | None = None


@pytest.fixture
def gated(install):
    install("planted-features", points=dropping_features.points())
    return resolve("quickstart", with_=["gated-output"]).config


@pytest.fixture
def sinks(install):
    install("planted-features", points=dropping_features.points())
    return resolve("quickstart", with_=["sinks"]).config


def with_(tree, *features, **options) -> Any:
    return resolve(tree, with_=features, **options).config


def test_features_keep_a_subclass_of_attention(sinks):
    for feature in (
        "rope:theta=500000",
        "alibi",
        "interleave",
        "lora",
        "quantization",
        "dropout:rate=0.1",
        "paged-cache",
    ):
        assert type(get(with_(sinks, feature), ATTENTION)) is SinkAttention.Config, feature
    assert get(with_(sinks, "rope:theta=500000"), POSITION) == RotaryEmbedding.Config(theta=500000.0)
    recurrent = get(with_(sinks, "mamba2"), ATTENTION)
    assert isinstance(recurrent.children[3], SinkAttention.Config)


def test_a_feature_that_cannot_keep_sinks_refuses(sinks):
    expected = (
        r"'mla'[\s\S]*attention: would be lost: LatentAttention.Config does not compute what SinkAttention.Config adds"
    )
    with pytest.raises(RequestError, match=expected) as raised:
        with_(sinks, "mla")
    assert "fix: remove this replacement" in str(raised.value)


def test_features_reach_into_a_wrapper(gated):
    assert isinstance(get(gated, ATTENTION), OutputGate.Config)
    rope = with_(gated, "rope:theta=500000")
    assert get(rope, ATTENTION).inner.position == RotaryEmbedding.Config(theta=500000.0)
    lora = get(with_(gated, "lora"), ATTENTION).inner
    assert all(isinstance(part, LoraLinear.Config) for part in (lora.query, lora.key, lora.value, lora.output))
    assert isinstance(
        get(with_(gated, f"quantization:target={ATTENTION}.query"), ATTENTION).inner.query, QuantizedLinear.Config
    )
    assert get(with_(gated, "context-parallel"), ATTENTION).inner.kernel == "ring"
    recurrent = get(with_(gated, "mamba2"), ATTENTION)
    assert isinstance(recurrent, OutputGate.Config)
    assert isinstance(recurrent.inner, Alternate)
    assert isinstance(recurrent.inner.children[0], Mamba2.Config)
    replaced = with_(gated, f"replace:path={ATTENTION}.query,component=linear,settings={{bias: true}}")
    assert get(replaced, ATTENTION).inner.query.bias


def test_a_wrapper_of_an_encoding_or_a_feed_forward_layer_stays():
    tree = resolve("quickstart").config
    wrapped = patch(tree, {POSITION: WrappedEncoding.Config(inner=RotaryEmbedding.Config())})
    assert get(with_(wrapped, "rope:theta=7"), POSITION) == WrappedEncoding.Config(
        inner=RotaryEmbedding.Config(theta=7.0)
    )
    assert get(with_(wrapped, "alibi"), POSITION) == WrappedEncoding.Config(inner=Alibi.Config())
    place = "model.decoder.layer.feed_forward"
    wrapped = patch(tree, {place: WrappedFeedForward.Config(inner=get(tree, place))})
    experts = with_(wrapped, "moe")
    assert isinstance(get(experts, place), WrappedFeedForward.Config)
    assert isinstance(get(experts, place).inner, MixtureOfExperts.Config)
    assert get(with_(experts, "moe:num_experts=4"), place).inner.num_experts == 4
    mixed = patch(tree, {place: Alternate(children=(get(tree, place), get(experts, place)))})
    changed = get(with_(mixed, "moe:num_experts=4"), place)
    assert changed.children[1].inner.num_experts == 4
    assert changed.children[0] == get(tree, place)


def test_promised_paths_reach_into_a_wrapper(gated):
    settings = [f"{ATTENTION}.num_heads=8", f"{POSITION}.theta=5.0", f"{ATTENTION}.kernel=xla"]
    resolved = resolve(gated, set=settings)
    inner = get(resolved.config, ATTENTION).inner
    assert (inner.num_heads, inner.position.theta, inner.kernel) == (8, 5.0, "xla")
    (steps,) = resolved.explain(f"{ATTENTION}.num_heads").values()
    assert [step.new for step in steps] == [4, 8]
    assert steps[-1].source == f"--set {ATTENTION}.num_heads=8"
    assert resolve(gated, set={"**.attention.num_heads": 2}).config.model.decoder.layer.attention.inner.num_heads == 2
    invalid = resolve(gated, set=[f"{ATTENTION}.num_kv_heads=3"])
    with pytest.raises(
        ConfigError, match=rf"set by --set {ATTENTION}.num_kv_heads=3: {ATTENTION}.inner.num_kv_heads: does not divide"
    ):
        invalid.check()


def test_one_value_by_two_paths_is_refused(gated):
    both = {f"{ATTENTION}.num_heads": 8, f"{ATTENTION}.inner.num_heads": 4}
    with pytest.raises(ConfigError, match="is set to two different values"):
        resolve(gated, set=both)
    assert resolve(gated, set={**both, f"{ATTENTION}.num_heads": 4}).config is not None


@pytest.mark.parametrize(
    ("feature", "path", "message"),
    [
        ("gated-output", "num_head", f"did you mean: {ATTENTION}.inner.num_heads"),
        (
            "mamba2",
            "num_heads",
            f"fix: Alternate has several components; name one of them: {ATTENTION}.children.0.num_heads, ",
        ),
        ("mamba2", "position.theta", f"name one of them: {ATTENTION}.children.3.position.theta"),
    ],
)
def test_a_path_that_does_not_exist_names_the_right_one(gated, feature, path, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        resolve("quickstart", with_=[feature], set={f"{ATTENTION}.{path}": 8})


def test_a_check_goes_into_the_innermost_loop():
    tree = patch(resolve("quickstart").config, {"loop": StartFromRun.Config(run_dir="base", loop=TrainLoop.Config())})
    checked: Any = with_(tree, "sdc-check:every_steps=2")
    assert checked.loop.run_dir == "base"
    assert isinstance(checked.loop.loop.check, CorruptionCheck.Config)
    with pytest.raises(RequestError, match=r"'shadow'[\s\S]*can have only one[\s\S]*check CorruptionCheck.Config"):
        with_(checked, "shadow:feature=remat")
    shadowed = with_(resolve("quickstart").config, "shadow:feature=remat")
    with pytest.raises(RequestError, match=r"'sdc-check'[\s\S]*can have only one[\s\S]*check ShadowCheck.Config"):
        with_(shadowed, "sdc-check")


def test_a_paged_cache_keeps_its_settings():
    int8 = with_("quickstart", "cache-int8:page_size=32")
    again = get(with_(int8, "paged-cache:heads_first=true"), f"{ATTENTION}.kv_cache")
    assert again == PagedCache.Config(page_size=32, heads_first=True, store="int8")
    latent = with_(with_("quickstart", "mla", "paged-cache:page_size=32"), "paged-cache")
    assert get(latent, f"{ATTENTION}.latent_cache") == PagedLatentCache.Config(page_size=32)


def test_several_features_reach_into_a_wrapper(gated):
    tree = with_(gated, "rope:theta=7", "lora", "interleave", "context-parallel", "precision:dtype=bfloat16")
    inner = get(tree, ATTENTION).inner
    assert isinstance(inner, Attention.Config)
    assert (inner.position.theta, inner.kernel) == (7.0, "ring")
    assert isinstance(inner.window, Alternate)
    assert isinstance(inner.query, LoraLinear.Config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated-output", "sinks"])
def test_the_model_trains_with_the_settings(gated, name):
    cfg = toy_models.config("quickstart", name, "rope", "interleave", "lora")
    cfg = patch(cfg, {f"{ATTENTION}.num_heads": 4, "mesh.shape": {"fsdp": 1}})
    with toy_models.quick_to_compile():
        program = compose(cfg, jax.devices()[:1])
        _, scalars = program.train_step(program.init(0), program.put(toy_models.batch_for(cfg)))
    assert np.isfinite(float(scalars["loss"]))
    queries = [spec.shape for path, spec in program.state.params.items() if path.endswith("query.weight")]
    assert queries
    assert all(shape[-2:] == (4, 8) for shape in queries)
