"""`axlearn experiments`: names only, from metadata; no experiment is imported."""

import click

from axlearn_core.cli.common import entry_row, json_option, print_json, print_table
from axlearn_core.plugins.registry import registry


@click.group()
def experiments() -> None:
    """Experiments: complete configs, ready to train."""


@experiments.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the experiments that are installed."""
    rows = [entry_row(entry) for entry in registry().entries("experiments")]
    print_json(rows) if as_json else print_table(rows, ("name", "distribution", "version"))
