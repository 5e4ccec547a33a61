"""`axlearn plugins`: what is installed. Plugins add commands to it as `plugins-NAME`."""

from typing import Any

import click

from axlearn_core.cli.common import entry_row, json_option, print_json, print_table
from axlearn_core.cli.main import Group
from axlearn_core.plugins.registry import GROUPS, registry


@click.group(cls=Group)
def plugins() -> None:
    """Distributions that add something to axlearn.

    `doctor` and `new` come from axlearn-plugins-tools.
    """


@plugins.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the distributions, and how much each registers; none is imported."""
    rows = _distributions()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["registers"] = ", ".join(
            f"{len(row[g])} {g if len(row[g]) > 1 else g.removesuffix('s')}" for g in GROUPS if row[g]
        )
    print_table(rows, ("name", "version", "registers"))


@plugins.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show all that the distribution NAME registers, or everything that is registered as NAME; none is imported."""
    claims = [e for group in GROUPS for es in registry().claims[group].values() for e in es]
    entries = [e for e in claims if name in (e.distribution, e.name)]
    if not entries:
        from axlearn_core.errors import unknown

        names = {e.distribution for e in claims} | {e.name for e in claims}
        raise unknown("plugin", name, names, listing="axlearn plugins list")
    rows = [{**entry_row(e), "group": e.group} for e in entries]
    print_json(rows) if as_json else print_table(rows, ("group", "name", "value", "distribution", "version"))


def _distributions() -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        for claims in registry().claims[group].values():
            for entry in claims:
                empty = {"name": entry.distribution, "version": entry.version, **{g: [] for g in GROUPS}}
                rows.setdefault(entry.distribution, empty)[group].append(entry.name)
    return [rows[name] for name in sorted(rows)]
