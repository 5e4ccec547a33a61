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
    "host_seconds": "Seconds spent planning steps and reading results while the devices compute.",
}
DRAFT_COUNTERS = {
    "drafted_tokens": "Tokens that the drafter proposed.",
    "accepted_tokens": "Drafted tokens that the model accepted.",
}
"""Counters with a label `drafter`, which is empty if the engine has no drafter."""


VLLM_NAMES = {
    "waiting": "num_requests_waiting",
    "running": "num_requests_running",
    "cache_usage": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "looked_up_tokens": "prefix_cache_queries",
    "cached_prompt_tokens": "prefix_cache_hits",
    "output_tokens": "generation_tokens",
    "preemptions": "num_preemptions",
    "drafted_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "first_token_seconds": "time_to_first_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "output_token_seconds": "request_time_per_output_token_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "decode_seconds": "request_decode_time_seconds",
    "prompt_length_tokens": "request_prompt_tokens",
    "output_length_tokens": "request_generation_tokens",
    "finished": "request_success",
}
"""Name of a metric without `axlearn_` -> vLLM's name for it without `vllm:`."""


class Metrics:
    """The metrics for a server. The engine's counters are read when metrics are collected.

    `registry` reports each metric with the label `model_name`, and again under the name that vLLM uses, if it has one.

    Args:
        model: Name of the served model.
        statistics: Returns the statistics of the engine.
        start_compilations: Number of programs that XLA compiled during startup.

    Attributes:
        registry: Registry to render.
        responses: HTTP responses by path and status.
        finished: Outputs by the reason why they ended.
        first_token_seconds: Time from a request's arrival to its first token.
        inter_token_seconds: Time between the outputs of a request.
        output_token_seconds: Time per token after the first.
        request_seconds: Time from a request's arrival to its last token.
        queue_seconds: Time from a request's arrival until the engine starts it.
        prefill_seconds: Time from a request's start to its first token.
        decode_seconds: Time from a request's first token to its last.
        prompt_length: Number of prompt tokens.
        output_length: Number of output tokens.
    """

    def __init__(self, model: str, statistics: Callable[[], Statistics], *, start_compilations: int = 0):
        self._own = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(_Named(self._own, model))
        help = "Programs that XLA compiled during startup; 0 if exported programs were loaded."
        Gauge("axlearn_start_compilations", help, registry=self._own).set(start_compilations)
        self._own.register(_EngineCollector(statistics))
        self.responses = Counter("axlearn_responses", "HTTP responses.", ("path", "status"), registry=self._own)
        reasons = "Outputs by the reason why they ended: stop, length, abort or error."
        self.finished = Counter("axlearn_finished", reasons, ("finished_reason",), registry=self._own)
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(reason)  # report zeros
        self.first_token_seconds = self._histogram("first_token_seconds", "Seconds to the first token.", _SECONDS)
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Seconds between the outputs of a request.", _TOKEN_SECONDS
        )
        self.output_token_seconds = self._histogram(
            "output_token_seconds", "Seconds per output token after the first.", _TOKEN_SECONDS
        )
        self.request_seconds = self._histogram("request_seconds", "Seconds to the last token.", _SECONDS)
        self.queue_seconds = self._histogram("queue_seconds", "Seconds in the queue.", _SECONDS)
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "Seconds from the start to the first token.", _SECONDS
        )
        self.decode_seconds = self._histogram("decode_seconds", "Seconds from the first token to the last.", _SECONDS)
        self.prompt_length = self._histogram("prompt_length_tokens", "Prompt tokens per request.", _TOKENS)
        self.output_length = self._histogram("output_length_tokens", "Output tokens per request.", _TOKENS)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"axlearn_{name}", help, buckets=tuple(buckets), registry=self._own)


class _Named(Collector):
    """Collects a registry with the model's name as a label, under our names and vLLM's."""

    def __init__(self, registry: CollectorRegistry, model: str):
        self._registry, self._labels = registry, {"model_name": model}

    def describe(self) -> Iterable[Metric]:
        return ()  # do not read the engine while the collector is registered

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            yield self._rename(metric, metric.name)
            if (name := VLLM_NAMES.get(metric.name.removeprefix("axlearn_"))) is not None:
                yield self._rename(metric, f"vllm:{name}")

    def _rename(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            renamed.samples.append(sample._replace(name=name + suffix, labels={**self._labels, **sample.labels}))
        return renamed


class _EngineCollector(Collector):
    def __init__(self, statistics: Callable[[], Statistics]):
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        statistics = self._statistics()
        values = attrs.asdict(statistics, recurse=False)
        for name, help in GAUGES.items():
            yield GaugeMetricFamily(f"axlearn_{name}", help, value=values[name])
        for name, help in COUNTERS.items():
            yield CounterMetricFamily(f"axlearn_{name}", help, value=values[name])
        drafter = statistics.drafter or ""
        for name, help in DRAFT_COUNTERS.items():
            family = CounterMetricFamily(f"axlearn_{name}", help, labels=("drafter",))
            family.add_metric((drafter,), values[name])
            yield family
        if (rate := statistics.acceptance_rate) is not None:
            help = "Share of the drafted tokens that the model accepted."
            gauge = GaugeMetricFamily("axlearn_acceptance_rate", help, labels=("drafter",))
            gauge.add_metric((drafter,), rate)
            yield gauge
        usage = statistics.used_blocks / statistics.blocks if statistics.blocks else 0.0
        yield GaugeMetricFamily("axlearn_cache_usage", "Share of the cache's blocks that requests hold.", value=usage)
        looked_up = "Prompt tokens that were looked up in the cache."
        yield CounterMetricFamily("axlearn_looked_up_tokens", looked_up, value=statistics.prompt_tokens)
