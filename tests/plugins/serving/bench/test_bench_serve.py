"""`axlearn bench serve`: metrics match their definitions, and failing servers are reported."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.bench.client import measure, new_client, send
from axlearn_plugins_serving.bench.latency_figures import Record, render, summarize
from axlearn_plugins_serving.bench.load import Lengths, Load, parse_goodput
from axlearn_plugins_serving.server.limits import ServerLimits
from support.fake_engine import FakeEngine
from support.server_thread import serving


def bench(*arguments):
    return CliRunner().invoke(cli, ["bench", "serve", *arguments])


def record(ttft, itl, output_tokens, **more):
    return Record(
        ttft=ttft, itl=tuple(itl), e2el=ttft + sum(itl), output_tokens=output_tokens, prompt_tokens=10, **more
    )


def test_figures_by_hand():
    records = [
        record(0.1, [0.02, 0.04], 3),  # TPOT 30 ms
        record(0.3, [0.1], 5),  # TPOT 25 ms: one event has several tokens
        record(0.2, [], 1),  # no TPOT
        Record(error="HTTP 500: broken"),
    ]
    summary = summarize(records, 2.0, {"ttft": 0.25, "tpot": 0.028})
    assert (summary["completed"], summary["failed"], summary["errors"]) == (3, 1, {"HTTP 500: broken": 1})
    assert summary["request_throughput"] == 1.5
    assert summary["output_throughput"] == 4.5
    assert summary["total_token_throughput"] == (30 + 9) / 2
    assert summary["request_goodput"] == 0.5  # the third request has one token, so its TPOT is 0
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["tpot_ms"]["mean"] == pytest.approx(27.5)  # requests with one token have no TPOT
    assert summary["itl_ms"]["p50"] == pytest.approx(40)
    assert summary["e2el_ms"]["p99"] == pytest.approx(np.percentile([160, 400, 200], 99))
    assert "failed 1 times: HTTP 500: broken" in render(summary)
    nothing = summarize([Record(error="x")], 1.0, {})
    assert nothing["ttft_ms"] is None
    assert nothing["request_goodput"] is None
    assert render(nothing)


def test_a_load_is_the_same_for_equal_seeds():
    load = Load(count=50, input=Lengths(3, 9), output=Lengths(2, 4), prefix=2, ignore_eos=True)
    bodies = load.bodies("m", vocab_size=100)
    assert bodies == load.bodies("m", vocab_size=100)
    assert bodies != Load(count=50, input=Lengths(3, 9), output=Lengths(2, 4), seed=1).bodies("m", vocab_size=100)
    assert {len(b["prompt"]) - 2 for b in bodies} == set(range(3, 10))
    assert {b["max_tokens"] for b in bodies} == {2, 3, 4}
    assert len({tuple(b["prompt"][:2]) for b in bodies}) == 1
    assert all(b["ignore_eos"] for b in bodies)
    (chat,) = Load(endpoint="chat", count=1, input=Lengths(7, 7)).bodies("m", vocab_size=100)
    assert len(chat["messages"][0]["content"].split()) == 7


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_warm_up_has_other_tokens_of_the_same_kind(endpoint):
    load = Load(endpoint=endpoint, count=20, input=Lengths(16, 40), output=Lengths(2, 4), prefix=16, ignore_eos=True)
    bodies = load.bodies("m", vocab_size=5000)
    warm = load.bodies("m", vocab_size=5000, warm_up=True)
    assert [b.keys() for b in warm] == [b.keys() for b in bodies]

    def begins(some):
        if endpoint == "chat":
            return {tuple(b["messages"][0]["content"].split()[:16]) for b in some}
        return {tuple(b["prompt"][:16]) for b in some}

    assert len(begins(bodies)) == len(begins(warm)) == 1  # the prefix
    assert not begins(bodies) & begins(warm)


def test_the_share_of_cached_tokens():
    records = [record(0.1, [], 1, cached_tokens=4), record(0.1, [], 1, cached_tokens=0)]
    summary = summarize(records, 1.0, {})
    assert summary["cached_prompt_tokens"] == 4
    assert ["Cached", "prompt", "tokens", "20.0%"] in [line.split() for line in render(summary).splitlines()]
    silent = summarize([record(0.1, [], 1)], 1.0, {})
    assert silent["cached_prompt_tokens"] is None
    assert "unknown" in render(silent)


def test_a_measured_prompt_was_not_sent_before():
    """Warm-up requests must not fill a server's cache with the prompts that are measured."""
    with serving(FakeEngine(max_context=512)) as server:
        report = bench(
            "--url", server.url, "--num-prompts", "8", "--warmup", "8", "--input-len", "32", "--output-len", "2",
            "--vocab-size", "257", "--json",
        )  # fmt: skip
        assert report.exit_code == 0, report.output
        begins = [request.prompt[:16] for request in server.engine.seen]
    assert len(begins) == len(set(begins)) == 16
    assert json.loads(report.stdout)["cached_prompt_tokens"] == 0


