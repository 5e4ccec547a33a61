"""The command line of `axlearn bench scale`."""

import json
from pathlib import Path

import click

from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError, nearest

SMALLEST = 64
PARTS = ("save", "restore", "join", "watch", "launch")
STORAGES = ("s3-like", "gcs-like", "lustre-like", "nfs-like")


@click.command()
@click.option("--processes", type=click.IntRange(1, 65536), default=8192, show_default=True, help="Largest job.")
@click.option("--storage", type=click.Choice(STORAGES), default="s3-like", show_default=True, help="Storage model.")
@click.option("--part", "parts", default=",".join(PARTS), show_default=True, help="Parts, separated by commas.")
@click.option("--arrays", type=click.IntRange(1, 10_000), default=45, show_default=True, help="Sharded arrays.")
@click.option(
    "--state-bytes", type=click.IntRange(0), default=16 * 2**20, show_default=True, help="State per process, in bytes."
)
@click.option(
    "--sample", type=click.IntRange(2, 64), default=8, show_default=True, help="Processes that run real code."
)
@click.option("--picture", metavar="FILE.svg", help="Write a chart of the costs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def scale(
    processes: int,
    storage: str,
    parts: str,
    arrays: int,
    state_bytes: int,
    sample: int,
    picture: str | None,
    as_json: bool,
) -> None:
    """Simulate jobs of 64 and more processes, and show how their costs grow.

    Requests and bytes are counted. Seconds follow from a model of the storage. Only a
    sample of the processes runs the code of a save, a restore, a start or a heartbeat;
    the sample includes process 0, which receives the messages of all processes. The
    part `launch` runs the launcher, with simulated hosts in place of Ray's actors.
    """
    names = parts.split(",")
    for name in names:
        if name not in PARTS:
            raise RequestError(
                f"--part: unknown part {name!r}\n    expected: {', '.join(PARTS)}\n"
                f"    nearest: {', '.join(nearest(name, PARTS)) or 'none'}"
            )
    path = None if picture is None else Path(picture)
    if path is not None and (path.suffix != ".svg" or not path.parent.is_dir()):
        raise RequestError(
            f"--picture: got {picture}\n    expected: a file that ends in .svg, in an existing directory"
        )
    from axlearn_plugins_runtime.scale import cost_report
    from axlearn_plugins_runtime.scale.simulation import simulate
    from axlearn_plugins_runtime.scale.storage_models import MODELS

    model, sizes = MODELS[storage], _list_sizes(processes)
    costs = []
    for size in sizes:
        running = "" if names == ["launch"] else f" and running {min(sample, size)} of them"
        echo(f"simulating {size:,} processes{running}", err=True)
        costs += simulate(names, size, model, arrays=arrays, state_bytes=state_bytes, sample=sample)
    costs.sort(key=lambda cost: names.index(cost.part))
    if path is not None:
        path.write_text(cost_report.picture(costs))
    if as_json:
        facts = {
            "storage": storage,
            "source": " ".join(model.source.split()),
            "arrays": arrays,
            "state_bytes": state_bytes,
        }
        echo(json.dumps(cost_report.as_json(costs, {**facts, "sample": sample}), indent=2))
        return
    echo(cost_report.table(costs))
    if names != ["launch"]:
        echo(f"\nstorage: {model.title}. {' '.join(model.source.split())}")


def _list_sizes(processes: int) -> list[int]:
    """Return the numbers of processes to simulate: 64 and its multiples by 4, and the largest."""
    sizes = [SMALLEST * 4**i for i in range(8) if SMALLEST * 4**i < processes]
    return [*sizes, processes]
