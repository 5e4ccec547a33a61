import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer import functions
from axlearn_plugins_transformer.generate import Generator, generate
from axlearn_plugins_transformer.norm import RMSNorm
from support import extended_models

VARIANTS = {
    "llama": {},
    "window": {"decoder.layer.attention.window": 5},
    "all heads": {"decoder.layer.attention.num_kv_heads": 4, "decoder.layer.attention.softcap": 2.0},
    "qk norm, no position": {
        "decoder.layer.attention.qk_norm": RMSNorm.Config(),
        "decoder.layer.attention.position": None,
    },
}


def greedy(model, prompt, count):
    """Generate without a cache. Causality hides the padding, because it follows all tokens that are read."""
    tokens = list(prompt)
    logits = jax.jit(model)
    for _ in range(count):
        row = jnp.asarray([tokens + [9] * (20 - len(tokens))])
        tokens.append(int(jnp.argmax(logits(row)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "edits",
    [pytest.param(v, id=k, marks=() if k == "all heads" else pytest.mark.slow) for k, v in VARIANTS.items()],
)
def test_logits_are_the_same_with_and_without_a_cache(tiny, build, run, batch, edits):
    model = build(tiny(edits), 0)
    tokens = batch["tokens"][:, :20]
    expected = run(model, tokens)
    for form in (model, model.unstacked()):
        cache = form.init_cache(2, 24)
        parts = []
        for start, end in ((0, 9), (9, 10), (10, 20)):
            logits, cache = run(form, tokens[:, start:end], cache=cache)
            parts.append(logits)
        np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=1e-4, atol=1e-5)
        assert cache.length == 20


@pytest.mark.slow
def test_rows_of_different_length_share_a_cache(tiny, build, run, batch):
    model = build(tiny(), 0).unstacked()
    tokens = batch["tokens"][:, :8]
    _, cache = run(model, tokens, cache=model.init_cache(2, 16))
    lengths = jnp.asarray([8, 5], jnp.int32)
    cache = type(cache)(cache.layers, lengths)  # the last three of the second row were padding
    logits, cache = run(model, jnp.asarray([[1], [2]]), cache=cache)
    for row, last in ((0, 1), (1, 2)):
        alone = jnp.concatenate([tokens[row, : lengths[row]], jnp.asarray([last])])[None]
        np.testing.assert_allclose(logits[row, 0], run(model, alone)[0, -1], rtol=1e-4, atol=1e-5)
    assert cache.length.tolist() == [9, 6]


def test_greedy_generation_is_the_argmax_of_the_whole_model(tiny, build):
    model = build(tiny(), 1)
    prompt = [5, 17, 3, 60]
    expected = greedy(model, prompt, 12)
    assert list(generate(model, prompt, 12)) == expected
    stop = expected[6]
    assert list(generate(model, prompt, 12, eos_id=stop)) == expected[: expected.index(stop)]
    assert list(generate(model, prompt, 0)) == []


@pytest.mark.slow
def test_seeds_temperature_and_top_k(tiny, build):
    generator = Generator(build(tiny(), 1))
    draw = lambda **kw: list(generator([1, 2, 3], max_tokens=10, **kw))  # noqa: E731
    cold = draw()
    assert draw(temperature=1.0, seed=4) == draw(temperature=1.0, seed=4)
    assert draw(temperature=1.0, seed=4) != draw(temperature=1.0, seed=5)
    assert draw(temperature=1e-6, seed=4) == cold
    assert draw(temperature=9.0, seed=4, top_k=1) == cold


@pytest.mark.slow
def test_sampling_draws_from_the_distribution():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    draws = [functions.Draw(jax.random.key(0), jnp.int32(i), jnp.float32(1.0)) for i in range(600)]
    draws_array = jax.vmap(lambda d: functions.pick(logits, d, 2))(jax.tree.map(lambda *x: jnp.stack(x), *draws))
    share = np.bincount(np.asarray(draws_array), minlength=4) / 600
    np.testing.assert_allclose(share, [0.625, 0.375, 0, 0], atol=0.06)


@pytest.mark.slow
def test_lengths_within_a_bucket_compile_once(tiny, build):
    generator = Generator(build(tiny({"vocab_size": 65}), 0))
    for length in range(1, 17, 3):
        assert len(list(generator([1] * length, max_tokens=4))) == 4
    again = Generator(build(tiny({"vocab_size": 65}), 3))  # other weights, same program
    list(again([2, 3], max_tokens=3))
    assert again.program is generator.program
    compiled = [key[0] for key in generator.program._compiled]
    assert sorted(compiled) == ["decode", "prefill", "unstack"]


@pytest.mark.slow_cases("prompt0-settings0-the prompt is empty")
@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([3, 64], {}, "the model has no token 64; its ids are 0 to 63"),
        ([3, 1.5], {}, "the model has no token 1.5"),
        ([1], {"extras": {"tokens": np.ones((1, 8))}}, r"extras\['tokens'\] is part of the prompt"),
        ([1], {"temperature": -1.0}, "got temperature=-1.0"),
        ([1], {"top_k": 0}, "top_k=0"),
    ],
)
def test_what_cannot_be_generated(tiny, build, prompt, settings, message):
    generator = Generator(build(tiny(), 0))
    with pytest.raises(RequestError, match=message):
        generator(prompt, max_tokens=2, **settings)


def test_a_cache_takes_no_packed_rows(tiny, build, batch):
    model, ids = build(tiny(), 0), jnp.ones((2, 48), jnp.int32)
    with pytest.raises(RequestError, match="leave out segment_ids"):
        jax.eval_shape(lambda: model(batch["tokens"], segment_ids=ids, cache=model.init_cache(2, 64)))


@pytest.mark.parametrize(("eos_id", "ends"), [(None, set()), (7, {5, 7}), ([7, 8], {5, 7, 8})])
def test_end_tokens_of_the_model_join_those_of_the_call(eos_id, ends, monkeypatch):
    monkeypatch.setattr(Generator, "__init__", lambda self: None)
    monkeypatch.setattr(Generator, "_tokens", lambda self, prompt, count, temperature, seed, ends, *_: ends)
    generator = Generator()
    generator.vocab_size, generator.end_tokens, generator.prefix = 10, frozenset({5}), 0
    assert generator([1], max_tokens=1, eos_id=eos_id) == ends


@pytest.mark.slow
def test_other_inputs_of_a_prompt_reach_the_model(tiny, build):
    model = build(extended_models.extended(tiny()))
    prompt, images = [5, 9, extended_models.IMAGE, 7], jnp.asarray([[0.5, -2.0, 1.0]])
    whole = jax.jit(lambda tokens: model.logits(model.hidden_states({"tokens": tokens, "images": images})[0]))
    expected = list(prompt)
    for _ in range(4):
        row = jnp.asarray([expected + [9] * (8 - len(expected))])
        expected.append(int(jnp.argmax(whole(row)[0, len(expected) - 1])))
    generator = Generator(model)
    assert list(generator(prompt, max_tokens=4, extras={"images": images})) == expected[4:]
    assert list(generator(prompt, max_tokens=4, extras={"images": -images})) != expected[4:]
    with pytest.raises(
        RequestError, match=r"extras\['images'\] must have one row\n *got: shape \[3\]\n *expected: \[1, \.\.\.\]"
    ):
        generator(prompt, max_tokens=1, extras={"images": images[0]})
    with pytest.raises(
        RequestError,
        match=r"does not read extras\['image'\]\n *got: image, images\n *expected: inputs .* such as images",
    ):
        generator(prompt, max_tokens=1, extras={"image": images, "images": images})
