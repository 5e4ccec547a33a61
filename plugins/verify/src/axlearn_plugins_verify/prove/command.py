"""`axlearn prove`."""

import json
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import experiment_argument, request_options
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_plugins_verify.compat import hide_partitioner_warnings


@click.command()
@experiment_argument
@request_options
@click.option("--only", multiple=True, metavar="PROPERTY", help="Check this property; repeatable (default: all).")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True, help="Time limit."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of weights and batches.")
@click.option("--seeds", type=click.IntRange(min=1), default=2, show_default=True, help="Number of seeds.")
@click.option(
    "--mesh", metavar="AXIS=N,...", help="Check only this mesh (default: meshes that together cover every axis)."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that check properties (default: 2 if there are 2 cores).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.html", help="Write a page.")
def prove(
    request: Any,
    only: tuple[str, ...],
    minutes: float,
    seed: int,
    seeds: int,
    mesh: str | None,
    jobs: int | None,
    as_json: bool,
    report: Path | None,
) -> None:
    """Check that a config computes what it says, on a small copy of it.

    Shrinks the config until this machine can train it, and checks properties such as: a mesh gives the gradients of one
    device, packed documents equal separate ones, and a later token never changes an earlier logit. Reads no data. Exits with
    code 1 if a property does not hold, and names the smallest request that still fails.
    """
    hide_partitioner_warnings()
    from axlearn_core.train.trackers import writing
    from axlearn_plugins_verify.prove import proof
    from axlearn_plugins_verify.prove import proof_report as reports
    from axlearn_plugins_verify.prove.checks import default_jobs

    width = max(len(name) for name in proof.select(only))
    result = proof.prove(
        request,
        only=only,
        minutes=minutes,
        seed=seed,
        seeds=seeds,
        mesh=None if mesh is None else _parse_mesh(mesh),
        jobs=default_jobs() if jobs is None else jobs,
        progress=lambda check: None if as_json else echo(reports.line(check, width)),
    )
    if report is not None:
        with writing(report):
            report.write_text(reports.page(result), "utf-8")
    echo(json.dumps(reports.as_json(result), indent=2) if as_json else reports.summary(result))
    if not result.holds:
        raise SystemExit(1)


def _parse_mesh(text: str) -> dict[str, int]:
    """Parse the sizes of a mesh's axes."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(axis.strip() and size.strip().isdigit() for axis, _, size in pairs):
        raise RequestError(
            f"--mesh: not a mesh\n    got: {text}\n    expected: axes with sizes\n    fix: --mesh data=2,tensor=2"
        )
    return {axis.strip(): int(size) for axis, _, size in pairs}
