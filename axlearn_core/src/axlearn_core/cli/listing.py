"""The `axlearn experiments`, `axlearn features` and `axlearn plugins` commands, which list what plugins provide."""

from typing import Any

import click

from axlearn_core.cli.common import json_option, no_devices, print_json, print_table
from axlearn_core.cli.main import Group
from axlearn_core.cli.terminal import echo
from axlearn_core.plugins.registry import GROUPS, Entry, registry, singular


@click.group()
def experiments() -> None:
    """List experiments, which are complete configs."""


@experiments.command("list")
@json_option
def list_experiments(as_json: bool) -> None:
    """List the installed experiments."""
    _print_entries("experiments", as_json)


@click.group()
def features() -> None:
    """List features, which `--with` adds to an experiment, or describe one."""


@features.command("list")
@json_option
def list_features(as_json: bool) -> None:
    """List the installed features without importing them."""
    _print_entries("features", as_json)


@features.command("show")
@click.argument("name")
@json_option
def show_feature(name: str, as_json: bool) -> None:
    """Describe the feature NAME and its options."""
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
            "required" if option["default"] == "REQUIRED" else f"default: {option['default'].replace('None', 'null')}"
        )
        echo(f"    {option['name']}: {option['type']}  ({default})")


@click.group(cls=Group)
def plugins() -> None:
    """List, check and create plugins.

    axlearn-plugins-tools adds `doctor` and `new`.
    """


@plugins.command("list")
@json_option
def list_plugins(as_json: bool) -> None:
    """List installed distributions, without importing them.

    Prints how many entry points of each kind a distribution registers.
    """
    rows = _distributions()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["registers"] = ", ".join(
            f"{len(row[g])} {g.replace('_', ' ') if len(row[g]) > 1 else singular(g)}" for g in GROUPS if row[g]
        )
    print_table(rows, ("name", "version", "registers"))


@plugins.command("show")
@click.argument("name")
@json_option
def show_plugin(name: str, as_json: bool) -> None:
    """List entry points by distribution or by name.

    Prints the entry points of the distribution NAME, and entry points called NAME, without importing them.
    """
    claims = [e for group in GROUPS for es in registry().claims[group].values() for e in es]
    entries = [e for e in claims if name in (e.distribution, e.name)]
    if not entries:
        from axlearn_core.errors import unknown

        names = {e.distribution for e in claims} | {e.name for e in claims}
        raise unknown("plugin", name, names, listing="axlearn plugins list")
    rows = [{**_entry_row(e), "group": e.group} for e in entries]
    print_json(rows) if as_json else print_table(rows, ("group", "name", "value", "distribution", "version"))


def _print_entries(group: Any, as_json: bool) -> None:
    """Print the features or experiments with a summary of each. Mark those that cannot be used."""
    from axlearn_core.cli.summaries import parameter_count, summary

    listed = registry().list_entries(group)
    rows = []
    for entry, problem in listed:
        row = _entry_row(entry) | {"summary": summary(entry.value)}
        if group == "experiments":
            row["parameters"] = parameter_count(entry.value)
        rows.append(row | ({"problem": problem} if problem else {}))
    if as_json:
        print_json(rows)
        return
    problems = any(problem for _, problem in listed)
    columns = [
        "name",
        *(("parameters",) if group == "experiments" else ()),
        *(("distribution", "problem") if problems else ()),
        "summary",
    ]
    print_table([{"problem": ""} | {k: "-" if v is None else v for k, v in row.items()} for row in rows], columns)
    if problems:
        echo("for details, run `axlearn plugins doctor`", err=True)


def _entry_row(entry: Entry) -> dict[str, Any]:
    """Return the row for an entry point in `list`."""
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "value": entry.value,
    }


def _feature_row(name: str) -> dict[str, Any]:
    import inspect

    import attrs

    from axlearn_core.config.node import resolve_hints
    from axlearn_core.config.types import describe

    names = registry()
    cls, hints = names.feature(name), resolve_hints(names.feature(name))
    options = [{"name": a.name, "type": describe(hints[a.name]), "default": repr(a.default)} for a in attrs.fields(cls)]
    return {
        **_entry_row(names.entry("features", name)),
        "stage": cls.stage,
        "needs": cls.needs,
        "excludes": cls.excludes,
        "before": cls.before,
        "after": cls.after,
        "description": inspect.getdoc(cls) or "(no description)",
        "options": options,
    }


def _distributions() -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        for claims in registry().claims[group].values():
            for entry in claims:
                empty = {"name": entry.distribution, "version": entry.version, **{g: [] for g in GROUPS}}
                rows.setdefault(entry.distribution, empty)[group].append(entry.name)
    return [rows[name] for name in sorted(rows)]
