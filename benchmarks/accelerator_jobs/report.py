"""The result as Markdown and JSON, rewritten after each change. Does not import JAX."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerator_jobs.findings import disagreements, findings

REHEARSAL = (
    "**Rehearsal: every part ran at toy size on a CPU. No figure on this page is a measurement of an accelerator or of this"
    " project's speed.**"
)
HIDDEN = {"name", "step_seconds_all", "all", "notes", "settings", "features", "calls", "samples"}
"""Figures that are only in the JSON file."""


class Report:
    """Writes `accelerator.md` and `accelerator.json`.

    Args:
        out: Output folder.
        header: Facts that are known before the run.
    """

    def __init__(self, out: Path, header: Mapping[str, Any]):
        self.markdown, self.json = out / "accelerator.md", out / "accelerator.json"
        self._header = dict(header)

    def publish(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Replace both files atomically, so readers never see a partial file."""
        goals = [vars(f) | {"verdict": f.verdict} for f in findings(results)]
        if self._header["rehearsal"]:
            goals = []  # ratios at toy size are meaningless
        data = {**self._header, "goals": goals, "parts": results}
        _replace(self.json, json.dumps(data, indent=1) + "\n")
        _replace(self.markdown, "\n".join(self._lines(results)) + "\n")

    def _lines(self, results: Sequence[Mapping[str, Any]]) -> list[str]:
        header = self._header
        lines = [f"# Accelerator benchmark, {header['started']}", ""]
        if header["rehearsal"]:
            lines += [REHEARSAL, ""]
        lines += [f"`{header['command']}`", "", "| | |", "|---|---|"]
        facts = {"host": header["machine"]["host"], **(header["machine"]["gpu"] or {"gpu": "none"}), **_device(results)}
        lines += [f"| {k} | {v} |" for k, v in facts.items()]
        lines += [f"| {k} | {v} |" for k, v in header["versions"].items()]
        lines += [f"| commit | {header['commit']} |", ""]
        lines += [f"- not installed: {m}" for m in header["missing"]]
        if not header["rehearsal"]:
            lines += ["", *_goal_lines(results), *_priority_lines(results)]
        for part in results:
            lines += ["", f"## {part['title']}"]
            for job in part["jobs"]:
                lines += ["", *_job_lines(job)]
        return lines


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _device(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return JAX's description of the device, after a job has queried it."""
    rows = [
        r for part in results for job in part["jobs"] for r in job["rows"] if r["name"] == "device" and "client" in r
    ]
    return {"device of JAX": rows[0]["kind"], "client": " ".join(str(rows[0]["client"]).split())} if rows else {}


def _goal_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| goal | measured | to reach | | conditions |", "|---|---|---|---|---|"]
    for f in findings(results):
        value = "-" if f.value is None else f"{f.value:.3f}"
        lines.append(f"| {f.name} | {value} | {'≤' if f.below else '≥'} {f.goal:g} | {f.verdict} | {f.note} |")
    return lines


def _priority_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the changes that the results suggest for `axlearn_plugins_gpu/choices.py`."""
    lines = disagreements(results)
    return ["", "Priorities that these results contradict:", "", *(f"- {line}" for line in lines)] if lines else []


def _job_lines(job: Mapping[str, Any]) -> list[str]:
    took = f" after {job['seconds']:.1f} s" if "seconds" in job else ""
    lines = [f"### {job['job']}: {job['status']}{took}"]
    if job.get("command"):
        lines += ["", f"`{job['command']}`"]
    if job.get("device"):
        clocks = (f"{k} {v[0]:g} / {v[1]:g} / {v[2]:g}" for k, v in job["device"].items() if isinstance(v, list))
        lines += ["", f"Under load (least / median / most): {', '.join(clocks)}."]
    if job.get("reason"):
        lines += ["", f"**{job['reason']}**"]
    if job.get("output"):
        lines += ["", "```text", job["output"].strip(), "```"]
    rows = [r for r in job["rows"] if r["name"] != "device"]
    return lines + (["", *_table(rows)] if rows else [])


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the figures. Text goes into the last column."""
    columns = list(dict.fromkeys(k for r in rows for k, v in r.items() if k not in HIDDEN and _is_figure(v)))
    lines = [f"| | {' | '.join(columns)} | |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        cells = [format_figure(c, row[c]) if _is_figure(row.get(c)) else "" for c in columns]
        words = [
            f"{k}: {_words(v)}" for k, v in row.items() if k not in HIDDEN and not _is_figure(v) and v not in (None, [])
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {'; '.join(words)} |".replace("\n", " "))
    return lines


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _words(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "/")[:300]


def format_figure(name: str, value: float) -> str:
    """Format a figure with the unit for its name."""
    if name.endswith("flops_per_second"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if name.endswith("bytes_per_second") or name == "bandwidth":
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith("seconds"):
        return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
    if "bytes" in name:
        return f"{value / 2**30:.3g} GiB" if value >= 2**28 else f"{value / 2**20:.3g} MiB"
    if name.startswith("model_flops"):
        return f"{value / 1e12:.4g} TFLOP"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
