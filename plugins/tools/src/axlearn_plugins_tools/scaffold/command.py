"""`axlearn plugins new`."""

import shlex
from pathlib import Path

import click
import importlib_metadata

from axlearn_core.cli.common import json_option, print_json
from axlearn_core.cli.terminal import echo
from axlearn_core.plugins.registry import registry
from axlearn_plugins_tools.scaffold.write import write_plugin


@click.command()
@click.argument("name")
@click.option("--path", type=click.Path(path_type=Path), help="Output folder (default: ./axlearn-plugins-NAME).")
@json_option
def new(name: str, path: Path | None, as_json: bool) -> None:
    """Create a plugin package with a layer, a feature that uses it, and tests.

    NAME is the name of the layer and the feature. The package declares their entry points.
    """
    folder = path or Path(f"axlearn-plugins-{name}")
    written = write_plugin(name, folder, registry(), importlib_metadata.version("axlearn-core"))
    if as_json:
        print_json([{"name": str(file)} for file in written])
        return
    echo("\n".join(map(str, written)))
    echo(f'try next:\n  pip install -e "{folder}[test]"\n  pytest {shlex.quote(str(folder))}', err=True)
