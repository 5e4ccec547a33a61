"""Commands that plugins add options to, by the hook `axlearn_command_options`."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import click

from axlearn_core.contracts.options import CommandOption
from axlearn_core.errors import PluginError, RequestError


class OpenCommand(click.Command):
    """A click command (`@click.command(cls=OpenCommand)`) with the options of plugins behind its own.

    Raises:
        PluginError: two plugins, or a plugin and the command, have an option of the same name.
        RequestError: the user gives two options that each take over, or one without the option that it belongs to.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters, then those of plugins."""
        own = super().get_params(ctx)
        return [*own[:-1], *(_click_option(o) for o, _ in self._added_options()), own[-1]]  # --help is the last

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the function of the plugin's option that was given, or else the command's own."""
        values = {option: ctx.params.pop(_parameter(option)) for option, _ in self._added_options()}
        options = [option for option, value in values.items() if value not in (None, False)]
        main_options = [option for option in options if option.belongs_to is None]
        names = {option.name for option in main_options}
        if alone := [option for option in options if option.belongs_to not in (None, *names)]:
            option = alone[0]
            raise RequestError(f"{option.name} belongs to {option.belongs_to}\n    fix: add {option.belongs_to}")
        if not main_options:
            return super().invoke(ctx)
        option, path = _what_runs(main_options, options)
        module, _, name = path.partition(":")
        try:
            run = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise PluginError(f"{option.name} cannot be loaded from {path}: {error}") from error
        # What wraps the command's function, `request_options`, makes its arguments for the plugin's too.
        wrap = getattr(self.callback, "wrap", lambda function: function)
        companions = {_argument(o): value for o, value in values.items() if o.belongs_to == option.name}
        return ctx.invoke(wrap(functools.partial(run, values[option], **companions)), **ctx.params)

    def _added_options(self) -> list[tuple[CommandOption, str]]:
        """(option, the plugin that adds it), by name."""
        from axlearn_core.plugins.manager import host

        owners = {name: f"the command {self.name!r}" for p in self.params for name in p.opts}
        added = []
        for plugin, options in host().answers("axlearn_command_options", command=self.name):
            for option in options:
                if option.name in owners:
                    raise PluginError(f"{option.name} is an option of {owners[option.name]} and of {plugin}")
                owners[option.name] = plugin
                added.append((option, plugin))
        return sorted(added, key=lambda item: item[0].name)


def _what_runs(chosen: Sequence[CommandOption], options: Sequence[CommandOption]) -> tuple[CommandOption, str]:
    """(the option that takes over, where its function is), of those that the user gave."""
    if len(chosen) == 1:
        return chosen[0], chosen[0].run
    for option in chosen:
        other = next((o for o in chosen if o is not option and o.name in option.beside), None)
        if other is None or len(chosen) > 2:
            continue
        if alone := [o for o in options if o.belongs_to == other.name]:
            raise RequestError(f"{alone[0].name} cannot be given with {option.name}\n    fix: leave one of them out")
        return option, option.beside[other.name]
    both = " and ".join(option.name for option in chosen)
    raise RequestError(f"{both} cannot be given together\n    fix: leave one of them out")


def _argument(option: CommandOption) -> str:
    return option.name.lstrip("-").replace("-", "_")


def _parameter(option: CommandOption) -> str:
    return "plugin_" + _argument(option)


def _click_option(option: CommandOption) -> click.Option:
    declared = option.name, _parameter(option)
    if option.metavar is None:
        return click.Option(declared, is_flag=True, default=False, help=option.help)
    return click.Option(declared, metavar=option.metavar, default=None, help=option.help)
