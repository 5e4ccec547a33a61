"""`axlearn replay`."""

import json
from pathlib import Path

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run", metavar="RUN_DIR|URI")
@click.option("--step", type=click.IntRange(min=1), required=True, metavar="N", help="Step to compute again.")
@click.option(
    "--with",
    "with_",
    multiple=True,
    metavar="FEATURE[:key=value,...]",
    help="Also compute it with a feature; repeatable.",
)
@click.option(
    "--probe", metavar="PATTERN", help="Measure the modules and parameters that match, such as `decoder.**.attention`."
)
@click.option("--shadow", metavar="DTYPE|FEATURE", help="Compare each layer with another execution, such as `float32`.")
@click.option("--bisect", is_flag=True, help="Search for the documents that make the step abnormal.")
@click.option("--allow-drift", is_flag=True, help="Continue even if the config, data, versions or code changed.")
@click.option("--from-start", is_flag=True, help="Begin with the initial state instead of a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.html", help="Write a page.")
def replay(
    run: str,
    step: int,
    with_: tuple[str, ...],
    probe: str | None,
    shadow: str | None,
    bisect: bool,
    allow_drift: bool,
    from_start: bool,
    as_json: bool,
    report: Path | None,
) -> None:
    """Compute a step of a run again, and find what went wrong in it.

    Restores the newest checkpoint before step N, and computes the steps after it with the same data and random keys. Compares
    the scalars, and the checkpoint of step N if there is one, bit by bit. If the step is not finite, names the first tensor and
    the documents that caused it. The run directory does not change. Exits with code 1 if the step is not bit-identical.
    """
    from axlearn_core.train.trackers import writing
    from axlearn_plugins_verify.replay import replay_report as reports
    from axlearn_plugins_verify.replay.step_replay import replay as compute

    result = compute(
        run,
        step=step,
        with_=with_,
        probe=probe,
        shadow=shadow,
        bisect=bisect,
        allow_drift=allow_drift,
        from_start=from_start,
        progress=lambda line: echo(line, err=True),
    )
    if report is not None:
        with writing(report):
            report.write_text(reports.page(result), "utf-8")
    echo(json.dumps(reports.as_json(result), indent=2) if as_json else reports.text(result))
    if result.identical is False:
        raise SystemExit(1)
