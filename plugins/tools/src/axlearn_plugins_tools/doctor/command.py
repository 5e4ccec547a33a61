"""`axlearn plugins doctor`."""

import sys

import attrs
import click

from axlearn_core.cli.common import json_option, no_devices, print_json
from axlearn_core.cli.terminal import echo
from axlearn_core.plugins.registry import registry


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Load everything that is installed and report errors.

    Exits with code 1 if there are errors.
    """
    no_devices()
    from axlearn_plugins_tools.doctor.examine import examine

    findings = list(examine(registry()))
    if as_json:
        print_json([attrs.asdict(f) for f in findings])
    else:
        for finding in findings:
            color = {"ok": "green", "error": "red"}.get(finding.status, "yellow")
            head = click.style(finding.status.ljust(7), fg=color)
            echo(f"{head}  {finding.group} {finding.name}  ({finding.distribution} {finding.version})")
            if finding.message:
                echo("         " + finding.message.replace("\n", "\n         "))
        bad = [f"{f.group} {f.name}" for f in findings if f.status == "error"]
        echo(f"{len(findings)} examined, {len(bad)} with errors{': ' if bad else ''}{', '.join(bad)}", err=True)
    if any(f.status == "error" for f in findings):
        sys.exit(1)
