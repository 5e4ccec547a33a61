"""The `axlearn config` command: show, compare, explain, and check configs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import (
    experiment_argument,
    json_option,
    no_devices,
    print_json,
    request_options,
    to_json_value,
)
from axlearn_core.cli.main import Group
from axlearn_core.cli.terminal import echo
from axlearn_core.config import ABSENT, diff, find_missing, flatten, get_fields
from axlearn_core.config.assets import match_asset_paths
from axlearn_core.contracts.capabilities import DeclaresFunctions
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve


@click.group(cls=Group)
@click.pass_context
def config(context: click.Context) -> None:
    """Show, compare, explain and check configs.

    axlearn-plugins-tools adds `bisect`.
    """
    if context.invoked_subcommand in config.commands:  # commands from plugins may compute
        no_devices()


@config.command()
@experiment_argument
@request_options
@click.option("--flat", is_flag=True, help="Print one `path: value` line per value.")
@json_option
def show(request: Request, flat: bool, as_json: bool) -> None:
    """Print the resolved config as YAML.

    Save the YAML to a file, and any command accepts the file in place of EXPERIMENT.
    """
    resolved = resolve(request)
    values = flatten(resolved.config, resolved.names.display_name)
    if as_json:
        print_json([{"name": path, "value": value} for path, value in values.items()])
    elif flat:
        for path, value in values.items():
            echo(f"{click.style(path, fg='cyan')}: {text(value)}")
    else:
        for line in resolved.to_yaml().splitlines():
            echo(re.sub(r"^([ -]*)([^\s:]+:)", lambda m: m[1] + click.style(m[2], fg="cyan"), line))
    for problem in find_missing(resolved.config):
        echo(f"not set: {problem.path}", err=True)


@config.command("diff")
@click.argument("first", metavar="A")
@click.argument("experiment", metavar="B")
@request_options
@click.option("--html", type=click.Path(path_type=Path), help="Draw B as a tree, with changes in green.")
@json_option
def diff_(first: str, request: Request, html: Path | None, as_json: bool) -> None:
    """Print the differences from A to B. The options apply to B."""
    old, new = resolve(first), resolve(request)
    changes = diff(old.config, match_asset_paths(new.config, old.config), new.names.display_name)
    if html is not None:
        draw = new.names.entry("components", "config-tree-picture").load()
        title = " ".join([first, "->", new.title, *(f"+ {name}" for name, _ in new.features)])
        try:
            html.write_text(draw(title, new.config, changes, new.names.display_name, text), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {html}: {error.strerror}\n    fix: use another path") from error
    if as_json:
        print_json(
            [
                {"name": c.path, "kind": c.kind, "old": absent_to_none(c.old), "new": absent_to_none(c.new)}
                for c in changes
            ]
        )
        return
    for change in changes:
        if change.kind == "changed":
            echo(click.style(f"~ {change.path}: {text(change.old)} -> {text(change.new)}", fg="yellow"))
        elif change.kind == "added":
            echo(click.style(f"+ {change.path}: {text(change.new)}", fg="green"))
        else:
            echo(click.style(f"- {change.path}: {text(change.old)}", fg="red"))
    if not changes:
        echo("the configs are the same", err=True)


@config.command()
@experiment_argument
@click.argument("path", default="")
@request_options
@json_option
def explain(request: Request, path: str, as_json: bool) -> None:
    """Print the source of the value at PATH: each step that set it.

    For a node, print all values below it, and what features and settings replaced there. The default is the whole config.
    """
    resolved = resolve(request)
    provenance = resolved.explain(path)
    if as_json:
        rows = [
            {
                "name": p,
                "steps": [{"who": s.source, "old": absent_to_none(s.old), "new": absent_to_none(s.new)} for s in steps],
            }
            for p, steps in provenance.items()
        ]
        print_json(rows)
        return
    for name, steps in provenance.items():
        echo(f"{click.style(name, fg='cyan')}: {text(steps[-1].new)}")
        width = max(len(text(s.new)) for s in steps)
        for step in steps:
            echo(f"    {text(step.new).ljust(width)}  {click.style(step.source, dim=True)}")
    for decision in resolved.find_replaced(path):
        echo(str(decision))


@config.command()
@experiment_argument
@request_options
@click.option(
    "--no-data", is_flag=True, help="Do not open the data and the tokenizer, for example on a machine that lacks them."
)
@json_option
def check(request: Request, no_data: bool, as_json: bool) -> None:
    """Check a config and its data without allocating arrays.

    Checks that all values are set and consistent, that they fit the mesh, that the model can be built and traced, and
    that training could open the data and the tokenizer. The exit code is 2 if a check fails.
    """
    try:
        resolved = resolve(request).check()
        decisions = [d for d in resolved.decisions if d.kind in ("unchanged", "replaced")]
        facts: Mapping[str, str] = {}
        if isinstance(resolved.config, DeclaresFunctions):
            from axlearn_core.train.dry_run import check_experiment  # imports JAX

            replication, facts = check_experiment(resolved.config, resolved.machine, opens_data=not no_data)
            decisions += replication
    except ConfigError as error:
        if not as_json:
            raise
        print_json([{"name": p.path, **_problem_fields(p)} for p in error.problems])
        raise SystemExit(error.exit_code) from None
    if as_json:
        print_json([])
        return
    for decision in decisions:
        echo(str(decision), err=True)
    for name, fact in facts.items():
        echo(f"{name}: {fact}")
    count = len(flatten(resolved.config))
    echo(f"{resolved.title}: all {count} values are set and consistent")


def _problem_fields(problem: object) -> dict[str, Any]:
    keys = {k: k for k in ("message", "got", "expected", "nearest", "fix")} | {"where": "location"}
    fields = get_fields(problem)
    return {key: fields[name] for key, name in keys.items() if fields[name]}


def text(value: object) -> str:
    """Format a value on one line. Plain values are formatted as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value is ABSENT:
        return "(removed)"
    return (
        value
        if isinstance(value, str) and value
        else repr(to_json_value(value) if isinstance(value, (tuple, Mapping)) else value)
    )


def absent_to_none(value: object) -> Any:
    """Return the value, or None if it is `ABSENT`."""
    return None if value is ABSENT else value
