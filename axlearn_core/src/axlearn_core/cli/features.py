"""`axlearn features`: config modifiers by name."""

from typing import Any

import click

from axlearn_core.cli.common import entry_row, json_option, no_devices, print_entries, print_json
from axlearn_core.cli.terminal import echo
from axlearn_core.plugins.registry import registry


@click.group()
def features() -> None:
    """Features: what `--with` adds to an experiment."""


@features.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the features that are installed; none is imported."""
    print_entries("features", as_json)


@features.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show what the feature NAME does, and its options."""
    no_devices()
    row = _feature_row(name)
    if as_json:
        print_json([row])
        return
    echo(f"{click.style(name, bold=True)}  ({row['distribution']} {row['version']}, stage: {row['stage']})\n")
    echo(f"{row['description']}\n")
    for kind in ("needs", "excludes", "before", "after"):
        if row[kind]:
            echo(f"{kind}: {', '.join(row[kind])}")
    if row["options"]:
        echo("options:")
    for option in row["options"]:
        default = (
            "has to be given"
            if option["default"] == "REQUIRED"
            else f"default: {option['default'].replace('None', 'null')}"
        )
        echo(f"    {option['name']}: {option['type']}  ({default})")


def _feature_row(name: str) -> dict[str, Any]:
    import inspect

    import attrs

    from axlearn_core.config.node import hints_of
    from axlearn_core.config.types import describe

    names = registry()
    cls, hints = names.feature(name), hints_of(names.feature(name))
    options = [{"name": a.name, "type": describe(hints[a.name]), "default": repr(a.default)} for a in attrs.fields(cls)]
    return {
        **entry_row(names.entry("features", name)),
        "stage": cls.stage,
        "needs": cls.needs,
        "excludes": cls.excludes,
        "before": cls.before,
        "after": cls.after,
        "description": inspect.getdoc(cls) or "(it has no description)",
        "options": options,
    }
