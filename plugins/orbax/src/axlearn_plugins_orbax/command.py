"""`axlearn checkpoint export-orbax` and `import-orbax`."""

import shlex
from collections.abc import Sequence

import click

from axlearn_core.cli.terminal import echo

LAYOUTS = ("maxtext", "tunix", "plain")


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("out", metavar="OUT")
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint to take (default: the newest).")
@click.option(
    "--layout", type=click.Choice(LAYOUTS), default="maxtext", help="Whose parameter tree to write (default: maxtext)."
)
@click.option("--item", help="Name of Orbax's item (default: items, model_params or state, by the layout).")
@click.option("--ocdbt/--no-ocdbt", default=True, help="Keep all arrays in one database, or each in a folder.")
@click.option("--zarr3/--no-zarr3", default=True, help="Write version 3 of the zarr format, or version 2.")
@click.option("--compression/--no-compression", default=True, help="Compress arrays with zstd, or not.")
def export_orbax(
    run_dir: str, out: str, step: int | None, layout: str, item: str | None, ocdbt: bool, zarr3: bool, compression: bool
) -> None:
    """Write the parameters of RUN_DIR to OUT/STEP as an Orbax checkpoint.

    The names of parameters are those of the run's model. MaxText and Tunix find them where they look for theirs.
    """
    from axlearn_plugins_orbax.compat import ArrayFormat
    from axlearn_plugins_orbax.transfer import export_run

    array_format = ArrayFormat(ocdbt=ocdbt, zarr3=zarr3, compression=compression)
    echo(str(export_run(run_dir, out, step=step, layout=layout, item=item, array_format=array_format)))


@click.command()
@click.argument("directory", metavar="DIR|URI")
@click.argument("out", metavar="RUN_DIR")
@click.option(
    "--config", required=True, metavar="EXPERIMENT|FILE.yaml|RUN_DIR", help="The experiment whose parameters DIR has."
)
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="Add a feature.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
@click.option("--step", type=click.IntRange(min=0), help="The step in DIR to take (default: the newest).")
@click.option("--layout", type=click.Choice(LAYOUTS), help="Whose parameter tree DIR has (default: by its arrays).")
@click.option("--item", help="Orbax's item with the parameters (default: items, model_params, state, or the only one).")
def import_orbax(
    directory: str,
    out: str,
    config: str,
    with_: Sequence[str],
    set_: Sequence[str],
    step: int | None,
    layout: str | None,
    item: str | None,
) -> None:
    """Make a run, in RUN_DIR, with the parameters of the Orbax checkpoint in DIR.

    The run begins at step 0 with a fresh optimizer.
    """
    from axlearn_plugins_orbax.transfer import import_checkpoint

    weights = import_checkpoint(directory, out, config, step=step, layout=layout, item=item, with_=with_, set=set_)
    run = shlex.quote(out)
    ignored = (
        f"; not read: {len(weights.ignored)} other arrays, such as {weights.ignored[0]}" if weights.ignored else ""
    )
    echo(
        f"{weights.layout.name}: {weights.functional.num_parameters:,} parameters from {weights.trees.path}{ignored}\n"
        f"try next:\n  axlearn train {run}/config.yaml --run-dir {run}",
        err=True,
    )
    echo(out)