def test_arrivals_have_their_rate():
    times = Load(count=400, rate=20.0).arrivals()
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20.0)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.2)  # exponential
    assert Load(count=3).arrivals() == [0.0] * 3


@pytest.mark.parametrize("text", ["0", "5:3", "a", "", "1:2:3", "-4"])
def test_lengths_that_are_none(text):
    with pytest.raises(RequestError, match="--input-len"):
        Lengths.parse(text, "--input-len")


def test_goals():
    assert parse_goodput(["ttft:500,tpot:50", "e2el:1000"]) == {"ttft": 0.5, "tpot": 0.05, "e2el": 1.0}
    for text in ("ttft", "ttft:x", "speed:3", "ttft:-1", "ttft:nan"):
        with pytest.raises(RequestError, match="--goodput"):
            parse_goodput([text])


@contextlib.contextmanager
def raw_server(answer):
    """Run a server that answers each connection with `answer(connection)`."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def run():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    request = connection.recv(65536)
                    while not request.endswith(b"{}"):  # unread data would reset the connection
                        request += connection.recv(65536)
                    answer(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(**data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def send_one(url, endpoint="completions"):
    async def run():
        async with new_client(url, None, 10) as client:
            return await send(client, endpoint, {})

    return asyncio.run(run())


def test_times_are_those_of_the_events():
    def answer(connection):
        connection.sendall(HEAD)
        for pause, text in ((0.15, "a"), (0.05, "bc"), (0.25, "d")):
            time.sleep(pause)
            connection.sendall(event(choices=[{"text": text}]))
        time.sleep(0.2)
        connection.sendall(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 4}) + b"data: [DONE]\n\n")

    with raw_server(answer) as url:
        record = send_one(url)
    assert (record.error, record.text, record.prompt_tokens, record.output_tokens) == (None, "abcd", 7, 4)
    assert record.ttft >= 0.15
    assert len(record.itl) == 2
    assert record.itl[0] >= 0.04
    assert record.itl[1] >= 0.2
    assert record.e2el == pytest.approx(record.ttft + sum(record.itl))  # the usage arrives later and does not count
    assert record.tpot == pytest.approx(sum(record.itl) / 3)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"HTTP/1.1 500 X\r\nconnection: close\r\n\r\n{\"error\": {\"message\": \"broken\"}}", "HTTP 500: broken"),
        (b"HTTP/1.1 502 X\r\nconnection: close\r\n\r\n<html>", "HTTP 502: <html>"),
        (HEAD + event(choices=[{"text": "a"}]) + event(error={"message": "gone"}), "gone"),
        (HEAD + event(choices=[{"text": "a"}]), "reports no usage"),
        (HEAD, "without a token"),
        (HEAD + b"data: {nonsense\n\n", "JSONDecodeError"),
        (b"", "RemoteProtocolError"),
    ],
)  # fmt: skip
def test_what_counts_as_a_failure(body, says):
    with raw_server(lambda connection: connection.sendall(body)) as url:
        assert says in str(send_one(url).error)


def test_no_more_than_the_concurrency_at_one_time():
    engine = FakeEngine(delay=0.003)
    with serving(engine) as server:
        load = Load(count=24, input=Lengths(4, 8), output=Lengths(8, 8), concurrency=3)
        most = 0

        async def run():
            nonlocal most

            def watch(completed):
                nonlocal most
                most = max(most, server.service.thread.active)

            async with new_client(server.url, None, 30) as client:
                return await measure(client, load, load.bodies("tiny", vocab_size=200), watch)

        records, seconds = asyncio.run(run())
    assert [r.error for r in records] == [None] * 24
    assert [r.output_tokens for r in records] == [8] * 24
    assert most <= 3
    assert seconds > 0


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_command(endpoint):
    with serving(FakeEngine(max_context=512)) as server:
        arguments = ["--url", server.url + "/v1", "--endpoint", endpoint, "--num-prompts", "12", "--concurrency", "4"]
        lengths = ["--input-len", "4:12", "--output-len", "5:5", "--ignore-eos", "--goodput", "e2el:60000"]
        report = bench(*arguments, *lengths, "--json", "--request-rate", "200")
        assert report.exit_code == 0, report.output
        summary = json.loads(report.stdout)
        assert (summary["completed"], summary["failed"], summary["output_tokens"]) == (12, 0, 60)
        assert summary["request_goodput"] == summary["request_throughput"]
        assert summary["model"] == "tiny"
        assert server.engine.seen[-1].sampling.ignore_end
        table = bench(*arguments, *lengths)
        assert "Time to first token (TTFT)" in table.stdout
        assert "Good requests per second (e2el 60000 ms)" in table.stdout


def test_options_change_what_is_sent():
    with serving(FakeEngine(max_context=64)) as server:
        words = ["--num-prompts", "3", "--input-len", "6", "--output-len", "2", "--warmup", "0"]
        words += ["--prefix-len", "4", "--vocab-size", "9", "--temperature", "0.5", "--seed", "3"]
        report = bench("--url", server.url, *words)
        assert report.exit_code == 0, report.output
        requests = server.engine.seen
    assert len(requests) == 3
    assert {len(request.prompt) for request in requests} == {10}
    assert len({tuple(request.prompt[:4]) for request in requests}) == 1
    assert max(token for request in requests for token in request.prompt) < 9
    assert {request.sampling.temperature for request in requests} == {0.5}


def test_the_timeout_of_the_command():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        report = bench("--url", f"http://127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.05")
    assert report.exit_code == 1
    assert "does not list its models: ReadTimeout" in report.stderr


def test_requests_that_a_server_refuses():
    with serving(FakeEngine(max_context=40)) as server:
        report = bench(
            "--url", server.url, "--num-prompts", "9", "--input-len", "4:60", "--output-len", "8", "--warmup", "0"
        )
        assert report.exit_code == 1
        assert "times: HTTP 400: the context has 40 tokens" in report.stdout
        first = bench("--url", server.url, "--input-len", "60")
        assert first.exit_code == 1
        assert "the warm-up request failed: HTTP 400" in first.stderr


def test_keys_models_and_addresses(monkeypatch):
    with serving(FakeEngine(), limits=ServerLimits(api_keys=("k",))) as server:
        monkeypatch.setenv("BENCH_KEY", "k")
        report = bench("--url", server.url, "--num-prompts", "1", "--api-key-env", "BENCH_KEY")
        assert report.exit_code == 0, report.output
        unknown = bench("--url", server.url, "--api-key-env", "BENCH_KEY", "--model", "other")
        assert (unknown.exit_code, "it has: tiny" in unknown.stderr) == (2, True)
        missing = bench("--url", server.url, "--api-key-env", "NO_SUCH_KEY")
        assert (missing.exit_code, "NO_SUCH_KEY is not set" in missing.stderr) == (2, True)
        assert bench("--url", server.url).exit_code == 1  # the server requires a key
    assert bench("--url", "127.0.0.1:8000").exit_code == 2
    assert bench("--url", "http://127.0.0.1:1").exit_code == 1
    assert bench("--num-prompts", "0").exit_code == 2
