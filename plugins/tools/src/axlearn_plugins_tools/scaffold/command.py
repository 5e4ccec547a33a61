"""`axlearn plugins new`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import importlib_metadata

from axlearn_core.cli.common import json_option, print_json
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_tools.scaffold.write import check_family, write_family, write_plugin


@click.command()
@click.argument("name", required=False)
@click.option("--family", metavar="MODEL_TYPE", help="Create a family of Hugging Face models instead.")
@click.option("--like", metavar="MODEL_TYPE", help="With --family: the family to start from (default: llama).")
@click.option("--path", type=click.Path(path_type=Path), help="Output folder (default: ./axlearn-plugins-NAME).")
@json_option
def new(name: str | None, family: str | None, like: str | None, path: Path | None, as_json: bool) -> None:
    """Create a plugin package with a layer, a feature that uses it, and tests.

    NAME is the name of the layer and the feature. The package declares their entry points.

    With --family, the package has a family of Hugging Face models instead, an experiment, and tests with a tiny model. The
    family begins as a copy of the installed family --like.
    """
    if (name is None) == (family is None):
        got = "neither" if name is None else "both"
        raise RequestError(f"pass either NAME or --family MODEL_TYPE\n    got: {got}")
    if like is not None and family is None:
        raise RequestError("--like requires --family\n    fix: add --family MODEL_TYPE")
    version = importlib_metadata.version("axlearn-core")
    if family is not None:
        like = like or "llama"
        name = "-".join(check_family(family, registry()))
        folder = path or Path(f"axlearn-plugins-{name}")
        written = write_family(family, like, _describe(like), folder, registry(), version)
    else:
        assert name is not None
        folder = path or Path(f"axlearn-plugins-{name}")
        written = write_plugin(name, folder, registry(), version)
    if as_json:
        print_json([{"name": str(file)} for file in written])
        return
    echo("\n".join(map(str, written)))
    echo(f'try next:\n  pip install -e "{folder}[test]"\n  pytest {shlex.quote(str(folder))}', err=True)


def _describe(like: str) -> Mapping[str, Any]:
    """Return what a new family is written from; see `describe_family` of axlearn-plugins-models."""
    if "describe_family" not in registry().claims["functions"]:
        raise RequestError("--family requires axlearn-plugins-models\n    fix: pip install axlearn-plugins-models")
    return registry().entry("functions", "describe_family").load()(like)
