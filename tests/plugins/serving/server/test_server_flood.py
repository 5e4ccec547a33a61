"""Load on a server with a real engine: a tenth of the requests are invalid, or there are too many.

`AXLEARN_FLOOD=10000` sets the number of requests; the default is 1,000.
"""

import asyncio
import gc
import json
import os
import random
import statistics
import time

import httpx
import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.local_engine import LocalEngine
from axlearn_plugins_serving.open_engine import build_engine
from axlearn_plugins_serving.server.limits import ServerLimits
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.server_clients import SMALL, leaving, resident, unfinished
from support.server_thread import serving
from support.serving_models import config as model_config

SIZES = {
    "runner.max_rows": 16, "runner.max_context": 256, "runner.num_blocks": 96, "runner.row_buckets": (),
    "runner.chunk_buckets": (), "runner.max_step_tokens": 128, "runner.mode": "parity", "max_waiting": 64,
}  # fmt: skip
TEXT = TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
COUNT = int(os.environ.get("AXLEARN_FLOOD", "1000"))
COMMON = "what all of these prompts begin with, so that they share a block of the cache. "


@pytest.fixture(scope="module")
def model():
    return patch(model_config(), {"vocab_size": 257}).build(rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def engine_of(model):
    config = patch(ServingEngine.Config(), SIZES)
    return lambda: build_engine(model, text=TEXT, config=config)


@pytest.fixture(scope="module")
def bodies(engine_of):
    """Return requests with the text that each gets alone."""
    draw = random.Random(1)
    result = []
    with LocalEngine(engine_of(), TEXT) as engine:
        for number in range(48):
            prompt = (COMMON if number % 3 else "") + f"prompt {draw.randrange(10**6)}" * draw.randint(1, 3)
            options = {"max_tokens": draw.randint(1, 40), "seed": number, "temperature": 0.0 if number % 2 else 0.9}
            tokens = TEXT.tokenizer.encode(prompt)
            (alone,) = engine.generate([tokens], **options)
            result.append(({"prompt": tokens, **options}, TEXT.tokenizer.decode(list(alone.tokens))))
    return result


async def answered(client, body, text, stream, statuses):
    """Send a request, and retry it if the queue is full."""
    while True:
        if not stream:
            response = await client.post("/v1/completions", json=body)
            status, got = (
                response.status_code,
                response.json()["choices"][0]["text"] if response.status_code == 200 else "",
            )
        else:
            got = ""
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                status = response.status_code
                async for line in response.aiter_lines():
                    got += json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""
        statuses[status] = statuses.get(status, 0) + 1
        if status != 429:
            assert (status, got) == (200, text)
            return
        assert int(response.headers["retry-after"]) >= 1
        await asyncio.sleep(0.05)


async def slow_reader(client, number):
    """Open a stream and read nothing for a while."""
    body = {"prompt": f"slow {number}", "max_tokens": 100, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        await asyncio.sleep(0.2)
        await response.aclose()


async def refused(client, number):
    wrong = SMALL[number % len(SMALL)]
    response = await client.post(wrong.path, content=wrong.content, headers={"content-type": wrong.kind})
    assert response.status_code in (wrong.status, 429), (wrong.name, response.text)
    assert response.json()["error"]["message"]


async def flood(url, bodies, count, seed):
    draw, statuses, turns = random.Random(seed), {}, asyncio.Semaphore(48)
    limits = httpx.Limits(max_connections=48)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300, trust_env=False) as client:

        async def one(number):
            kind = draw.choices(("good", "stream", refused, leaving, unfinished, slow_reader), (46, 40, 10, 2, 1, 1))[0]
            async with turns:
                if isinstance(kind, str):
                    await answered(client, *bodies[number % len(bodies)], kind == "stream", statuses)
                else:
                    await kind(client, number)

        await asyncio.gather(*(one(number) for number in range(count)))
    return statuses


@pytest.mark.slow
def test_many_requests_of_which_a_tenth_is_wrong(engine_of, bodies):
    engine = engine_of()
    with serving(engine, limits=ServerLimits(body_seconds=5)) as server:
        asyncio.run(flood(server.url, bodies, COUNT // 10, 0))
        server.wait_until_idle(60)
        gc.collect()
        before = resident()
        began = time.monotonic()
        asyncio.run(flood(server.url, bodies, COUNT, 1))
        print(f"{COUNT} requests in {time.monotonic() - began:.0f} s, memory {before:.0f} -> {resident():.0f} MiB")
        server.wait_until_idle(60)
        gc.collect()
        counters = engine.statistics()
        assert counters.used_blocks == counters.running == counters.waiting == counters.compilations == 0
        engine.cache.pool.check([])
        assert not server.service.thread._receivers
        counts = {
            int(sample.labels["status"]): sample.value
            for metric in server.service.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "axlearn_responses_total"
        }
        assert counts.keys() <= {200, 400, 404, 413, 415, 429, 499}
        assert resident() - before < 60, "the memory grows with the requests"


@pytest.mark.slow
def test_twice_as_many_requests_as_it_has_room_for(engine_of, bodies):
    """The queue is bounded, rejected clients are told when to retry, and accepted ones do not wait longer."""
    engine, waited, queued = engine_of(), {}, []

    async def client(http, number, clients, admitted):
        for turn in range(6):
            body, text = bodies[(number * 7 + turn) % len(bodies)]
            while True:
                began = time.monotonic()
                response = await http.post("/v1/completions", json=body)
                if response.status_code == 200:
                    break
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "queue_full"
                admitted["refused"] += 1
                await asyncio.sleep(0.1)
            assert response.json()["choices"][0]["text"] == text
            waited.setdefault(clients, []).append(time.monotonic() - began)

    async def load(url, clients):
        admitted = {"refused": 0}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) as http:
            tasks = [asyncio.ensure_future(client(http, n, clients, admitted)) for n in range(clients)]
            while not all(task.done() for task in tasks):
                queued.append((await http.get("/stats")).json()["waiting"])
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)
        return admitted["refused"]

    room = SIZES["runner.max_rows"] + SIZES["max_waiting"]
    with serving(engine) as server:
        few, many = (asyncio.run(load(server.url, n)) for n in (room, 2 * room))
        server.wait_until_idle(60)
        engine.cache.pool.check([])
    half, twice = (statistics.median(waited[n]) for n in (room, 2 * room))
    print(f"{room} clients: p50 {half:.2f} s, {few} refused; {2 * room}: p50 {twice:.2f} s, {many} refused")
    assert many > 0
    assert max(queued) <= SIZES["max_waiting"]
