"""`axlearn checkpoint export-orbax` and `import-orbax`."""

from collections.abc import Sequence

import click

from axlearn_core.cli.terminal import echo
from axlearn_core.errors import counted

LAYOUTS = ("maxtext", "tunix", "plain")


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("out", metavar="OUT")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Step of the checkpoint (default: newest).")
@click.option("--layout", type=click.Choice(LAYOUTS), default="maxtext", help="Layout to write (default: maxtext).")
@click.option("--item", metavar="NAME", help="Name of the Orbax item (default: by layout).")
@click.option("--ocdbt/--no-ocdbt", default=True, help="Store arrays in one database (default: on).")
@click.option("--zarr3/--no-zarr3", default=True, help="Use zarr version 3, not 2 (default: on).")
@click.option("--compression/--no-compression", default=True, help="Compress with zstd (default: on).")
def export_orbax(
    run_dir: str, out: str, step: int | None, layout: str, item: str | None, ocdbt: bool, zarr3: bool, compression: bool
) -> None:
    """Export the parameters of a run to OUT/STEP as an Orbax checkpoint.

    The parameters keep their names, in the tree layout of MaxText, Tunix or
    plain Orbax.
    """
    from axlearn_plugins_orbax.compat import ArrayFormat
    from axlearn_plugins_orbax.transfer import export_run

    array_format = ArrayFormat(ocdbt=ocdbt, zarr3=zarr3, compression=compression)
    echo(str(export_run(run_dir, out, step=step, layout=layout, item=item, array_format=array_format)))


@click.command()
@click.argument("directory", metavar="DIR|URI")
@click.argument("out", metavar="RUN_DIR")
@click.option(
    "--config",
    required=True,
    metavar="EXPERIMENT|FILE.yaml|RUN_DIR",
    help="Experiment whose model has the same parameters as the checkpoint.",
)
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="Add a feature.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a config value of the new run.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Step to import (default: newest).")
@click.option("--layout", type=click.Choice(LAYOUTS), help="Layout of the parameters (default: detect).")
@click.option("--item", metavar="NAME", help="Orbax item with the parameters (default: detect).")
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
    """Create a run in RUN_DIR from the parameters of an Orbax checkpoint.

    The run starts at step 0 with a new optimizer state.
    """
    from axlearn_core.cli.next_steps import after_import, print_next_steps
    from axlearn_plugins_orbax.transfer import import_checkpoint

    weights = import_checkpoint(directory, out, config, step=step, layout=layout, item=item, with_=with_, set=set_)
    arrays = counted(len(weights.ignored), "other array")
    ignored = f"; ignored {arrays}, such as {weights.ignored[0]}" if weights.ignored else ""
    echo(
        f"{weights.layout.name}: {weights.functional.num_parameters:,} parameters from {weights.trees.path}{ignored}",
        err=True,
    )
    print_next_steps(after_import(out))
    echo(out)
