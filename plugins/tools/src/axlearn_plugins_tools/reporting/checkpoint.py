"""`axlearn checkpoint list` and `inspect`: list the checkpoints of a run, and their arrays.

The commands read manifests, not arrays. They import JAX only for checkpoints that another library wrote.
"""

from typing import TYPE_CHECKING, Any

import click

from axlearn_core.cli.common import json_option, no_devices, print_json, print_table
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import CheckpointError, counted
from axlearn_core.run import Run

if TYPE_CHECKING:
    from axlearn_core.checkpoint.manifest import Checkpoints, Manifest
    from axlearn_core.contracts.storage import ForeignCheckpoints

run_dir_argument = click.argument("run_dir", metavar="RUN_DIR|URI")


@click.command("list")
@run_dir_argument
@json_option
def list_(run_dir: str, as_json: bool) -> None:
    """List the checkpoints of a run, oldest first.

    RUN_DIR may be a URI, or the folder that contains the steps.
    """
    no_devices()
    run = Run(run_dir)
    place, foreign = run.checkpoints, run.foreign_checkpoints
    foreign_steps = () if foreign is None else foreign.steps()
    rows = [
        _row(place, foreign if step in foreign_steps else None, step)
        for step in sorted({*place.steps(), *foreign_steps})
    ]
    if foreign is not None:
        listed = ", ".join(map(str, foreign_steps))
        echo(
            f"note: {foreign.writer} wrote step {listed} without a manifest, so the files cannot be verified", err=True
        )
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo(f"{place.name} has no checkpoint yet", err=True)
        return
    for row in rows:
        row["metrics"] = "  ".join(f"{k} {v:.4g}" for k, v in row["metrics"].items())
        row["size"] = _size(row["bytes"]) if row["bytes"] else ""
    print_table(rows, ("step", "created", "arrays", "size", "state", "metrics"))


@click.command()
@run_dir_argument
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint (default: the newest).")
@click.option("--verify", is_flag=True, help="Verify the hash of every file first.")
@json_option
def inspect(run_dir: str, step: int | None, verify: bool, as_json: bool) -> None:
    """List the arrays of a checkpoint in RUN_DIR: path, shape, dtype."""
    no_devices()
    run = Run(run_dir)
    place, foreign = run.checkpoints, run.foreign_checkpoints
    foreign_steps = () if foreign is None else foreign.steps()
    steps = sorted({*place.steps(), *foreign_steps})
    if not steps:
        raise CheckpointError(f"{place.name} has no checkpoint")
    number = steps[-1] if step is None else step
    foreign = foreign if number in foreign_steps else None
    if verify and foreign is not None:
        raise CheckpointError(
            f"{foreign.writer} wrote the checkpoint of step {number} in {place.name} without a manifest, "
            "so its files cannot be verified\n    fix: remove --verify"
        )
    manifest = place.verify(number) if verify else _describe(place, foreign, number)
    rows = [{"name": a.path, "shape": a.shape, "dtype": a.dtype} for a in manifest.arrays.values()]
    if as_json:
        print_json(rows)
        return
    verified = "; all files match their hashes" if verify else ""
    files = (
        f", {_size(manifest.bytes)} in {counted(manifest.num_files, 'file')}"
        if manifest.files
        else "; without a manifest"
    )
    echo(f"step {manifest.step}: {counted(len(rows), 'array')}{files}{verified}", err=True)
    print_table([{**r, "shape": " x ".join(map(str, r["shape"])) or "()"} for r in rows], ("name", "shape", "dtype"))


def _describe(place: "Checkpoints", foreign: "ForeignCheckpoints | None", step: int) -> "Manifest":
    """Return the manifest of a checkpoint. The manifest lists no files if the step is in `foreign`."""
    from axlearn_core.checkpoint.manifest import ArrayInfo, Manifest

    if foreign is None:
        return place.inspect(step)
    return Manifest(step, {path: ArrayInfo(path, *array) for path, array in foreign.arrays(step).items()}, {}, {})


def _row(place: "Checkpoints", foreign: "ForeignCheckpoints | None", step: int) -> dict[str, Any]:
    from axlearn_core.checkpoint.manifest import FormatError

    row: dict[str, Any] = {"name": str(step), "step": step, "created": "", "arrays": 0, "bytes": 0, "metrics": {}}
    try:
        manifest = _describe(place, foreign, step)
    except FormatError as error:
        return {**row, "state": f"format {error.format}"}
    except CheckpointError:
        return {**row, "state": "damaged"}
    facts = {
        "created": manifest.created,
        "arrays": len(manifest.arrays),
        "bytes": manifest.bytes,
        "metrics": manifest.metrics,
    }
    return {**row, **facts, "state": "complete" if manifest.files else "unverified"}


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
