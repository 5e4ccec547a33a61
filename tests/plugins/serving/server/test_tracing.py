"""Traces, received by a collector in the test process."""

import http.server
import threading

import httpx
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.server.tracing import Tracer
from support.fake_engine import FakeEngine
from support.server_thread import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.BaseHTTPRequestHandler):
    """Stores the bodies of requests."""

    def do_POST(self):
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def read_spans(collector):
    """Return (resource attributes, span, span attributes) of each span."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def plain(pairs):
        return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}

    spans = []
    for path, body in collector.bodies:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans += [
                (plain(resource.resource.attributes), span, plain(span.attributes))
                for scope in resource.scope_spans
                for span in scope.spans
            ]
    return spans


def test_a_span_for_each_request_that_generates(collector):
    tracer = Tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces")
    with serving(FakeEngine(script=[65] * 9, max_context=64), tracer=tracer) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "id-1"}
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0.5}
        httpx.post(server.url + "/v1/completions", json=body, headers=headers).raise_for_status()
        httpx.get(server.url + "/health")
        chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "other"}
        assert httpx.post(server.url + "/v1/chat/completions", json=chat).status_code == 404
    (resource, first, attributes), (_, second, refused) = read_spans(collector)
    assert resource["service.name"] == "axlearn-serve"
    assert (first.name, first.trace_id.hex(), first.parent_span_id.hex()) == ("text_completion tiny", TRACE, PARENT)
    assert first.kind == 2  # a server
    assert attributes["gen_ai.request.id"] == "id-1"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 4)
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (4, 0.5)
    assert [v.string_value for v in attributes["gen_ai.response.finish_reasons"].values] == ["length"]
    phases = [attributes[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill", "model_decode")]
    seconds = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert 0 < sum(phases) <= seconds + 0.01
    assert second.trace_id.hex() != TRACE
    assert (second.name, refused["http.response.status_code"]) == ("chat", 404)


def test_a_collector_that_is_down_does_not_disturb_requests(monkeypatch):
    monkeypatch.setattr("axlearn_plugins_serving.server.tracing._EXPORT_SECONDS", 0.2)
    with serving(FakeEngine(script=[65]), tracer=Tracer("http://127.0.0.1:9/v1/traces")) as server:
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert server.code == 0


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", ""])
def test_an_endpoint_that_is_not_an_http_url(endpoint):
    result = CliRunner().invoke(cli, ["serve", "runs/any", "--port", "0", "--otlp-traces-endpoint", endpoint])
    assert result.exit_code == 2
    assert "is not an HTTP URL" in result.stderr


def test_without_opentelemetry(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(RequestError, match=r"pip install 'axlearn-plugins-serving\[otel\]'"):
        Tracer("http://127.0.0.1:4318/v1/traces")
