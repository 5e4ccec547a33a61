"""The server with the real engine and a trained model: mixed traffic, and log-probabilities of the model."""

import asyncio
import random

import httpx
import pytest

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import open_engine
from axlearn_plugins_serving.server.logprobs import spell
from support.bad_requests import BAD
from support.server_thread import serving

SIZES = {"runner.max_rows": 4, "runner.max_context": 128, "max_waiting": 400}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    settings = {
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_dim": 32,
        "input.sequence_length": 32,
        "input.batch_size": 8,
        "evaluators": {},
    }
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    ax.train("quickstart", run_dir=directory, steps=3, set=settings)
    return lambda: open_engine(directory, config=patch(ServingEngine.Config(), SIZES))


async def traffic(url, count):
    draw = random.Random(3)
    turns = asyncio.Semaphore(24)
    small = [bad for bad in BAD if len(bad.content) < 20_000 and "257" not in bad.says and "tiny" not in bad.says]
    small = [bad for bad in small if "context" not in bad.says and bad.name != "prompt-and-output-too-long"]
    answers = {}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def one(number):
            kind = draw.random()
            async with turns:
                if kind < 0.1:
                    wrong = small[number % len(small)]
                    reply = await client.post(wrong.path, content=wrong.content, headers={"content-type": wrong.kind})
                    assert reply.status_code == wrong.status, (wrong.name, reply.text)
                elif kind < 0.2:
                    body = {"prompt": f"leave {number}", "max_tokens": 60, "stream": True}
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        await anext(response.aiter_lines())
                else:
                    body = {"prompt": f"def f{number % 40}(", "max_tokens": 12, "seed": 7}
                    reply = await client.post("/v1/completions", json=body)
                    assert reply.status_code == 200, reply.text
                    text = reply.json()["choices"][0]["text"]
                    assert (
                        answers.setdefault(number % 40, text) == text
                    )  # the same seed gives the same text in any batch

        await asyncio.gather(*(one(number) for number in range(count)))


@pytest.mark.slow
def test_mixed_traffic_leaves_the_pool_whole(opened):
    model = opened()
    with serving(model.engine, tokenizer=model.tokenizer) as server:
        asyncio.run(traffic(server.url, 400))
        server.wait_until_idle(30)
        statistics = server.engine.statistics()
        assert (statistics.used_blocks, statistics.waiting, statistics.running) == (0, 0, 0)
        assert statistics.compilations == 0


@pytest.mark.slow
def test_prompts_are_scored_as_they_are_generated(opened):
    import openai  # takes half a second, so not while tests are collected

    model = opened()
    with (
        serving(model.engine, tokenizer=model.tokenizer) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        options = {"model": "tiny", "temperature": 0, "logprobs": 3}
        written = client.completions.create(prompt="import os\n", max_tokens=10, **options)
        tokens = httpx.post(server.url + "/tokenize", json={"prompt": "import os\n"}).json()["tokens"]
        grammars = server.service.grammars
        token_of = {spell(grammars, token): token for token in range(server.service.tokenizer.vocab_size)}
        ids = [token_of[text] for text in written.choices[0].logprobs.tokens]
        scored = client.completions.create(prompt=[*tokens, *ids], max_tokens=0, echo=True, **options)
        assert scored.choices[0].logprobs.token_logprobs[len(tokens) :] == pytest.approx(
            written.choices[0].logprobs.token_logprobs, abs=1e-4
        )
        top = scored.choices[0].logprobs.top_logprobs[-1]
        assert max(top.values()) == pytest.approx(scored.choices[0].logprobs.token_logprobs[-1])


@pytest.mark.slow
def test_a_grammar_that_exceeds_its_limits_late_is_a_wrong_request(opened):
    model = opened()
    grammar = 'start: a\na: a a | "x" | a a a | ""'
    body = {"prompt": "a", "structured_outputs": {"grammar": grammar}, "min_tokens": 100, "max_tokens": 110}
    with serving(model.engine, tokenizer=model.tokenizer) as server:
        refused = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
        assert "simplify its grammar" in refused.json()["error"]["message"]
        streamed = httpx.post(server.url + "/v1/completions", json={**body, "stream": True}, timeout=60)
        assert "simplify its grammar" in streamed.text
        after = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60)
        assert after.status_code == 200
        server.wait_until_idle(30)
