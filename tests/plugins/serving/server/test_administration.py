"""Sleep and wake-up over HTTP: memory is freed, requests meanwhile get a 503, and the same tokens come afterwards."""

import threading
import time

import httpx
import jax
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_weights import model_weights
from axlearn_plugins_serving.open_engine import build_engine, open_engine
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support import serving_models
from support.engine_runs import engine as fake_engine
from support.fake_engine import FakeEngine
from support.server_thread import serving

SIZES = {
    "runner.block_size": 4, "runner.max_context": 64, "runner.max_rows": 2, "runner.max_step_tokens": 16, "runner.chunk": 8,
    "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip


def open_small():
    config = patch(serving_models.config(), {"vocab_size": 257})
    functional = Functional.from_config(config)
    model = config.build(rngs=nnx.Rngs(0))
    source = lambda **_: model_weights(functional, model)  # noqa: E731
    config = patch(ServingEngine.Config(), SIZES)
    return build_engine(model, config=config, source=source)


@pytest.fixture(scope="module")
def server():
    with serving(open_small(), tokenizer=ByteTokenizer.Config().build(), allows_sleep=True) as server:
        yield server


def complete(server, prompt="abc", **body):
    return httpx.post(
        server.url + "/v1/completions",
        json={
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 20,
            "ignore_eos": True,
            "return_token_ids": True,
            **body,
        },
        timeout=60,
    )


def post(server, path):
    return httpx.post(server.url + path, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_the_same_tokens_come_after_sleep(server, level):
    want = complete(server).json()["choices"][0]["token_ids"]
    runner = server.engine.runner
    assert post(server, f"/sleep?level={level}").status_code == 200
    assert runner.cache is None
    assert httpx.get(server.url + "/is_sleeping").json() == {"is_sleeping": True}
    assert httpx.get(server.url + "/health").json() == {"status": "sleeping"}
    refused = complete(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert refused.headers["retry-after"] == "5"
    assert post(server, "/sleep").status_code == 503
    assert post(server, "/wake_up").status_code == 200
    assert httpx.get(server.url + "/is_sleeping").json() == {"is_sleeping": False}
    answer = complete(server).json()
    assert answer["choices"][0]["token_ids"] == want
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.engine.statistics().compilations == 0


def test_running_requests_finish_before_sleep(server):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(complete(server, max_tokens=55))) for _ in range(6)]
    for thread in threads:
        thread.start()
    while not server.engine.busy():
        time.sleep(0.001)
    assert post(server, "/sleep").status_code == 200
    for thread in threads:
        thread.join()
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 503}
    assert 200 in statuses
    assert all(len(a.json()["choices"][0]["token_ids"]) == 55 for a in answers if a.status_code == 200)
    assert post(server, "/wake_up").status_code == 200
    assert post(server, "/wake_up").status_code == 200  # it is awake already


@pytest.mark.parametrize("level", ["0", "3", "x"])
def test_unknown_levels_are_refused(server, level):
    response = post(server, f"/sleep?level={level}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "level")
    assert complete(server).status_code == 200


def test_other_sites_cannot_administer_the_server(server):
    response = httpx.post(server.url + "/sleep", headers={"origin": "http://example.com"})
    assert response.status_code == 403
    assert httpx.post(server.url + "/wake_up", headers={"origin": server.url}).status_code == 200


def test_administration_is_off_by_default_and_needs_an_engine_that_sleeps():
    with serving(FakeEngine()) as server:
        response = post(server, "/sleep")
        assert response.status_code == 404
        assert "--allow-sleep" in response.json()["error"]["message"]
    with serving(FakeEngine(), allows_sleep=True) as server:
        assert "FakeEngine cannot sleep" in post(server, "/sleep").json()["error"]["message"]


@pytest.mark.slow
def test_an_engine_sleeps_only_when_it_is_idle():
    one = open_small()
    one.add(Request(id="a", prompt=(1, 2), sampling=Sampling(max_tokens=1)))
    with pytest.raises(RequestError, match="requests are running"):
        one.sleep()
    one.abort("a")
    with pytest.raises(RequestError, match="the level is 3"):
        one.sleep(3)
    one.sleep()
    with pytest.raises(RequestError, match="the engine sleeps"):
        one.add(Request(id="a", prompt=(1, 2)))
    one.wake_up()
    one.update_weights(one.runner._source())
    with pytest.raises(RequestError, match="cannot be read again"):
        one.sleep(2)
    with pytest.raises(RequestError, match="a FakeRunner cannot free its memory"):
        fake_engine().sleep()


@pytest.mark.slow
def test_weights_of_a_run_are_read_again(tmp_path):
    settings = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "evaluators": {}}
    settings |= {"input.sequence_length": 32, "input.batch_size": 8}
    ax.train("quickstart", run_dir=tmp_path / "run", steps=2, set=settings)
    one = open_engine(tmp_path / "run", config=patch(ServingEngine.Config(), SIZES)).engine
    before = [np.asarray(x) for x in jax.tree.leaves(one.runner.weights.arrays)]
    one.sleep(2)
    assert not one.runner.weights.arrays
    one.wake_up()
    after = jax.tree.leaves(one.runner.weights.arrays)
    assert all((x == np.asarray(y)).all() for x, y in zip(before, after, strict=True))
    assert one.statistics().compilations == 0
