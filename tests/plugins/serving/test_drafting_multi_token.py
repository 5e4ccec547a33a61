"""Drafts of the depths of multi-token prediction: they change no token, and are those that the training program computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core import compose
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.drafting import ModelDrafter
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.generate import Generator
from support import toy_models

SIZES = {
    "runner.block_size": 4, "runner.max_context": 64, "runner.max_rows": 4, "runner.max_step_tokens": 24,
    "runner.chunk": 8, "runner.row_buckets": (1,), "runner.chunk_buckets": (1,),
}  # fmt: skip
DRAFTER = {"drafter": ModelDrafter.Config()}


def config(depth=2, **settings):
    float32 = {"model.dtype": "float32", "model.output_dtype": "float32"}
    feature = f"multi-token-prediction:depth={depth}"
    return patch(toy_models.resolve(toy_models.small("quickstart"), with_=[feature], set=settings).config, float32)


@functools.cache
def untrained(depth=2):
    """A model with larger weights than at initialization, so that tokens differ."""
    built = config(depth).model.build(rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype), nnx.state(built, nnx.Param))
    nnx.update(built, state)
    return built


def make_texts(rng, count):
    """Rows in which a token follows from the two tokens before it."""
    tokens = rng.integers(0, 8, (count, toy_models.LENGTH + 1), dtype=np.int32)
    for i in range(2, tokens.shape[1]):
        tokens[:, i] = (tokens[:, i - 1] + 3 * tokens[:, i - 2] + 1) % 8
    return tokens


@functools.cache
def trained():
    """A model that was trained on texts of `make_texts`."""
    cfg, rng = config(), np.random.default_rng(1)
    program = compose(cfg, jax.devices()[:1])
    state = program.init(0)
    for _ in range(120):
        tokens = make_texts(rng, toy_models.ROWS)
        weights = np.ones((toy_models.ROWS, toy_models.LENGTH), np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        state, metrics = program.train_step(state, program.put(batch))
    assert float(metrics["mtp_2_loss"]) < 1.0
    built, params = cfg.model.build(rngs=nnx.Rngs(0)), jax.device_get(state.params)
    flat = nnx.to_flat_state(nnx.state(built, nnx.Param))
    nnx.update(
        built, nnx.from_flat_state([(k, v.replace(jnp.asarray(params[".".join(map(str, k))]))) for k, v in flat])
    )
    return built


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, toy_models.VOCABULARY, rng.integers(1, 30)).tolist() for _ in range(count)]


def generate(built, texts, **settings):
    with serve(built, set={**SIZES, **settings}) as engine:
        generations = engine.generate(texts, max_tokens=16, temperature=0)
        return [tuple(g.tokens) for g in generations], engine.statistics()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"runner.num_blocks": 18}, {"runner.mode": "parity"}], ids=str)
def test_drafts_of_untrained_depths_change_no_token(settings):
    texts = prompts(10)
    expected, _ = generate(untrained(), texts, **settings)
    drafted, statistics = generate(untrained(), texts, **settings, **DRAFTER)
    assert drafted == expected
    assert statistics.drafted_tokens > 0
    assert (statistics.preemptions > 0) == ("runner.num_blocks" in settings)
    assert statistics.compilations == 0
    assert expected[0] == tuple(Generator(untrained())(texts[0], max_tokens=16))


@pytest.mark.slow
def test_trained_depths_draft_far_better_than_chance_and_save_steps():
    texts = [row[:9].tolist() for row in make_texts(np.random.default_rng(2), 8)]
    expected, plain = generate(trained(), texts)
    drafted, statistics = generate(trained(), texts, **DRAFTER)
    assert drafted == expected
    assert statistics.acceptance_rate > 0.6  # chance is 1/8
    assert statistics.steps < 0.7 * plain.steps
    _, untaught = generate(untrained(), texts, **DRAFTER)
    assert untaught.acceptance_rate < 0.3


def first_drafts(built, texts, length=64):
    """The most likely token after the next one of each text, computed by the program that trains."""
    graph, state = nnx.split(built)

    @jax.jit
    def compute(state, tokens):
        model, batch = nnx.merge(graph, state), {"tokens": tokens, "targets": tokens}
        x, _, _ = next(iter(model.predictions(model.hidden_states(batch)[0], batch)))
        return jnp.argmax(model.logits(x), axis=-1)

    rows = np.asarray([[*text, *[0] * (length - len(text))] for text in texts], np.int32)
    drafts = np.asarray(compute(state, rows))
    return [int(drafts[i, len(text) - 2]) for i, text in enumerate(texts)]  # the last position has no later token


@pytest.mark.slow
def test_the_first_draft_is_that_of_the_whole_text(monkeypatch):
    """After prompts in several chunks, single tokens, accepted drafts and rejected ones."""
    calls = []
    original = ModelDrafter.draft

    def draft(self, state, most):
        calls.append((tuple(state.tokens), state.drafts))
        return original(self, state, most)

    monkeypatch.setattr(ModelDrafter, "draft", draft)
    built = trained()
    texts = [*prompts(3, seed=5), *(row[:12].tolist() for row in make_texts(np.random.default_rng(3), 2))]
    _, statistics = generate(built, texts, prefix_cache=False, **DRAFTER)
    assert 0 < statistics.accepted_tokens < statistics.drafted_tokens
    steps = [(text, drafts[0]) for text, drafts in calls if drafts]
    assert len(steps) > 20
    assert [drafted for _, drafted in steps] == first_drafts(built, [text for text, _ in steps])


def test_a_model_without_depths_is_refused_with_the_feature_in_the_fix():
    built = toy_models.small("quickstart").model.build(rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match=r"cannot draft tokens[\s\S]*fix: .*multi-token-prediction"):
        serve(built, set={**SIZES, **DRAFTER})


def test_decoding_forms_leave_the_depths_out():
    def paths(**options):
        """Paths of the parameters of the model with separate layers."""
        separate = nnx.eval_shape(lambda: config().model.build(rngs=nnx.Rngs(0)).unstacked(**options))
        return {".".join(map(str, k)) for k, _ in nnx.to_flat_state(nnx.state(separate, nnx.Param))}

    assert not any(path.startswith("mtp.") for path in paths())
    assert {path.split(".")[1] for path in paths(heads=True) if path.startswith("mtp.")} == {"0", "1"}
