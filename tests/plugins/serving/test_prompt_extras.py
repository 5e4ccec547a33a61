"""Prompts with other inputs than tokens: the engine gives the tokens of `generate`, and shares no blocks that differ."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import node, replace_config
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import serving_program
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.transformer import TransformerLayer
from support.extended_models import FEATURES, IMAGE, Captioner, Successor, extended
from support.image_models import COUNT, SIZES, alone, captioner, prompts_with_images, randomized, small_config


class ImageLayer(TransformerLayer):
    """A layer that reads the images itself."""

    @node
    class Config(TransformerLayer.Config):
        pass

    def __call__(self, x, context, cache=None):
        if "images" in context.extras:
            x = x + (context.extra("images") @ np.ones((FEATURES, 1), np.float32))[:, None]
        return super().__call__(x, context, cache)


def requests(cases, **sampling):
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_end": True, **sampling})
    return [
        Request(id=str(i), prompt=tuple(prompt), extras=extras, sampling=sampling)
        for i, (prompt, extras) in enumerate(cases)
    ]


def run(engine, cases, **sampling):
    return [future.result(600).sample.tokens for future in engine.submit_all(requests(cases, **sampling))]


def test_requests_get_the_tokens_that_generate_gives():
    cases = prompts_with_images(7, seed=1, without=2)
    with serve(captioner(), set=SIZES) as engine:
        tokens = run(engine, cases)
        assert engine.statistics().compilations == 0
    assert list(map(tuple, tokens)) == alone(captioner(), cases)
    assert any(prompt[-1] == IMAGE or len(prompt) > 16 for prompt, _ in cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"runner.layers": "stacked"},
        {"runner.mode": "parity"},
        {"runner.decode_steps": 4},
        {"prefix_cache": False},
    ],
)
def test_settings_of_the_engine_change_no_token(settings):
    cases = prompts_with_images(8, seed=2, without=1)
    with serve(captioner(), set={**SIZES, **settings}, warm_up=False) as engine:
        assert list(map(tuple, run(engine, cases))) == alone(captioner(), cases)


@pytest.mark.slow
def test_two_devices_read_embeddings_too():
    built, cases = captioner(), prompts_with_images(4, seed=9)
    program = serving_program(built.cfg, Mesh(), ServingEngine.Config(tensor_parallel=2))
    with serve(built, program=program, set={**SIZES, "tensor_parallel": 2}, warm_up=False) as engine:
        assert engine.engine.runner.program.layout.mesh.size == 2
        assert list(map(tuple, run(engine, cases))) == alone(built, cases)


@pytest.mark.slow
def test_preempted_requests_compute_their_embeddings_again():
    cases = [(prompt[:12], extras) for prompt, extras in prompts_with_images(6, seed=7)]
    cases = [([*prompt[:-1], IMAGE], extras) for prompt, extras in cases]
    with serve(captioner(), set={**SIZES, "runner.num_blocks": 18, "prefix_cache": False}, warm_up=False) as engine:
        tokens = run(engine, cases, max_tokens=24)
        assert engine.statistics().preemptions > 0
    assert [tuple(some[:COUNT]) for some in tokens] == alone(captioner(), cases)


@pytest.mark.slow
def test_layers_that_share_values_and_read_embeddings_of_their_own():
    built, cases = randomized(extended(small_config())), prompts_with_images(5, seed=3)
    with serve(built, set=SIZES, warm_up=False) as engine:
        assert list(map(tuple, run(engine, cases))) == alone(built, cases)


def test_requests_share_blocks_only_if_their_extras_are_equal():
    (prompt, extras), (_, other) = prompts_with_images(2, seed=4)
    prompt = [*([IMAGE] * 4), *range(3, 20)]
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        first = run(engine, [(prompt, extras)])
        assert engine.statistics().cached_prompt_tokens == 0
        assert run(engine, [(prompt, other)]) != first
        assert run(engine, [(prompt, {})]) != first
        assert engine.statistics().cached_prompt_tokens == 0
        assert run(engine, [(prompt, {"images": extras["images"].copy()})]) == first
        assert engine.statistics().cached_prompt_tokens == len(prompt) - 1


def test_new_weights_compute_the_embeddings_of_the_rest_of_a_prompt():
    other = randomized(captioner().cfg, seed=1)
    ((prompt, extras),) = [([IMAGE] * 30, {"images": np.ones((1, FEATURES), np.float32)})]
    with serve(captioner(), set=SIZES, warm_up=False) as local:
        engine = local.engine
        engine.add(requests([(prompt, extras)], prompt_logprobs=0, logprobs=0)[0])
        engine.step()
        before = engine.runner.embed_prompt(prompt, extras)
        local.update_weights(other)
        rows = []
        submit = engine.runner.submit
        engine.runner.submit = lambda some, steps=1: (rows.extend(some), submit(some, steps))[1]
        while engine.busy():
            engine.step()
        after = engine.runner.embed_prompt(prompt, extras)
        chunks = [row for row in rows if row.embeddings is not None]
        assert chunks
        for row in chunks:
            np.testing.assert_array_equal(row.embeddings, after[row.start : row.start + len(row.tokens)])
            assert not np.array_equal(row.embeddings, before[row.start : row.start + len(row.tokens)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extras": {"image": np.ones((1, FEATURES))}}, r"does not read extras\['image'\]"),
        ({"extras": {"images": np.ones((1, FEATURES), "U3")}}, r"extras\['images'\] is not an array of numbers"),
        ({"extras": {"images": np.full((1, FEATURES), 2**40)}}, "numbers that do not fit into int32"),
        ({"extras": {"images": np.ones(FEATURES)}}, r"must have one row\n *got: shape \[3\]"),
        ({"extras": {"images": np.ones((1, 5))}}, r"cannot read .* got: images float32 \[1, 5\]"),
        ({"adapter": "a"}, "with extras cannot use an adapter"),
        ({"embeds": True}, "with extras cannot use embeds"),
    ],
)
def test_requests_that_are_refused(change, message):
    request = {"id": "a", "prompt": (IMAGE, 3), "extras": {"images": np.ones((1, FEATURES))}, **change}
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        engine.engine.adapters = ("a",)
        with pytest.raises(RequestError, match=f"(?s){message}"):
            engine.submit(Request(**request))


def test_an_engine_without_extras_refuses_them():
    with (
        serve(captioner(), set={**SIZES, "runner.extras": False}, warm_up=False) as engine,
        pytest.raises(
            RequestError, match=r"reads only tokens\n *got: extras images\n *fix: set serving.runner.extras=true"
        ),
    ):
        engine.submit(requests(prompts_with_images(1, seed=5))[0])


@pytest.mark.parametrize(
    ("size", "message"),
    [(FEATURES, r"layers of the model read extras\['images'\]"), (5, "the model cannot read these extras: ")],
)
def test_a_model_whose_layers_read_the_extras_refuses_them(size, message):
    config = replace_config(captioner().cfg, TransformerLayer, ImageLayer.Config())
    config = replace_config(config, Captioner, CausalLM.Config())
    with serve(config.build(rngs=nnx.Rngs(0)), set=SIZES, warm_up=False) as engine:
        request = requests([((3, 4), {"images": np.ones((1, size), np.float32)})])[0]
        for _ in range(2):  # the second refusal is remembered
            with pytest.raises(RequestError, match=message):
                engine.submit(request)


class Prepending(Captioner):
    """A captioner that puts the image before the tokens."""

    @node
    class Config(Captioner.Config):
        pass

    def embed(self, inputs):
        x = CausalLM.embed(self, inputs)
        if "images" not in inputs:
            return x
        return jnp.concatenate([self.projector(inputs["images"])[:, None], x], axis=1)


class Demanding(Captioner):
    """A captioner that cannot embed tokens without an image."""

    @node
    class Config(Captioner.Config):
        pass

    def embed(self, inputs):
        return CausalLM.embed(self, inputs) + self.projector(inputs["images"])[:, None]


def test_a_model_that_returns_other_embeddings_refuses_extras():
    built = replace_config(captioner().cfg, Captioner, Prepending.Config()).build(rngs=nnx.Rngs(0))
    with (
        serve(built, set=SIZES, warm_up=False) as engine,
        pytest.raises(RequestError, match=r"got: float32 \[1, 17, \d+\]"),
    ):
        engine.submit(requests([((3, 4), {"images": np.ones((1, FEATURES), np.float32)})])[0])


def test_a_model_that_needs_extras_in_every_step_cannot_be_served():
    built = replace_config(captioner().cfg, Captioner, Demanding.Config()).build(rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match="its `embed` fails without extras: KeyError: 'images'"):
        serve(built, set=SIZES, warm_up=False)


def test_a_prompt_that_cannot_be_embedded_ends_alone(monkeypatch):
    (wrong, right) = prompts_with_images(2, seed=10)
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        embed = engine.engine.runner.embed_prompt

        def fail_for_one(prompt, extras):
            if tuple(prompt) == tuple(wrong[0]):
                raise MemoryError("no room")
            return embed(prompt, extras)

        monkeypatch.setattr(engine.engine.runner, "embed_prompt", fail_for_one)
        futures = engine.submit_all(requests([wrong, right]))
        with pytest.raises(RequestError, match="cannot be computed: MemoryError: no room"):
            futures[0].result(600)
        assert tuple(futures[1].result(600).sample.tokens) == alone(captioner(), [right])[0]


def test_samples_of_a_prompt_share_its_embeddings(monkeypatch):
    ((prompt, extras),) = prompts_with_images(1, seed=11)
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        calls, embed = [], engine.engine.runner.embed_prompt
        monkeypatch.setattr(engine.engine.runner, "embed_prompt", lambda *args: (calls.append(args), embed(*args))[1])
        engine.generate([prompt], extras=[extras], n=4, max_tokens=2)
    assert len(calls) == 1


def test_an_array_that_changes_later_is_not_used():
    ((prompt, extras),) = prompts_with_images(1, seed=12)
    expected = alone(captioner(), [(prompt, extras)])
    images = extras["images"].copy()
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        (future,) = engine.submit_all(requests([(prompt, {"images": images})]))
        images[:] = 0
        assert [tuple(future.result(600).sample.tokens)] == expected


def test_shapes_that_an_engine_compiles_are_limited(monkeypatch):
    monkeypatch.setattr("axlearn_plugins_serving.runner.MAX_SHAPES", 1)
    extras = {"images": np.ones((1, FEATURES), np.float32)}
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        engine.engine.check(requests([((3,) * 10, extras)])[0])
        engine.engine.check(requests([((3,) * 16, extras)])[0])  # the same shape
        with pytest.raises(RequestError, match="has compiled 1 shapes of prompts with extras"):
            engine.engine.check(requests([((3,) * 17, extras)])[0])


def test_refused_shapes_do_not_fill_memory(monkeypatch):
    monkeypatch.setattr("axlearn_plugins_serving.runner.MAX_SHAPES", 1)
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        engine.engine.check(requests([((3,) * 10, {"images": np.ones((1, FEATURES), np.float32)})])[0])
        for count in range(2, 14):
            with pytest.raises(RequestError, match="has compiled 1 shapes"):
                engine.engine.check(requests([((3,) * 10, {"images": np.ones((1, count, FEATURES), np.float32)})])[0])
        assert len(engine.engine.runner._checked_extras) <= 6
        engine.engine.check(requests([((3,) * 10, {"images": np.ones((1, FEATURES), np.float32)})])[0])


def test_a_model_with_other_hidden_states_takes_no_extras():
    built = replace_config(captioner().cfg, Captioner, Successor.Config()).build(rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match=r"a Successor cannot be served with extras.*\n *got: .*extras=true"):
        serve(built, set=SIZES)


def test_generate_takes_the_extras_of_each_prompt():
    cases = prompts_with_images(2, seed=8)
    prompts, extras = [prompt for prompt, _ in cases], [extras for _, extras in cases]
    with serve(captioner(), set=SIZES, warm_up=False) as engine:
        generations = engine.generate(prompts, extras=extras, temperature=0, max_tokens=COUNT)
        with pytest.raises(RequestError, match=r"extras has 1 entries\n *expected: 2, one for each prompt"):
            engine.generate(prompts, extras=extras[:1])
    assert [tuple(generation.tokens) for generation in generations] == alone(captioner(), cases)
