"""`axlearn runs compare`: show where two runs diverge."""

import json
from pathlib import Path

import attrs
import click

from axlearn_core.cli.common import no_devices
from axlearn_core.cli.terminal import echo
from axlearn_plugins_tools.reporting.comparison import TOLERANCE


@click.command("compare")
@click.argument("first", metavar="RUN_A|URI")
@click.argument("second", metavar="RUN_B|URI")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=TOLERANCE,
    show_default=True,
    help="Largest relative difference between two scalars that counts as rounding error.",
)
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint to compare (default: the last common one).")
@click.option(
    "--no-arrays", is_flag=True, help="Compare checkpoints by the hashes of their files, without reading arrays."
)
@click.option("--report", metavar="FILE.html", type=click.Path(path_type=Path), help="Also write an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(
    first: str, second: str, tolerance: float, step: int | None, no_arrays: bool, report: Path | None, as_json: bool
) -> None:
    """Show where two runs diverge: config, seeds, data, versions, recorded steps and checkpoints.

    Timings are not compared. The exit code is 0 if nothing differs, and 1 if anything does.
    """
    from axlearn_core.errors import RequestError
    from axlearn_plugins_tools.reporting.comparison import compare_runs, open_run
    from axlearn_plugins_tools.reporting.comparison_text import to_json, to_text

    if no_arrays and step is not None:
        raise RequestError(
            f"--step {step} selects the arrays to compare, but --no-arrays skips them\n    fix: remove one of them"
        )
    no_devices()
    runs = open_run(first), open_run(second)
    comparison = compare_runs(*runs, tolerance=tolerance)
    if not no_arrays and (step is not None or comparison.checkpoints.differing):
        from axlearn_plugins_tools.reporting.checkpoint_arrays import compare_checkpoints

        comparison = attrs.evolve(comparison, checkpoints=compare_checkpoints(*runs, comparison.checkpoints, step))
    if report is not None:
        from axlearn_plugins_tools.reporting.comparison_page import write_page

        write_page(report, comparison, *runs)
    echo(json.dumps(to_json(comparison), indent=2, ensure_ascii=False) if as_json else to_text(comparison))
    if not comparison.equal:
        raise SystemExit(1)
