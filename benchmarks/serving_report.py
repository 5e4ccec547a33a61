"""Tables of the results of all rounds."""

import statistics
from collections.abc import Sequence
from typing import Any

from axlearn_core.contracts.target import Target

FIGURES = {
    "output tokens/s": lambda r: r["loaded"]["output_throughput"],
    "TTFT p50, ms": lambda r: r["loaded"]["ttft_ms"]["p50"],
    "TPOT p50, ms": lambda r: r["loaded"]["tpot_ms"]["p50"],
    "TPOT p50 alone, ms": lambda r: r["alone"]["tpot_ms"]["p50"],
    "TPOT p50 alone / one read of the weights by all cores": lambda r: (
        r["alone"]["tpot_ms"]["p50"] / 1e3 / r["read_seconds"]
    ),
    "ready, s": lambda r: r["ready_seconds"],
}


def cached_share(results: dict[str, Any]) -> float | None:
    """Return the share of prompt tokens of a round from the server's cache, or None if it is unknown.

    vLLM only reports cached tokens of requests that have some, so zero cached tokens look unknown.
    """
    parts = [results[name] for name in ("loaded", "alone", "prefill")]
    counts = [part["cached_prompt_tokens"] for part in parts if part["cached_prompt_tokens"] is not None]
    return sum(counts) / sum(part["prompt_tokens"] for part in parts) if counts else None


def device_ratios(results: dict[str, Any], size: Any, target: Target) -> dict[str, float]:
    """Return a server's ratios to the limits of its device by name."""
    ratios: dict[str, float] = {}
    if target.hbm_bandwidth:
        read = size.matrices * (2 if size.dtype == "bfloat16" else 4) / target.hbm_bandwidth
        ratios["TPOT at batch 1 / one read of the weights"] = results["alone"]["tpot_ms"]["p50"] / 1e3 / read
    if peak := target.peak_flops.get(size.dtype):
        head = size.vocabulary * size.width  # only of the last token
        flops = 2.0 * ((size.matrices - head) * size.prompt + head)
        ratios["FLOP/s of a prompt / peak"] = flops / (results["prefill"]["ttft_ms"]["p50"] / 1e3) / peak
    return ratios


def device_table(rounds: Sequence[dict[str, Any]], names: Sequence[str], size: Any, target: Target) -> str:
    """Return a table of each server's ratios to the limits of the device. They are medians over the rounds."""
    each = {name: [device_ratios(r[name], size, target) for r in rounds] for name in names}
    lines = [f"| {target.name} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for title in each[names[0]][0]:
        medians = [f"{statistics.median(ratios[title] for ratios in each[name]):.3g}" for name in names]
        lines.append(f"| {title} | {' | '.join(medians)} |")
    return "\n".join(lines)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of greedy tokens before the first difference of each prompt."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / total


def table(rounds: Sequence[dict[str, Any]], names: Sequence[str], *, on_cpu: bool) -> str:
    """Return a table of medians over the rounds, and medians of each round's ratios."""
    lines = ["| figure | " + " | ".join(names) + " | " + " | ".join(f"axlearn / {n}" for n in names[1:]) + " |"]
    lines.append("|---|" + "---|" * (2 * len(names) - 1))
    figures = FIGURES if on_cpu else {k: v for k, v in FIGURES.items() if "all cores" not in k}
    for title, value in figures.items():
        medians = [
            f"{statistics.median(value(r[n]) for r in rounds):.{2 if '/ one read' in title else 1}f}" for n in names
        ]
        ratios = [statistics.median(value(r["axlearn"]) / value(r[n]) for r in rounds) for n in names[1:]]
        lines.append(f"| {title} | {' | '.join(medians)} | {' | '.join(f'{r:.2f}' for r in ratios)} |")
    cached = [[share for r in rounds if (share := cached_share(r[n])) is not None] for n in names]
    cells = [f"{max(shares):.1%}" if shares else "not reported" for shares in cached]
    lines.append(f"| prompt tokens that were cached, most | {' | '.join(cells)} |{' |' * len(names[1:])}")
    shares = [min(agreement(r["axlearn"]["greedy"], r[n]["greedy"]) for r in rounds) for n in names[1:]]
    lines.append(
        f"| greedy tokens that agree, least | {'|'.join(' ' for _ in names)} | {' | '.join(f'{s:.1%}' for s in shares)} |"
    )
    return "\n".join(lines)
