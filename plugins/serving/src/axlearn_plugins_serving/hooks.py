"""What the plugin says through hooks. Imports no JAX."""

from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_command_options(command: str) -> list[CommandOption]:
    """`axlearn plan --serve [--export DIR]`."""
    if command != "plan":
        return []
    return [
        CommandOption(
            name="--serve",
            help="Plan a server instead of training; EXPERIMENT may be a run, or a model in Hugging Face format.",
            run="axlearn_plugins_serving.plan.command:plan_serving",
        ),
        CommandOption(
            name="--export",
            metavar="DIR",
            help="With --serve: write the compiled programs, for `axlearn serve --programs DIR`.",
            belongs_to="--serve",
        ),
    ]
