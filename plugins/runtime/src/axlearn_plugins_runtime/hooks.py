"""The options that `axlearn train` gets from this plugin. Imports no JAX."""

from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_command_options(command: str) -> list[CommandOption]:
    """`--shadow` of `axlearn train`, and what belongs to it."""
    if command != "train":
        return []
    return [
        CommandOption(
            name="--shadow",
            metavar="FEATURE[:OPTIONS]",
            help="Compute some steps with this feature as well, and log how far the two part.",
            run="axlearn_plugins_runtime.shadow_feature:train",
        ),
        CommandOption(
            name="--every",
            metavar="STEPS",
            help="With --shadow: how often, 100 by default.",
            belongs_to="--shadow",
        ),
    ]
