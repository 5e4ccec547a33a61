"""Streams that have nothing to send for some time."""

import json

import httpx
import pytest

from axlearn_plugins_serving.server.limits import ServerLimits
from support.fake_engine import FakeEngine
from support.server_thread import serving


class SlowEngine(FakeEngine):
    """An engine whose first step takes half a second."""

    def step(self):
        self.delay = 0.0 if self.steps else 0.5
        return super().step()


@pytest.fixture
def slow():
    engine = SlowEngine(script=list(b"Hello"), max_context=64)
    with serving(engine, limits=ServerLimits(keep_alive_seconds=0.1)) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_stream_that_waits_sends_comments(slow, path):
    content = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    content = {"input": "Hi"} if path == "/v1/responses" else content
    text = httpx.post(slow.url + path, json=content | {"stream": True}).text
    blocks = [block for block in text.split("\n\n") if block]
    comments = [i for i, block in enumerate(blocks) if block.startswith(":")]
    assert {blocks[i] for i in comments} == {": keep-alive"}
    assert 2 <= len(comments) <= 6
    assert comments == list(range(comments[0], comments[0] + len(comments)))  # only while nothing else is sent
    events = [block.split("data: ")[1] for block in blocks if not block.startswith(":")]
    assert all(event == "[DONE]" or json.loads(event) for event in events)


def test_the_official_client_ignores_comments(slow):
    import openai

    with openai.OpenAI(base_url=slow.url + "/v1", api_key="any", max_retries=0) as client:
        chunks = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"


def test_a_stream_that_never_waits_sends_no_comment():
    with serving(FakeEngine(script=list(b"Hello"))) as server:
        text = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "stream": True}).text
    assert ": keep-alive" not in text
