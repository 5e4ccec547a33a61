"""Merge XLA options from the target, the kernels, and the config."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from axlearn_core.errors import ConfigError, PluginError, Problem
from axlearn_core.kernels.selection import Choice

_PATH = "mesh.compiler_options."


def merge_options(target: Mapping[str, Any], choices: Sequence[Choice], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a function. The config overrides the target, and kernels override both.

    Args:
        target: The target's options.
        choices: Kernel choices in the function.
        config: `mesh.compiler_options`.

    Raises:
        PluginError: If two kernels need different values for the same option.
        ConfigError: If the config sets an option to a different value than a kernel needs.
    """
    needs: dict[str, tuple[Choice, Any]] = {}
    for choice in choices:
        for name, value in choice.compiler_options.items():
            other, before = needs.setdefault(name, (choice, value))
            if before != value:
                raise PluginError(
                    f"{_kernel(choice)} cannot be in the same program as {_kernel(other)}\n"
                    f"    got: {name}={value!r} and {before!r}\n    fix: choose another kernel for one of the two ops"
                )
            if config.get(name, value) != value:
                message = f"{_kernel(choice)} needs another value"
                fix = "remove the option, or choose another kernel"
                raise ConfigError(
                    Problem(path=_PATH + name, message=message, got=repr(config[name]), expected=repr(value), fix=fix)
                )
    return {**target, **config, **{name: value for name, (_, value) in needs.items()}}


def check_refusal(choices: Sequence[Choice], config: Mapping[str, Any], refusal: str) -> None:
    """Raise an error that names the source of an option if XLA's error message `refusal` mentions the option.

    Raises:
        PluginError: If a kernel needs the option.
        ConfigError: If the config sets the option.
    """
    kind, _, reason = refusal.partition(": ")
    if kind != "INVALID_ARGUMENT":
        return
    words = set(re.findall(r"\w+", refusal))
    for choice in choices:
        if refused := words.intersection(choice.compiler_options):
            name = refused.pop()
            raise PluginError(
                f"{_kernel(choice)} needs an option that this version of XLA rejects: {reason}\n"
                f"    got: {name}={choice.compiler_options[name]!r}\n    fix: choose another kernel, or another jaxlib version"
            )
    for name in words.intersection(config):
        raise ConfigError(Problem(path=_PATH + name, message=reason, got=repr(config[name])))


def _kernel(choice: Choice) -> str:
    return f"the {choice.op.name} kernel {choice.name!r}"


def quick_options(platform: str) -> dict[str, Any]:
    """Return the options that compile a function fastest on a platform. They suit functions that are called only a few times."""
    if platform != "cpu":
        return {}
    # Later versions of jaxlib lack the second option. Fusion emitters take a third of the compile time.
    emitters = {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}
    return {"xla_backend_optimization_level": 0, **emitters}
