"""The metrics that `/metrics` serves, in Prometheus' text format."""

from collections.abc import Callable, Iterable

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from axlearn_plugins_serving.contracts import Statistics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

GAUGES = {
    "waiting": "Requests in the queue.",
    "running": "Requests that are running.",
    "blocks": "Blocks in the cache.",
    "used_blocks": "Blocks that requests hold.",
    "cached_blocks": "Blocks that no request holds but that later prompts can reuse.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_prompt_tokens": "Prompt tokens that were in the cache.",
    "output_tokens": "Output tokens.",
    "preemptions": "Number of times a request lost its blocks to another request.",
    "steps": "Steps of the engine.",
    "compilations": "Functions compiled after warm-up; any value but 0 is a bug.",
    "step_seconds": "Seconds spent submitting steps to the runner and waiting for it.",
    "drafted_tokens": "Tokens that the drafter proposed.",
    "accepted_tokens": "Drafted tokens that the model accepted.",
    "host_seconds": "Seconds spent planning steps and reading results while the devices compute.",
}


class Metrics:
    """The metrics for a server. The engine's counters are read when metrics are collected.

    Attributes:
        registry: Registry to render.
        responses: HTTP responses by path and status.
        first_token_seconds: Time from a request's arrival to its first token.
        output_token_seconds: Time per token after the first.
        request_seconds: Time from a request's arrival to its last token.
        prompt_length: Number of prompt tokens.
        output_length: Number of output tokens.
    """

    def __init__(self, statistics: Callable[[], Statistics], *, start_compilations: int = 0):
        self.registry = CollectorRegistry()
        help = "Programs that XLA compiled during startup; 0 if exported programs were loaded."
        Gauge("axlearn_start_compilations", help, registry=self.registry).set(start_compilations)
        self.registry.register(_EngineCollector(statistics))
        self.responses = Counter("axlearn_responses", "HTTP responses.", ("path", "status"), registry=self.registry)
        self.first_token_seconds = self._histogram("first_token_seconds", "Seconds to the first token.", _SECONDS)
        self.output_token_seconds = self._histogram(
            "output_token_seconds", "Seconds per output token after the first.", _TOKEN_SECONDS
        )
        self.request_seconds = self._histogram("request_seconds", "Seconds to the last token.", _SECONDS)
        self.prompt_length = self._histogram("prompt_length_tokens", "Prompt tokens per request.", _TOKENS)
        self.output_length = self._histogram("output_length_tokens", "Output tokens per request.", _TOKENS)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"axlearn_{name}", help, buckets=tuple(buckets), registry=self.registry)


class _EngineCollector(Collector):
    def __init__(self, statistics: Callable[[], Statistics]):
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        statistics = attrs.asdict(self._statistics(), recurse=False)
        for name, help in GAUGES.items():
            yield GaugeMetricFamily(f"axlearn_{name}", help, value=statistics[name])
        for name, help in COUNTERS.items():
            yield CounterMetricFamily(f"axlearn_{name}", help, value=statistics[name])
