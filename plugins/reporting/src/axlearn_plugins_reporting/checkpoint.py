"""`axlearn checkpoint list` and `inspect`: what a run has saved, from the manifests alone.

No arrays are read, and JAX is not imported.
"""

from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import json_option, print_json, print_table
from axlearn_core.errors import CheckpointError

run_dir_argument = click.argument("run_dir", type=click.Path(path_type=Path))


@click.command("list")
@run_dir_argument
@json_option
def list_(run_dir: Path, as_json: bool) -> None:
    """List the checkpoints of RUN_DIR, oldest first."""
    from axlearn_core.checkpoint import manifest

    directory = _directory(run_dir)
    rows = [_row(directory, step) for step in manifest.steps(directory)]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"{directory} has no checkpoint yet", err=True)
        return
    for row in rows:
        row["metrics"] = "  ".join(f"{k} {v:.4g}" for k, v in row["metrics"].items())
        row["size"] = _size(row["bytes"])
    print_table(rows, ("step", "created", "arrays", "size", "state", "metrics"))


@click.command()
@run_dir_argument
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint to look at; default: the newest.")
@click.option("--verify", is_flag=True, help="Compare every file with its hash first.")
@json_option
def inspect(run_dir: Path, step: int | None, verify: bool, as_json: bool) -> None:
    """List the arrays in a checkpoint of RUN_DIR: path, shape, dtype."""
    from axlearn_core.checkpoint import manifest

    directory = _directory(run_dir)
    known = manifest.steps(directory)
    if not known:
        raise CheckpointError(f"{directory} has no checkpoint")
    found = (manifest.verify if verify else manifest.inspect)(directory, known[-1] if step is None else step)
    rows = [{"name": a.path, "shape": a.shape, "dtype": a.dtype} for a in found.arrays.values()]
    if as_json:
        print_json(rows)
        return
    whole = "; every file is what was written" if verify else ""
    click.echo(
        f"step {found.step}: {len(rows)} arrays, {_size(found.bytes)} in {len(found.files)} files{whole}", err=True
    )
    print_table([{**r, "shape": " x ".join(map(str, r["shape"])) or "()"} for r in rows], ("name", "shape", "dtype"))


def _directory(run_dir: Path) -> Path:
    """Where the run keeps its checkpoints: the URI of its config, or a folder of its own."""
    from axlearn_core.checkpoint.storage import resolve
    from axlearn_core.config import parse

    file = run_dir / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{run_dir} is no run directory: it has no config.yaml")
    data = parse(file.read_text(encoding="utf-8"), str(file)).data
    uri = (data.get("checkpointer") or {}).get("uri") if isinstance(data, dict) else None
    return resolve(uri) if uri else run_dir / "checkpoints"


def _row(directory: Path, step: int) -> dict[str, Any]:
    from axlearn_core.checkpoint import manifest

    row: dict[str, Any] = {"name": str(step), "step": step, "created": "", "arrays": 0, "bytes": 0, "metrics": {}}
    try:
        found = manifest.inspect(directory, step)
    except CheckpointError:
        return {**row, "state": "damaged"}
    facts = {"created": found.created, "arrays": len(found.arrays), "bytes": found.bytes, "metrics": found.metrics}
    return {**row, **facts, "state": "complete"}


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
