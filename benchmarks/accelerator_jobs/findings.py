"""Conclusions from the rows of several jobs: ratios, goals, and kernel priorities to change. Does not import JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by job and row."""


@dataclass(frozen=True)
class Finding:
    """One figure and its goal.

    Attributes:
        value: Measured value, or None.
        goal: Target value.
        below: Whether smaller is better.
        note: Conditions of the measurement.
    """

    name: str
    value: float | None
    goal: float
    below: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """One of reached, missed or not measured."""
        if self.value is None:
            return "not measured"
        return "reached" if (self.value <= self.goal if self.below else self.value >= self.goal) else "missed"


def rows_of(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the rows of all jobs."""
    return {job["job"]: {r["name"]: r for r in job["rows"]} for part in results for job in part["jobs"]}


def findings(results: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the figures that have goals."""
    rows = rows_of(results)
    best = _value(rows, "1b", OURS, "tokens_per_second")
    entries = []
    for shape in ("1b", "3b", "7b-layers"):
        entries.append(Finding(f"MFU in bf16, {shape}", _best_mfu(rows, shape), 0.55, note="full attention; aim 0.62"))
    for shape in ("1b", "3b", "7b-layers"):
        ratio, note = speedup(rows, shape)
        entries.append(Finding(f"tokens/s over torch.compile, {shape}", ratio, 1.15, note=note))
    fp8 = _value(rows, "variants-1b", "fp8, scan", "tokens_per_second")
    entries.append(Finding("tokens/s in fp8 over bf16, 1b", _ratio(fp8, best), 1.35, note="both scanned, same policy"))
    share, note = _attention(rows)
    entries.append(Finding("attention forward over the matmul peak", share, 0.75, note=note))
    memory = _value(rows, "plan", "comparison", "memory_ratio")
    error = None if memory is None else abs(memory - 1)
    entries.append(Finding("error of the plan's memory", error, 0.05, below=True, note="1b"))
    for name, row in rows.get("decode", {}).items():
        if name.startswith("batch"):
            entries.append(Finding(f"decode {name} over the bandwidth limit", row.get("bandwidth_share"), 0.7))
    return entries


OURS, THEIRS = "bfloat16, scan", "torch.compile"


def speedup(rows: Rows, shape: str) -> tuple[float | None, str]:
    """Return the ratio of our tokens per second to PyTorch's, and the conditions."""
    ours, theirs = rows.get(shape, {}).get(OURS, {}), rows.get(f"pytorch-{shape}", {}).get(THEIRS, {})
    ratio = _ratio(ours.get("tokens_per_second"), theirs.get("tokens_per_second"))
    if ratio is None:
        return None, theirs.get("skipped") or theirs.get("error") or ""
    if ours.get("parameters") != theirs.get("parameters"):
        return None, f"not the same model: {ours.get('parameters')} parameters, PyTorch {theirs.get('parameters')}"
    note = f"batch {ours.get('batch')}, PyTorch {theirs.get('batch')}"
    return ratio, note + (", layers checkpointed" if theirs.get("checkpointed") else "")


def _best_mfu(rows: Rows, shape: str) -> float | None:
    """Return the best MFU of all bf16 variants."""
    jobs = [rows.get(shape, {}), rows.get(f"variants-{shape}", {})]
    values = [r.get("mfu_full") for job in jobs for name, r in job.items() if name.startswith("bfloat16")]
    return max((f for f in values if f is not None), default=None)


def _attention(rows: Rows) -> tuple[float | None, str]:
    results = [
        (r["forward_share"], n) for n, r in rows.get("attention", {}).items() if r.get("forward_share") is not None
    ]
    return max(results, default=(None, ""))


def disagreements(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the shapes for which the attention kernel with the highest priority is not the fastest.

    Compares the time of forward and backward together.
    """
    shapes: dict[str, list[tuple[float, int, str]]] = {}
    for name, row in rows_of(results).get("attention", {}).items():
        if row.get("both_seconds") is not None:
            shape, kernel = name.split(" ", 1)
            shapes.setdefault(shape, []).append((row["both_seconds"], row["priority"], kernel))
    lines = []
    for shape, timed in shapes.items():
        fastest, preferred = min(timed), max(timed, key=lambda t: t[1])
        if fastest != preferred:
            lines.append(
                f"attention {shape}: {fastest[2]} takes {fastest[0] / preferred[0]:.2f} of the time of {preferred[2]},"
                f" which has the higher priority ({preferred[1]}, not {fastest[1]})"
            )
    return lines


def _value(rows: Rows, job: str, row: str, figure: str) -> Any:
    return rows.get(job, {}).get(row, {}).get(figure)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None
