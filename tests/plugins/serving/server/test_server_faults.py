"""Bad requests, clients that leave or stall, a full queue, a failing engine, and shutdown."""

import concurrent.futures
import contextlib
import json
import socket
import time

import httpx
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Output
from axlearn_plugins_serving.server.limits import ServerLimits, allowed_hosts
from axlearn_plugins_serving.server.server_runner import bind, bind_unix
from support.bad_requests import BAD, MESSAGES
from support.fake_engine import FakeEngine
from support.server_thread import serving

FOREVER = {"prompt": "abc", "max_tokens": 90_000, "stream": True}


def endless(**options):
    return FakeEngine(script=[65] * 100_000, max_context=100_000, **options)


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server():
    with serving(FakeEngine(max_context=256)) as server:
        yield server
        server.wait_until_idle()
        assert server.engine.free == server.engine.blocks


@pytest.mark.slow_cases(
    "body-too-large",
    "detokenize-text",
    "field-of-chats",
    "max-tokens-text",
    "n-huge",
    "null",
    "prompt-and-output-too-long",
    "response-empty",
    "response-expired",
    "response-tokens",
    "role",
    "schema-elsewhere",
    "schema-empty-enum",
    "schema-huge",
    "schema-lengths",
    "schema-pattern",
    "schema-type",
    "schema-unmet",
    "seed-huge",
    "stop-empty",
    "stop-number",
    "stream-options-unknown",
    "stream-text",
    "temperature-negative",
    "temperature-text",
    "tokenize-both",
    "tokenize-none",
    "top-k-float",
    "top-k-low",
    "top-logprobs",
    "top-p-high",
    "unknown-charset",
    "unknown-field",
)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_request_gets_the_right_answer(server, bad):
    refused = httpx.post(server.url + bad.path, content=bad.content, headers={"content-type": bad.kind})
    assert refused.status_code == bad.status, refused.text
    error = refused.json()["error"]
    assert set(error) == ({"type", "message"} if bad.path == MESSAGES else {"message", "type", "param", "code"})
    assert bad.says in error["message"]
    if bad.param is not None:
        assert error["param"] == bad.param
    assert len(error["message"]) < 3000


def test_paths_and_methods(server):
    assert httpx.get(server.url + "/v2").json()["error"]["message"].startswith("no such path")
    refused = httpx.get(server.url + "/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(server.url + "/v1/models/%F0%9F%98%80").status_code == 404


def test_a_client_that_leaves_a_stream_frees_its_request():
    with serving(endless(delay=0.002)) as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=FOREVER | {"n": 3}) as response:
            lines = response.iter_lines()  # closing it closes the stream
            next(lines)
            assert server.engine.busy()
        server.wait_until_idle()
        assert len(server.engine.aborted) == 3
        assert server.engine.free == server.engine.blocks


def test_a_client_that_leaves_before_the_answer_frees_its_request():
    with serving(endless(delay=0.002)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=FOREVER | {"stream": False}, timeout=0.3)
        server.wait_until_idle()
        assert server.engine.free == server.engine.blocks


def test_a_client_that_does_not_read_is_dropped():
    with serving(endless(), limits=ServerLimits(write_seconds=0.3), max_waiting_tokens=2000) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = json.dumps(FOREVER | {"logprobs": 20}).encode()
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: server.engine.steps > 5)
            server.wait_until_idle(20)  # no byte was read
        assert server.engine.free == server.engine.blocks
        assert httpx.get(server.url + "/health").status_code == 200


