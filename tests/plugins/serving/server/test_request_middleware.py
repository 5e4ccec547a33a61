"""Request ids, logs, the prefix of a proxy, and web pages of other origins."""

import io
import json
import logging
import re
import sys

import httpx
import pytest

from axlearn_plugins_serving.server.limits import ServerLimits, allowed_hosts
from axlearn_plugins_serving.server.server_log import write_logs
from support.fake_engine import FakeEngine
from support.server_thread import serving

PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def server():
    limits = ServerLimits(
        api_keys=("one", "two"), origins=(PAGE,), root_path="/llm", hosts=allowed_hosts("127.0.0.1", has_key=True)
    )
    with serving(FakeEngine(max_context=64), limits=limits) as server:
        yield server


def post(server, path="/v1/completions", *, body=None, key="two", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()} | {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body or {"prompt": "abc", "max_tokens": 2}, headers=headers)


@pytest.mark.parametrize("sent", ["a", "trace-7:b_c.D", "x" * 128])
def test_the_id_of_a_client_is_returned(server, sent):
    assert post(server, x_request_id=sent).headers["x-request-id"] == sent
    assert post(server, key="wrong", x_request_id=sent).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, 'a"b', "a/b", "é".encode().decode("latin1")])
def test_an_id_that_is_not_valid_is_replaced(server, sent):
    headers = [(b"x-request-id", sent.encode("latin1"))]
    answer = httpx.get(server.url + "/health", headers=headers).headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{24}", answer)


def test_every_answer_has_an_id_of_its_own(server):
    answers = [
        httpx.get(server.url + "/health"),
        httpx.get(server.url + "/nowhere"),
        httpx.put(server.url + "/tokenize"),
        post(server, body={"prompt": 7}),
        post(server, body={"prompt": "abc", "stream": True}),
    ]
    assert [answer.status_code for answer in answers[:4]] == [200, 401, 401, 400]
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)


def test_paths_with_parameters_are_counted_by_their_route(server):
    for path in ("/v1/responses/resp_1", "/llm/v1/responses/resp_2/input_items", "/v1/models/some/name", "/v1/nowhere"):
        assert httpx.get(server.url + path, headers={"authorization": "Bearer one"}).status_code == 404
    assert httpx.get(server.url + "/v1/responses/resp_3").status_code == 401  # rejected before it is routed
    counts = {}
    for metric in server.service.metrics.responses.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                counts[sample.labels["path"], sample.labels["status"]] = sample.value
    assert counts["/v1/responses/{id}", "404"] == counts["/v1/responses/{id}", "401"] == 1
    assert counts["/v1/responses/{id}/input_items", "404"] == counts["/v1/models/{name}", "404"] == 1
    assert counts["other", "404"] >= 1
    assert not any("resp_" in path for path, _ in counts)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_remove_its_prefix_or_not(server, prefix):
    assert post(server, f"{prefix}/v1/completions").status_code == 200
    assert httpx.get(f"{server.url}{prefix}/health").status_code == 200
    assert httpx.get(f"{server.url}{prefix}/").status_code == 200
    assert httpx.get(f"{server.url}{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_a_path_that_only_begins_like_the_prefix_is_unknown(server):
    assert post(server, "/llmx/v1/completions").status_code == 404


def test_each_key_is_accepted(server):
    answers = {key: post(server, key=key).status_code for key in ("one", "two", "onetwo", "one,two", "o")}
    assert answers == {"one": 200, "two": 200, "onetwo": 401, "one,two": 401, "o": 401}


def preflight(server, origin, method="POST"):
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization,content-type"}
    return httpx.options(server.url + "/v1/chat/completions", headers={"origin": origin, **asked})


def test_a_preflight_needs_no_key(server):
    allowed = preflight(server, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert preflight(server, PAGE, "PUT").status_code == 400
    refused = preflight(server, "https://evil.example")
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_a_page_reads_errors_and_ids(server):
    for key, status in (("one", 200), ("wrong", 401)):
        answer = post(server, key=key, origin=PAGE)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in post(server, origin="https://evil.example").headers


def test_unexpected_errors_have_an_id_and_an_origin(server, monkeypatch):
    def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr("axlearn_plugins_serving.server.endpoints._page", fail)
    answer = httpx.get(server.url + "/", headers={"origin": PAGE, "x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_by_default_no_page_of_another_origin_is_allowed():
    with serving(FakeEngine()) as server:
        assert preflight(server, PAGE).status_code == 405
        assert "access-control-allow-origin" not in httpx.get(server.url + "/health", headers={"origin": PAGE}).headers


def test_any_origin():
    with serving(FakeEngine(), limits=ServerLimits(origins=("*",))) as server:
        assert preflight(server, PAGE).headers["access-control-allow-origin"] == "*"


def test_json_logs(monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with write_logs("debug", "json", requests=True), serving(FakeEngine(max_context=64), name="mine") as server:
        body = {"prompt": "abc", "max_tokens": 2}
        assert httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "id-1"}).is_success
        assert httpx.get(server.url + "/no%0A%1B%5B31mwhere?a=b").status_code == 404
        print("warning: a line from elsewhere", file=sys.stderr)
    lines = [json.loads(line) for line in errors.getvalue().splitlines()]
    assert all(set(line) >= {"time", "level"} for line in lines)
    begun = [line["id"] for line in lines if line["level"] == "debug"]
    answered, lost = (next(line for line in lines if line["level"] == "info" and line["id"] == id) for id in begun)
    (printed,) = (line for line in lines if "message" in line)
    assert (answered["level"], answered["id"], answered["status"]) == ("info", "id-1", 200)
    assert (answered["method"], answered["path"], answered["model"]) == ("POST", "/v1/completions", "mine")
    assert (answered["prompt_tokens"], answered["output_tokens"], answered["finish"]) == (3, 2, "length")
    assert 0 < answered["ttft"] <= answered["duration"] < 10
    assert answered["client"].startswith("127.0.0.1:")
    assert (lost["path"], lost["status"]) == ("/no%0A%1B%5B31mwhere?a=b", 404)
    assert "ttft" not in lost
    assert (printed["level"], printed["message"]) == ("warning", "warning: a line from elsewhere")


def test_a_failed_request_is_logged_with_its_traceback_and_id(monkeypatch):
    def fail():
        raise RuntimeError("broken")

    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr("axlearn_plugins_serving.server.endpoints._page", fail)
    with write_logs("warning", "json", requests=True), serving(FakeEngine()) as server:
        assert httpx.get(server.url + "/", headers={"x-request-id": "id-2"}).status_code == 500
    (line,) = [json.loads(line) for line in errors.getvalue().splitlines()]
    assert (line["level"], line["id"]) == ("error", "id-2")
    assert "RuntimeError: broken" in line["error"]


def test_levels_and_handlers_are_restored(capfd):
    logger = logging.getLogger("axlearn")
    before = logger.handlers, logger.propagate, logger.level
    with write_logs("warning"):
        logging.getLogger("axlearn.serving").info("hidden")
        logging.getLogger("axlearn.serving").warning("shown")
    assert (logger.handlers, logger.propagate, logger.level) == before
    assert capfd.readouterr().err == "shown\n"


def test_errors_of_limits_have_the_format_of_the_path(server):
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    for path, kind in (("/v1/chat/completions", None), ("/v1/messages", "error")):
        refused = post(server, path, body=body, key="wrong")
        assert refused.status_code == 401
        assert refused.json().get("type") == kind
        assert "API key" in refused.json()["error"]["message"]
