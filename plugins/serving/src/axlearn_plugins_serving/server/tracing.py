"""OpenTelemetry traces: a span for each request that generates text, exported over OTLP."""

import importlib
from typing import Any
from urllib.parse import urlsplit

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.server.request_record import RequestRecord

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""Path -> `gen_ai.operation.name` of the semantic conventions."""
_EXPORT_SECONDS = 5.0


class Tracer:
    """Exports the spans of requests in a background thread.

    A request with a `traceparent` header continues the client's trace.

    Args:
        endpoint: URL of the collector for traces, such as `http://127.0.0.1:4318/v1/traces`.

    Raises:
        RequestError: If OpenTelemetry is not installed, or the endpoint is not an HTTP URL.
    """

    def __init__(self, endpoint: str):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(
                f"--otlp-traces-endpoint {endpoint!r} is not an HTTP URL\n"
                "    expected: the collector's URL for traces, such as http://127.0.0.1:4318/v1/traces"
            )
        try:
            trace: Any = importlib.import_module("opentelemetry.sdk.trace")
            batches: Any = importlib.import_module("opentelemetry.sdk.trace.export")
            resources: Any = importlib.import_module("opentelemetry.sdk.resources")
            otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            propagation: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
            self._trace: Any = importlib.import_module("opentelemetry.trace")
        except ImportError as error:
            raise RequestError(
                f"traces need OpenTelemetry, which is not installed: {error}\n"
                "    fix: pip install 'axlearn-plugins-serving[otel]'"
            ) from error
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME add to the resource or replace its name.
        resource = resources.Resource.create({"service.name": "axlearn-serve"})
        resource = resource.merge(resources.OTELResourceDetector().detect())
        self._provider: Any = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = otlp.OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(batches.BatchSpanProcessor(exporter))
        self._tracer: Any = self._provider.get_tracer("axlearn_plugins_serving")
        self._propagator: Any = propagation.TraceContextTextMapPropagator()

    def export(self, record: RequestRecord) -> None:
        """Export the span of a request whose response has ended.

        Requests that do not generate text are skipped.
        """
        if record.path not in _OPERATIONS or record.seconds is None:
            return
        context = self._propagator.extract(dict(record.headers))
        operation = _OPERATIONS[record.path]
        begin = int(record.began * 1e9)
        model = "" if record.job is None else f" {record.job.model}"
        span = self._tracer.start_span(
            f"{operation}{model}",
            context,
            self._trace.SpanKind.SERVER,
            _attributes(record, operation),
            start_time=begin,
        )
        if record.status is None or record.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(begin + int(record.seconds * 1e9))

    def close(self) -> None:
        """Export the remaining spans, and stop the thread."""
        self._provider.force_flush(int(_EXPORT_SECONDS * 1000))
        self._provider.shutdown()


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    """Return a span's attributes. The latencies have no names in the conventions; these are also what vLLM calls them."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "axlearn",
        "gen_ai.request.id": record.id,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "gen_ai.latency.e2e": record.seconds,
    }
    if (job := record.job) is not None:
        sampling, usage, timing = job.choices[0].request.sampling, job.usage, job.timing
        attributes |= {
            "gen_ai.request.model": job.model,
            "gen_ai.response.model": job.model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.choice.count": len(job.choices),
            "gen_ai.response.finish_reasons": tuple(job.finish_reasons),
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.output_tokens": usage.completion,
            "gen_ai.latency.time_in_queue": timing.queue_seconds,
            "gen_ai.latency.time_to_first_token": timing.first_token_seconds,
            "gen_ai.latency.time_in_model_prefill": timing.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": timing.decode_seconds,
        }
    return {name: value for name, value in attributes.items() if value is not None}
