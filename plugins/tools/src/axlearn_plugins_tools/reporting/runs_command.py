"""`axlearn runs`: list runs in a table, or compare two runs."""

import time
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import json_option, print_json, print_table
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_core.run import Run as CoreRun
from axlearn_plugins_tools.reporting.comparison import flatten_values
from axlearn_plugins_tools.reporting.run import Run, number, read_run

FILES = ("config.yaml", "run.lock.json", "metrics.jsonl")


@click.command("runs", cls=ExtensibleCommand)
@click.argument("paths", metavar="[FOLDER | RUN_DIR RUN_DIR]", nargs=-1, type=click.Path(path_type=Path))
@json_option
def runs(paths: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in a folder, or compare two runs.

    The list shows each run's last metrics, and the source of a merged, converted or imported run. The default folder is
    `runs`. Runs that cannot be read are marked. `axlearn runs compare` shows where two runs diverge.
    """
    if len(paths) > 2:
        raise RequestError(f"{len(paths)} paths\n    expected: a folder of runs, or two runs to compare")
    if len(paths) == 2:
        rows = compare(*(read_run(path) for path in paths))
        columns = ("name", "first", "second")
    else:
        rows = list_runs(paths[0] if paths else Path("runs"))
        columns = ("name", "step", "of", "loss", "evaluation", "minutes", "changed", "from", "problem")
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo("the runs are identical" if len(paths) == 2 else "there are no runs", err=True)
        return
    print_table(rows, [c for c in columns if any(str(row.get(c, "")) for row in rows)])


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return one row per run in a folder, newest first. The folder may itself be a run."""
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a directory\n    fix: pass the folder that contains the runs")
    paths = [folder] if _is_run(folder) else [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    rows = []
    for path in sorted(paths, key=_change_time, reverse=True):
        try:
            rows.append(_row(path, read_run(path)))
        except (RequestError, OSError) as error:
            problem = str(error).partition("\n")[0]
            rows.append({"name": path.name, **dict.fromkeys(("step", "of", "loss", "evaluation"), ""), "minutes": "",
                         "changed": "", "from": "", "problem": problem})  # fmt: skip
    return rows


def compare(first: Run, second: Run) -> list[dict[str, Any]]:
    """Return the differences between two runs: config values, steps and last metrics."""
    rows = []
    for kind, a, b in (
        ("config", flatten_values(first.config), flatten_values(second.config)),
        ("last", _last(first), _last(second)),
    ):
        rows += [
            {"name": f"{kind}: {name}", "first": _text(a.get(name, "")), "second": _text(b.get(name, ""))}
            for name in dict.fromkeys([*a, *b])
            if a.get(name) != b.get(name)
        ]
    return rows


def _row(path: Path, run: Run) -> dict[str, Any]:
    last = _last(run)
    evaluation = ", ".join(f"{n} {v:.4g}" for n, v in last.items() if n.startswith("eval"))
    seconds = run.seconds
    return {
        "name": path.name,
        "step": run.last_step or _checkpoint_step(run),
        "of": _text(run.config.get("max_steps", "?")),
        "loss": _text(last.get("loss", "")),
        "evaluation": evaluation,
        "minutes": "" if seconds is None else f"{seconds / 60:.1f}",
        "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime(_change_time(path))),
        "from": run.origin or "",
        "problem": run.notes[0][:60] if run.notes else "",
    }


def _checkpoint_step(run: Run) -> int:
    """Return the step of the newest checkpoint of a derived run, which has no metrics yet."""
    steps = CoreRun(run.path).checkpoints.steps() if run.origin else ()
    return max(steps, default=0)


def _last(run: Run) -> dict[str, float]:
    """Return the last finite value of each metric, and the step."""
    values: dict[str, float] = {"step": run.last_step}
    for record in (*run.train, *run.evaluations):
        values |= {n: v for n, x in record.items() if n != "step" and (v := number(x)) is not None}
    return {n: v for n, v in values.items() if n != "elapsed_seconds"}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in FILES)


def _change_time(path: Path) -> float:
    return max((p.stat().st_mtime for p in (path / name for name in FILES) if p.exists()), default=0.0)
