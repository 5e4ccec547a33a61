"""`axlearn report`: a run as one HTML page."""

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html: loss, throughput, step times, samples, and the config with who set what.

    The page is one file that needs nothing else. Its path goes to standard output.
    """
    from axlearn_plugins_reporting import write_report

    click.echo(write_report(run_dir))
