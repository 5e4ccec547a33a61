"""Thousands of requests, a tenth of them invalid, and requests generated from the OpenAPI document."""

import asyncio
import gc
import json
import random

import httpx
import pytest

from axlearn_plugins_serving.server.limits import ServerLimits
from axlearn_plugins_serving.server.openapi import document
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.agent_clients import TRAFFIC, script
from support.fake_engine import FakeEngine, next_token
from support.scripted_models import hermes_template
from support.server_clients import SMALL, leaving, resident, unfinished
from support.server_thread import serving


def expected(prompt, count):
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(next_token(tokens, 257))
    return ByteTokenizer.Config().build().decode(tokens[-count:])


async def good(client, number):
    prompt, count = f"prompt {number}", 1 + number % 40
    response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": count})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == expected(prompt, count)


async def good_stream(client, number):
    prompt, count, text = f"stream {number}", 1 + number % 40, ""
    body = {"prompt": prompt, "max_tokens": count, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == expected(prompt, count)


async def bad(client, number):
    wrong = SMALL[number % len(SMALL)]
    refused = await client.post(wrong.path, content=wrong.content, headers={"content-type": wrong.kind})
    assert refused.status_code == wrong.status, (wrong.name, refused.text)
    assert refused.json()["error"]["message"]


ALL_CLIENTS = ((good, 45), (good_stream, 40), (bad, 10), (leaving, 4), (unfinished, 1))


async def send_all(url, count, seed, clients=ALL_CLIENTS):
    draw = random.Random(seed)
    kinds, weights = zip(*clients, strict=True)
    limits = httpx.Limits(max_connections=50)
    turns = asyncio.Semaphore(50)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120, trust_env=False) as client:

        async def one(number):
            kind = draw.choices(kinds, weights)[0]
            async with turns:
                await kind(client, number)

        await asyncio.gather(*(one(number) for number in range(count)))


@pytest.mark.slow
def test_thousands_of_requests_of_which_a_tenth_is_wrong():
    engine = FakeEngine(max_context=256, blocks=300, max_running=32)
    with serving(engine, limits=ServerLimits(body_seconds=5)) as server:
        asyncio.run(send_all(server.url, 1000, 0))
        gc.collect()
        before = resident()
        asyncio.run(send_all(server.url, 4000, 1))
        server.wait_until_idle()
        gc.collect()
        assert engine.free == engine.blocks
        assert not server.service.thread._receivers
        statuses = {
            int(sample.labels["status"])
            for metric in server.service.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "axlearn_responses_total"
        }
        assert statuses <= {200, 400, 404, 413, 415, 499}
        assert resident() - before < 60, "the memory grows with the requests"


@pytest.mark.slow
def test_conversations_of_agents_leave_nothing_behind(tmp_path):
    engine = FakeEngine(max_context=4096, blocks=3000, max_running=32, script=script)
    with serving(engine, template=hermes_template(tmp_path)) as server:
        asyncio.run(send_all(server.url, 300, 0, TRAFFIC))
        gc.collect()
        before = resident()
        asyncio.run(send_all(server.url, 1500, 1, TRAFFIC))
        server.wait_until_idle()
        gc.collect()
        assert engine.free == engine.blocks
        assert not server.service.thread._receivers
        assert resident() - before < 60, "the memory grows with the requests"


OPERATIONS = sorted((path, method) for path, methods in document()["paths"].items() for method in methods)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of schemathesis and its dependencies
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=[f"{m}-{p}" for p, m in OPERATIONS])
def test_requests_that_the_document_makes_up(path, method):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as openapi_checks

    with serving(FakeEngine(max_context=256, script=list(b"hello"))) as server:
        schema = schemathesis.openapi.from_dict(document())
        schema.config.update(base_url=server.url)
        operation = schema[path][method.upper()]

        def call(case):
            case.call_and_validate(
                checks=[
                    checks.not_a_server_error,
                    openapi_checks.status_code_conformance,
                    openapi_checks.content_type_conformance,
                    openapi_checks.response_schema_conformance,
                    openapi_checks.negative_data_rejection,
                ]
            )

        wrong = (
            [schemathesis.GenerationMode.NEGATIVE] if "requestBody" in document()["paths"][path][method] else []
        )  # other operations have no invalid input
        for mode in (schemathesis.GenerationMode.POSITIVE, *wrong):
            strategy = operation.as_strategy(generation_mode=mode)
            options = settings(
                max_examples=100,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            options(given(case=strategy)(call))()
        server.wait_until_idle()
        assert server.engine.free == server.engine.blocks