def test_slow_and_endless_heads_and_bodies():
    limits = ServerLimits(head_seconds=0.3, body_seconds=0.3, body_bytes=4096)
    with serving(FakeEngine(), limits=limits) as server:

        def send(*parts):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                answer = b""
                try:
                    for part in parts:
                        connection.sendall(part)
                    while chunk := connection.recv(65536):
                        answer += chunk
                except ConnectionError:
                    pass
                return answer

        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        assert send(b"POST /v1/compl") == b""  # dropped without an answer
        assert send(b"") == b""
        slow = send(head + b"content-length: 100\r\n\r\n{")
        assert slow.startswith(b"HTTP/1.1 408")
        assert b"slow_body" in slow
        large = send(head + b"connection: close\r\ncontent-length: 99999\r\n\r\n" + b" " * 99999)
        assert large.startswith(b"HTTP/1.1 413")
        chunked = b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n"
        assert send(head + chunked + b"1\r\n \r\n0\r\n\r\n").startswith(b"HTTP/1.1 413")
        endless = send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 2_000_000)
        assert endless.startswith(b"HTTP/1.1 431")
        assert b"head_too_large" in endless
        assert send(b"\x00\xff\r\n\r\n").endswith(b'"code": "invalid_http"}}')
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"x: " + b"a" * 40_000 + b"\r\n", "head_too_large"),
        (b"x: 1\r\n" * 129, "too_many_headers"),
        (b"x: 1\r\n" * 20_000, "head_too_large"),
    ],
    ids=["one-long-header", "headers", "many-headers"],
)
def test_a_head_that_arrives_at_once_is_limited_too(server, head, code):
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n")
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert code.encode() in answer
    assert b"x-request-id: req-" in answer
    assert time.monotonic() - began < 5
    long = httpx.get(server.url + "/health?" + "a" * 40_000)
    assert (long.status_code, long.json()["error"]["code"]) == (431, "head_too_large")


def test_headers_that_trickle_do_not_extend_the_time():
    with serving(FakeEngine(), limits=ServerLimits(head_seconds=0.3)) as server:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - began < 5:
                    connection.sendall(b"x: 1\r\n")
                    time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_more_connections_than_allowed():
    with serving(FakeEngine(), limits=ServerLimits(connections=3)) as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        until(lambda: len(server.runner._server.server_state.connections) == 3)
        refused = httpx.get(server.url + "/health")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        for connection in sockets:
            connection.close()
        until(lambda: not server.runner._server.server_state.connections)
        assert httpx.get(server.url + "/health").status_code == 200


def test_an_api_key():
    with serving(FakeEngine(), limits=ServerLimits(api_keys=("s3cret",))) as server:
        for headers in ({}, {"authorization": "Bearer s3creT"}, {"authorization": "Bearer s3cret2"}):
            refused = httpx.post(server.url + "/v1/completions", json={"prompt": "a"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "s3cret" not in refused.text
        authorization = {"authorization": "Bearer s3cret"}
        assert (
            httpx.post(server.url + "/v1/completions", json={"prompt": "a"}, headers=authorization).status_code == 200
        )
        assert httpx.get(server.url + "/metrics").status_code == 401
        assert httpx.get(server.url + "/health").status_code == 200
    assert "s3cret" not in repr(ServerLimits(api_keys=("s3cret",)))


def test_web_pages_of_others_reach_nothing():
    """Web pages can use neither a form's content type nor a name that resolves to the loopback address."""
    with serving(FakeEngine(), limits=ServerLimits(hosts=allowed_hosts("127.0.0.1", has_key=False))) as server:
        body = b'{"prompt": "a"}'
        assert httpx.post(server.url + "/v1/completions", content=body).status_code == 415
        plain = {"content-type": "text/plain"}
        assert httpx.post(server.url + "/v1/completions", content=body, headers=plain).status_code == 415
        for host, status in (("evil.example:80", 421), ("evil.example", 421), ("localhost:9", 200), ("[::1]:9", 200)):
            assert httpx.get(server.url + "/health", headers={"host": host}).status_code == status
    assert allowed_hosts("0.0.0.0", has_key=False) is None
    assert allowed_hosts("127.0.0.1", has_key=True) is None


def test_a_full_queue_says_when_to_come_back():
    engine = endless(max_running=1, max_waiting=2, delay=0.002)
    with serving(engine) as server, concurrent.futures.ThreadPoolExecutor(3) as pool:
        body = {"prompt": "abc", "max_tokens": 400}
        requests = []
        for i in range(3):
            requests.append(pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=60))
            until(lambda i=i: server.service.thread.active == i + 1 and len(engine.running) == 1)
        refused = httpx.post(server.url + "/v1/completions", json=body | {"stream": True})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "2"
        assert refused.json()["error"]["code"] == "queue_full"
        several = httpx.post(server.url + "/v1/completions", json=body | {"n": 4})
        assert several.status_code == 429  # all or none
        assert [f.result().status_code for f in requests] == [200] * 3
        server.wait_until_idle()
        assert engine.free == engine.blocks


def test_an_engine_that_fails():
    with serving(endless(fail_at=30, delay=0.005)) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.submit(httpx.post, server.url + "/v1/completions", json=FOREVER | {"stream": False}, timeout=30)
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=chat(stream=True), timeout=30) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-2][6:])["error"]["type"] == "server_error"
        assert lines[-1] == "data: [DONE]"
        assert whole.result().status_code == 500
        assert whole.result().json()["error"]["code"] == "engine_error"
        server.thread.join(10)
        assert server.code == 1
        assert server.service.state == "failed"
        assert server.engine.closed


