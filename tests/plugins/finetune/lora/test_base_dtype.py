"""A base that is stored in bfloat16 trains like one in float32, if the model computes in bfloat16."""

import jax
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose import Functional, ModelWeights, compose
from axlearn_core.config import find, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.adapters import is_adapter
from axlearn_plugins_finetune.lora.feature import Lora, without_adapters
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear

ROUNDED = "precision:dtype=bfloat16"
QUICK = {"xla_backend_optimization_level": 0}  # compilation would dominate the time of these tests
NARROW = "lora:base_dtype=bfloat16"


@pytest.fixture
def config(toy):
    """Return a function (features) -> config of the toy model."""
    return lambda *features: ax.resolve(toy(), with_=features).config


def dtypes(cfg):
    """Return path -> dtype of each parameter."""
    return {path: str(spec.dtype) for path, spec in Functional.from_config(cfg.model).abstract.items()}


def test_everything_but_the_adapters_is_narrow(config):
    result = dtypes(config("lora:rank=2,base_dtype=bfloat16"))
    assert {p for p, dtype in result.items() if dtype == "float32"} == {p for p in result if is_adapter(p)}
    assert set(result.values()) == {"float32", "bfloat16"}


def test_layers_that_compute_in_float32_stay(config):
    result = dtypes(config("moe:num_experts=2", "lora:target=model.**,base_dtype=bfloat16"))
    assert {p for p, d in result.items() if d == "float32" and not is_adapter(p)} == {
        "decoder.layer.feed_forward.router.weight"
    }


def test_dtypes_that_a_layer_sets_stay(config):
    norm = {"model.decoder.norm.param_dtype": "float16"}
    result = dtypes(Lora(base_dtype="bfloat16").apply(patch(config(), norm)))
    assert result["decoder.norm.weight"] == "float16"
    assert result["decoder.layer.attention.query.lora_a"] == "float32"


@pytest.mark.parametrize("target", ["model.**.feed_forward.*", "model.**.query"])
def test_added_to_adapters_it_keeps_their_target_and_their_dtype(config, target):
    """The remedy of a plan is an option that is added to the command."""
    texts = [f"lora:rank=2,target={target}"]
    before, after = config(*texts), config(*texts, NARROW)
    assert find(before, LoraLinear).keys() == find(after, LoraLinear).keys()
    assert after == config(f"{texts[0]},base_dtype=bfloat16")
    assert Lora(base_dtype="bfloat16").apply(after) == after
    wider = Lora(target="model.**").apply(after)
    assert {p: d for p, d in dtypes(wider).items() if is_adapter(p) and d != "float32"} == {}


@pytest.mark.parametrize("others", [(), ("moe:num_experts=2",)])
def test_without_adapters_the_model_is_what_it_was(config, others):
    adapted = config(*others, "lora:target=model.**,base_dtype=bfloat16")
    assert without_adapters(adapted) == config(*others)


def test_a_model_without_the_field_is_refused(config):
    cfg = patch(config(), {"model.param_dtype": None})
    with pytest.raises(ConfigError, match="lora cannot set base_dtype"):
        Lora(base_dtype="bfloat16").apply(cfg)


@pytest.mark.slow
def test_the_loss_and_its_gradients_are_equal(config, batch):
    """Each layer rounds a float32 parameter to bfloat16 before it uses it, so nothing changes if it is rounded once."""
    rng, results = np.random.default_rng(0), []
    values: dict = {}
    for more in ((), (NARROW,)):
        program = compose(config("lora:rank=2", ROUNDED, *more), jax.devices()[:1])
        specs = program.functional.abstract
        values = values or {p: 0.1 * rng.standard_normal(s.shape, np.float32) for p, s in specs.items()}
        params = {p: values[p].astype(spec.dtype) for p, spec in specs.items()}
        base, trained = adapters.split(params)

        def loss(trained, base, program=program):
            return program.function("loss").call(ModelWeights({**base, **trained}, {}), batch)[0]

        results.append(jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(trained, base))
        changed = [p for p in base if not np.array_equal(base[p].astype(np.float32), values[p])]
    assert len(changed) == len(base)
    (first, gradients), (second, other) = results
    assert first == second
    assert all(np.array_equal(gradients[p], other[p]) for p in gradients)
    assert any(np.asarray(g).any() for g in gradients.values())


@pytest.mark.slow
def test_training_gives_equal_losses(config, batch):
    """The same for whole steps, with a router, which keeps its float32 weights."""
    features = ("moe:num_experts=2", "lora:rank=2,target=model.**", ROUNDED)
    wide, narrow = (compose(config(*features, *more), jax.devices()[:1]) for more in ((), (NARROW,)))
    state = wide.init(0)
    rounded = {p: state.params[p].copy().astype(spec.dtype) for p, spec in narrow.state.params.items()}
    other, losses = narrow.init(0).replace(params=rounded), []
    for _ in range(3):
        state, first = wide.train_step(state, wide.put(batch))
        other, second = narrow.train_step(other, narrow.put(batch))
        losses.append((float(first["loss"]), float(second["loss"])))
    assert [a for a, _ in losses] == [b for _, b in losses]
    assert losses[0] != losses[-1]
    assert all(np.array_equal(state.params[p], other.params[p]) for p in state.params if is_adapter(p))


def test_exported_adapters_fit_the_base_before_it_was_rounded(tmp_path):
    rng = np.random.default_rng(0)
    base = {"x.weight": rng.standard_normal((4, 6)).astype(np.float32)}
    a, b = rng.standard_normal((4, 2)).astype(np.float32), rng.standard_normal((2, 6)).astype(np.float32)
    stored = {**base, "x.weight": jax.numpy.asarray(base["x.weight"], "bfloat16"), "x.lora_a": a, "x.lora_b": b}
    adapters.save(tmp_path, stored, {"x": 1.0})
    exported = adapters.load(tmp_path)
    assert exported.dtype == "bfloat16"
    exported.check(stored)
    exported.check(base)
    with pytest.raises(RequestError, match="the same shapes but different values"):
        exported.check({"x.weight": base["x.weight"] * 2})
