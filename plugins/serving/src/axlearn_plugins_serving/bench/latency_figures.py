"""The metrics of a benchmark, defined as in `vllm bench serve`."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

PERCENTILES = (50, 90, 99)
TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token after the first (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2el": "End-to-end latency (E2EL)",
}


@attrs.frozen(kw_only=True)
class Record:
    """The measurements of one request. Times are in seconds.

    Attributes:
        error: Error message; None if the request succeeded.
        prompt_tokens: Number of prompt tokens that the server reports.
        cached_tokens: Number of prompt tokens that came from the server's cache; None if the server does not report it.
        output_tokens: Number of output tokens that the server reports.
        ttft: Time from sending the request to the first event with a choice.
        itl: Times between events with a choice.
        e2el: Time from sending the request to the last event with a choice.
        text: Output text.
    """

    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    ttft: float = 0.0
    itl: tuple[float, ...] = ()
    e2el: float = 0.0
    text: str = ""

    @property
    def tpot(self) -> float:
        """`(e2el - ttft) / (output_tokens - 1)`; 0 for a single token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def summarize(records: Sequence[Record], seconds: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Compute the metrics of a benchmark. Latencies are in milliseconds.

    Args:
        records: One record per request.
        seconds: Time from sending the first request to the end of the last one.
        goals: Latency name -> limit in seconds. A request is good if it meets all limits.
    """
    answers = [r for r in records if r.error is None]
    samples = {
        "ttft": [r.ttft for r in answers],
        "tpot": [r.tpot for r in answers if r.output_tokens > 1],
        "itl": [gap for r in answers for gap in r.itl],
        "e2el": [r.e2el for r in answers],
    }
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    good = sum(all(getattr(r, name) <= goal for name, goal in goals.items()) for r in answers)
    cached = [r.cached_tokens for r in answers if r.cached_tokens is not None]
    inputs, outputs = sum(r.prompt_tokens for r in answers), sum(r.output_tokens for r in answers)
    return {
        "name": "serve",
        "requests": len(records),
        "completed": len(answers),
        "failed": len(records) - len(answers),
        "errors": errors,
        "seconds": seconds,
        "prompt_tokens": inputs,
        "cached_prompt_tokens": sum(cached) if cached else None,
        "output_tokens": outputs,
        "request_throughput": len(answers) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "request_goodput": good / seconds if goals else None,
        "goodput_ms": {name: goal * 1000 for name, goal in goals.items()},
        **{f"{name}_ms": _latencies(values) for name, values in samples.items()},
    }


def _latencies(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    milliseconds = np.asarray(values) * 1000
    return {
        "mean": float(milliseconds.mean()),
        **{f"p{p}": float(np.percentile(milliseconds, p)) for p in PERCENTILES},
    }


def _format_share(part: int | None, whole: int) -> str:
    return "unknown" if part is None else f"{part / max(1, whole):.1%}"


def render(summary: Mapping[str, Any]) -> str:
    """Format the metrics as a table."""
    rows = [
        ("Requests completed", f"{summary['completed']}"),
        ("Requests failed", f"{summary['failed']}"),
        ("Seconds", f"{summary['seconds']:.2f}"),
        ("Prompt tokens", f"{summary['prompt_tokens']}"),
        ("Cached prompt tokens", _format_share(summary["cached_prompt_tokens"], summary["prompt_tokens"])),
        ("Output tokens", f"{summary['output_tokens']}"),
        ("Requests per second", f"{summary['request_throughput']:.2f}"),
        ("Output tokens per second", f"{summary['output_throughput']:.2f}"),
        ("Total tokens per second", f"{summary['total_token_throughput']:.2f}"),
    ]
    if summary["request_goodput"] is not None:
        goals = ", ".join(f"{name} {goal:g} ms" for name, goal in summary["goodput_ms"].items())
        rows.append((f"Good requests per second ({goals})", f"{summary['request_goodput']:.2f}"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>10}" for name, value in rows]
    columns = ("mean", *(f"p{p}" for p in PERCENTILES))
    lines += ["", f"{'Milliseconds':<46}" + "".join(f"{c:>10}" for c in columns)]
    for name, title in TITLES.items():
        values = summary[f"{name}_ms"]
        cells = "".join(f"{values[c]:>10.2f}" for c in columns) if values else f"{'-':>10}" * len(columns)
        lines.append(f"{title:<46}{cells}")
    lines += [f"failed {count} times: {error}" for error, count in summary["errors"].items()]
    return "\n".join(lines)
