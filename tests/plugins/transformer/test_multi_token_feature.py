"""The feature `multi-token-prediction`: its settings, its errors, and a run. `tests/conformance` has its suite."""

import jax
import numpy as np
import pytest

from axlearn_core import compose
from axlearn_core.config import get
from axlearn_core.errors import ConfigError, RequestError
from axlearn_plugins_transformer.multi_token import MultiTokenCausalLM
from support import toy_models


def with_heads(options="", *more, experiment="quickstart"):
    text = f"multi-token-prediction:{options}" if options else "multi-token-prediction"
    return toy_models.resolve(toy_models.small(experiment), with_=[text, *more]).config


def test_a_second_use_sets_the_options_of_the_first():
    cfg = with_heads()
    plain = toy_models.small("quickstart")
    assert isinstance(get(cfg, "model"), MultiTokenCausalLM.Config)
    assert get(cfg, "model.decoder") == get(plain, "model.decoder")
    assert (get(cfg, "model.depth"), get(cfg, "model.mtp_weight")) == (1, 0.3)
    second = toy_models.resolve(cfg, with_=["multi-token-prediction:depth=3,loss_weight=0.1"]).config
    assert (get(second, "model.depth"), get(second, "model.mtp_weight")) == (3, 0.1)


@pytest.mark.parametrize("options", ["depth=0", "depth=17", "loss_weight=0", "loss_weight=-1", "heads=2"])
def test_bad_options_are_refused(options):
    with pytest.raises(RequestError, match=rf"{options.partition('=')[0]}"):
        with_heads(options)


def test_a_model_without_tokens_is_refused():
    with pytest.raises(RequestError, match=r"multi-token-prediction finds nothing to set[\s\S]*expected: a causal-lm"):
        toy_models.resolve("vit-tiny", with_=["multi-token-prediction"])


@pytest.mark.parametrize("objective", ["dpo:data=pairs.jsonl", "kto:data=rows.jsonl", "distill"])
def test_objectives_that_would_not_train_the_heads_are_refused(objective):
    with pytest.raises(RequestError, match=r"multi-token-prediction[\s\S]*cannot|cannot[\s\S]*multi-token-prediction"):
        with_heads("", objective)
    later = toy_models.resolve(with_heads(), with_=[objective]).config  # the config of a run
    with pytest.raises(ConfigError, match=r"objective: .*would not train all parameters[\s\S]*fix: remove multi-token"):
        compose(later, jax.devices()[:1])


@pytest.mark.slow
def test_the_loss_of_each_depth_falls_and_every_parameter_is_trained():
    cfg = with_heads("depth=2")
    program = compose(cfg, jax.devices()[:1])
    state = program.init(0)
    before, losses = jax.device_get(state.params), []
    batch = program.put(toy_models.batch())
    for _ in range(20):
        state, metrics = program.train_step(state, batch)
        losses.append([float(metrics[name]) for name in ("mtp_1_loss", "mtp_2_loss", "mtp_loss", "loss")])
    first, last = np.asarray(losses[0]), np.asarray(losses[-1])
    np.testing.assert_allclose(first[:2], np.log(toy_models.VOCABULARY), rtol=0.2)
    assert (last < 0.8 * first).all(), losses
    heads = {path: x for path, x in jax.device_get(state.params).items() if path.startswith("mtp.")}
    assert {path.partition(".")[2].partition(".")[0] for path in heads} == {"0", "1"}
    unchanged = [path for path, x in heads.items() if np.abs(x - before[path]).max() < 1e-4]
    assert not unchanged


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("pipeline:microbatches=2", {"mesh.shape": {"pipeline": 2}}),
        ("pipeline:microbatches=2,schedule=1f1b", {"mesh.shape": {"pipeline": 2}}),
        ("gradient-accumulation:steps=4", {}),
        ("sequence-parallel", {"mesh.shape": {"tensor": 2, "fsdp": 2}}),
        ("context-parallel", {"mesh.shape": {"seq": 2, "data": 2}}),
    ],
    ids=lambda more: more[0],
)
def test_a_layout_gives_the_losses_of_one_device(more):
    feature, settings = more

    def train(cfg, devices):
        program = compose(cfg, jax.devices()[:devices])
        state, losses = program.init(0), []
        for _ in range(3):
            state, metrics = program.train_step(state, program.put(toy_models.batch()))
            losses.append([float(metrics[name]) for name in ("loss", "mtp_loss", "mtp_1_loss", "mtp_2_loss")])
        return losses

    expected = train(with_heads("depth=2"), 1)
    cfg = toy_models.resolve(with_heads("depth=2", feature), set=settings).config
    devices = int(np.prod([*settings.get("mesh.shape", {}).values(), 1]))
    np.testing.assert_allclose(train(cfg, devices), expected, rtol=2e-4)
