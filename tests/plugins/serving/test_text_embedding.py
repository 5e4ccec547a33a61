"""Embeddings: pooled hidden states of a plain forward pass, whatever else the engine computes."""

import base64

import httpx
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import build_engine
from axlearn_plugins_serving.text_embedding import EmbedBucket, embed_buckets, pack_texts
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support import serving_models
from support.engine_runs import engine as fake_engine
from support.engine_runs import run
from support.paths import HF_FIXTURES
from support.server_thread import serving

SIZES = {
    "runner.block_size": 4, "runner.max_context": 64, "runner.max_rows": 2, "runner.max_step_tokens": 64, "runner.chunk": 8,
    "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip


def engine(model, pooling, warm_up=False, **settings):
    config = patch(ServingEngine.Config(), {**SIZES, "runner.pooling": pooling, **settings})
    return build_engine(model, config=config, warm_up=warm_up)


@nnx.jit
def hidden_states(model, tokens):
    return model.hidden_states({"tokens": tokens}, Context())[0]


def forward(model, prompt):
    """Return the hidden states of a plain forward pass, [S, D]. The model is causal, so tokens after the prompt change nothing."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(prompt)] = prompt
    return np.asarray(hidden_states(model, tokens)[0, : len(prompt)], np.float32)


POOLED = {"mean": lambda x: x.mean(axis=0), "last": lambda x: x[-1], "cls": lambda x: x[0]}


def texts(count, vocab=64):
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 3, 20, 31, 32, 33, 50, 64], count)
    return [tuple(rng.integers(0, vocab, n).tolist()) for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLED)
def test_embeddings_are_those_of_a_forward_pass_during_generation(pooling):
    model = serving_models.model()
    one = engine(model, pooling, warm_up=True)
    prompts = texts(24)
    some = [Request(id=f"e{i}", prompt=p, embeds=True) for i, p in enumerate(prompts)]
    sampling = Sampling(temperature=0.0, max_tokens=12)
    others = [Request(id=f"g{i}", prompt=p[:40], sampling=sampling) for i, p in enumerate(prompts[:6])]
    outputs = run(one, [r for pair in zip(some, others * 4, strict=True) for r in pair if r not in others] + others)
    for i, prompt in enumerate(prompts):
        (output,) = outputs[f"e{i}"]
        np.testing.assert_allclose(output.embedding, POOLED[pooling](forward(model, prompt)), atol=2e-5)
    alone = engine(model, None)
    assert {r.id: [t for o in outputs[r.id] for t in o.tokens] for r in others} == {
        id: [t for o in result for t in o.tokens] for id, result in run(alone, others).items()
    }
    assert (one.statistics().compilations, one.statistics().used_blocks) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_embeddings_are_the_hidden_states_of_transformers(name):
    import torch
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(HF_FIXTURES / name, dtype=torch.float32).eval()
    prompts = texts(4, reference.config.vocab_size)
    one = engine(serving_models.family(name), "mean")
    outputs = run(one, [Request(id=str(i), prompt=p, embeds=True) for i, p in enumerate(prompts)], check=False)
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            hidden = reference(torch.tensor([prompt])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(outputs[str(i)][0].embedding, hidden.mean(axis=0), atol=1e-4, rtol=1e-4)


def test_batches_have_the_smallest_shape_that_fits():
    buckets = embed_buckets(100, 128)
    assert [(b.rows, b.length) for b in buckets] == [(1, 32), (4, 32), (1, 64), (2, 64), (1, 100)]
    assert pack_texts(buckets, [[1] * 32], [0])[0] == EmbedBucket(1, 32)
    bucket, tokens, lengths, adapters = pack_texts(buckets, [[1, 2], [3]], [0, 2])
    assert bucket == EmbedBucket(4, 32)
    assert tokens[:2, :3].tolist() == [[1, 2, 0], [3, 0, 0]]
    assert (lengths.tolist(), adapters.tolist()) == ([2, 1, 0, 0], [0, 2, 0, 0])


def test_aborted_texts_are_returned_to_nobody():
    one = engine(serving_models.model(), "last")
    for id in "abc":
        one.add(Request(id=id, prompt=(1, 2), embeds=True))
    with pytest.raises(RequestError, match="'a' is not finished"):
        one.add(Request(id="a", prompt=(1,), embeds=True))
    one.abort("a")
    assert one.step() == []
    one.abort("b")
    assert [output.id for output in one.step()] == ["c"]
    assert not one.busy()


def test_an_engine_without_embeddings_says_what_to_set():
    with pytest.raises(RequestError, match=r"no embeddings\n *fix: set serving.runner.pooling"):
        fake_engine().add(Request(id="a", prompt=(1,), embeds=True))


@pytest.fixture(scope="module")
def server():
    model = serving_models.config()
    model = patch(model, {"vocab_size": 257}).build(rngs=serving_models.nnx.Rngs(0))
    with serving(engine(model, "mean"), tokenizer=ByteTokenizer.Config().build()) as server:
        server.model = model
        yield server


def post(server, **body):
    return httpx.post(server.url + "/v1/embeddings", json=body, timeout=60)


def test_the_server_returns_unit_vectors_in_the_format_of_openai(server):
    import openai  # takes half a second, so not while tests are collected

    want = forward(server.model, list(b"abc")).mean(axis=0)
    want /= np.linalg.norm(want)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client:  # asks for base64
        result = client.embeddings.create(model="tiny", input=["abc", "a longer text than that"])
        assert [d.index for d in result.data] == [0, 1]
        np.testing.assert_allclose(result.data[0].embedding, want, atol=1e-5)
        assert result.usage.prompt_tokens == result.usage.total_tokens == 3 + 23
    for body in ({"input": "abc"}, {"input": [97, 98, 99]}, {"input": [[97, 98, 99]], "encoding_format": "base64"}):
        (data,) = post(server, **body).json()["data"]
        value = data["embedding"]
        value = np.frombuffer(base64.b64decode(value), "<f4") if isinstance(value, str) else value
        np.testing.assert_allclose(value, want, atol=1e-5)
    (data,) = post(server, input="abc", dimensions=8).json()["data"]
    np.testing.assert_allclose(data["embedding"], want[:8] / np.linalg.norm(want[:8]), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "is required"),
        ({"input": []}, 400, "input"),
        ({"input": 3}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": [300]}, 400, "token 300 is not below 257"),
        ({"input": "a" * 65}, 400, "the context has 64 tokens, but the prompt has 65"),
        ({"input": "a", "dimensions": 65}, 400, "65 is more than 64, the width of the model"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "unknown model"),
        ({"input": "a", "stream": True}, 400, "unknown field"),
    ],
)
def test_bad_requests(server, body, status, message):
    response = post(server, **body)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] in {"input", *body}
