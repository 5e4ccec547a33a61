"""The options that `axlearn plan` gets from this plugin. Imports no JAX."""

from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.hookspecs import hookimpl

SEARCH = "--search"


def _value(name: str, metavar: str, text: str) -> CommandOption:
    return CommandOption(name=name, metavar=metavar, help=text, belongs_to=SEARCH)


@hookimpl
def axlearn_command_options(command: str) -> list[CommandOption]:
    """`--search` of `axlearn plan`, and what belongs to it."""
    if command != "plan":
        return []
    return [
        CommandOption(
            name=SEARCH,
            help="Rank the layouts of the machine, or of several (--target A,B), and compile the best.",
            run="axlearn_plugins_plan.search.command:search",
            beside={"--serve": "axlearn_plugins_plan.search.serving_command:search"},
        ),
        _value("--budget", "MINUTES", "With --search: for compiling, 10 by default."),
        _value("--chips", "A..B", "With --search: every size of the target's machines between A and B chips."),
        _value(
            "--vary",
            "batch,...",
            "With --search: what else may change: batch, optimizer-precision; with --serve: cache-dtype.",
        ),
        _value("--front", "N", "With --search: stop after N compiled layouts."),
        _value("--layout-out", "FILE", "With --search: write the best layout, for `axlearn train --layout FILE`."),
        _value("--png", "FILE", "With --search: draw memory against time. Needs matplotlib."),
        _value("--html", "FILE", "With --search: write table and picture as one page."),
        _value("--cache", "DIR", "With --search: where compiled figures are kept for the next search."),
    ]
