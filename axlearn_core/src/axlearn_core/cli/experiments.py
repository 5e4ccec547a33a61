"""`axlearn experiments`: names only, from metadata; no experiment is imported."""

import click

from axlearn_core.cli.common import json_option, print_entries


@click.group()
def experiments() -> None:
    """Experiments: complete configs, ready to train."""


@experiments.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the experiments that are installed."""
    print_entries("experiments", as_json)
