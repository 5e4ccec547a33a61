"""`axlearn report`: write an HTML page about a run."""

import shutil
import tempfile
from pathlib import Path

import click

from axlearn_core.cli.terminal import echo
from axlearn_core.train.trackers import writing


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
def report(run_dir: str) -> None:
    """Write RUN_DIR/report.html, a page about the run.

    The page shows losses, throughput, step times, samples and the config. It is self-contained, and shows the origin of each
    config value. The command prints its path. For a run at a URI, it writes the page to the local working copy, such as
    `runs/s3/bucket/run/report.html`.
    """
    from axlearn_plugins_tools.reporting import write_report

    if "://" not in run_dir:
        echo(write_report(Path(run_dir)))
        return
    from axlearn_core.checkpoint import open_storage
    from axlearn_core.run.working_copy import fetch_files, strip_slashes, working_copy

    uri = strip_slashes(run_dir)
    with tempfile.TemporaryDirectory() as folder:  # a local trainer may be using the working copy
        fetch_files(open_storage(uri), uri, Path(folder))
        page = write_report(Path(folder), name=uri)
        target = working_copy(uri) / page.name
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, target)
    echo(target)