def chat(**more):
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90_000} | more


def test_one_request_that_the_engine_cannot_compute():
    class Broken(FakeEngine):
        def _advance(self, id):
            if self.running[id].request.prompt[0] != ord("x"):
                return super()._advance(id)
            self.free += self.running.pop(id).blocks
            return Output(id=id, finish="error", error="the row is broken")

    with serving(Broken()) as server:
        failed = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the row is broken"
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "y"}).status_code == 200
        assert server.service.state == "ok"


def test_the_end_waits_for_what_runs():
    with serving(endless(delay=0.002), grace=20) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"prompt": "abc", "max_tokens": 500}
        running = pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=30)
        until(lambda: server.engine.output_tokens > 5)
        server.stop()
        until(lambda: server.service.state == "draining")
        assert running.result().json()["usage"]["completion_tokens"] == 500
        server.thread.join(10)
        assert server.code == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")


def test_the_end_does_not_wait_for_ever():
    with serving(endless(delay=0.002), grace=0.3) as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=FOREVER, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["error"]["message"] == "the server is stopping"
        server.thread.join(10)
        assert server.code == 1
        assert server.engine.free == server.engine.blocks


def test_new_requests_while_the_server_stops():
    with serving(endless(delay=0.002), grace=20) as server:
        body = FOREVER | {"max_tokens": 500}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            until(lambda: server.service.state == "draining")
            messages = [{"role": "user", "content": "Hi"}]
            for path, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": messages}),
                ("/v1/responses", {"input": "Hi", "stream": True}),
            ):
                refused = httpx.post(server.url + path, json=body)  # each is a new connection
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "5"
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"]["code"] == "draining"
            assert httpx.get(server.url + "/health").status_code == 503
            assert httpx.post(server.url + "/ping").status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.thread.join(10)
        assert server.code == 0


def test_a_port_in_use_and_addresses_of_others():
    with bind("127.0.0.1", 0) as first, pytest.raises(RequestError, match="the port is in use"):
        bind("127.0.0.1", first.getsockname()[1])
    with pytest.raises(RequestError, match="cannot listen on"):
        bind("203.0.113.7", 0)
    with pytest.raises(RequestError, match="cannot listen on"):
        bind("no.such.host.invalid", 0)


def test_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    with bind_unix(path) as listener:
        assert listener.getsockname() == str(path)
        with pytest.raises(RequestError, match="a server listens on it"):
            bind_unix(path)
    bind_unix(path).close()  # replaces the socket of a server that was killed
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RequestError, match="is not a socket"):
        bind_unix(file)
    for wrong in (tmp_path / "no" / "directory", tmp_path / ("a" * 120)):
        with pytest.raises(RequestError, match="cannot listen on"):
            bind_unix(wrong)


class PatientEngine(FakeEngine):
    """An engine that needs no step until two requests were added."""

    def spare_seconds(self):
        return 60.0 if len(self.seen) < 2 else 0.0

    def step(self):
        if not self.steps:
            self.begun_together = len(self.waiting)
        return super().step()


def test_a_step_is_planned_late_and_has_what_came_meanwhile():
    engine = PatientEngine(script=[65] * 4)
    with serving(engine) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {"prompt": "abc", "max_tokens": 4}
        first = pool.submit(httpx.post, server.url + "/v1/completions", json=body)
        until(lambda: engine.seen)
        assert engine.steps == 0
        second = httpx.post(server.url + "/v1/completions", json=body)
        assert {first.result(10).status_code, second.status_code} == {200}
    assert engine.begun_together == 2


def test_a_server_stops_while_it_need_not_plan():
    engine = PatientEngine()
    with serving(engine, grace=0.1) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, server.url + "/v1/completions", json={"prompt": "abc"})
        until(lambda: engine.seen)
        server.stop()
        assert answer.result(10).status_code >= 500
    assert engine.steps == 0
