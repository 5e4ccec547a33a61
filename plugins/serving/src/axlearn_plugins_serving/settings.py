"""Build the engine's config from command-line settings."""

from collections.abc import Sequence
from typing import Any

import attrs

from axlearn_core.config import Decoder, check, patch
from axlearn_core.errors import ConfigError, Problem, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Setting
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.runner import ModelRunner

PREFIX = "serving."


def engine_config(
    settings: Sequence[Setting], max_queue: int | None = None, max_context: int | None = None
) -> ServingEngine.Config:
    """Apply settings for paths under `serving.` to the default config.

    Args:
        settings: Settings. A later one replaces an earlier one with the same path.
        max_queue: Value of `serving.max_waiting`, unless `settings` sets it.
        max_context: Value of `serving.runner.max_context`, unless `settings` sets it.

    Raises:
        ConfigError: If values do not fit together.
        RequestError: If a path is unknown or not under `serving.`, or a value does not fit.
    """
    options = {f"{PREFIX}max_waiting": max_queue, f"{PREFIX}runner.max_context": max_context}
    edits: dict[str, Any] = {path: value for path, value in options.items() if value is not None}
    for setting in settings:
        if not setting.path.startswith(PREFIX):
            raise RequestError(f"{setting.location}: not a setting of the engine\n    expected: serving.PATH=VALUE")
        edits[setting.path] = setting.value
    try:
        config = patch({"serving": ServingEngine.Config()}, edits, Decoder(registry()).decode_value)["serving"]
    except ConfigError as error:
        raise ConfigError(_locate(problem, settings) for problem in error.problems) from None
    check(config)
    return config


def _locate(problem: Problem, settings: Sequence[Setting]) -> Problem:
    """Add the location of the last setting of a problem's path, or of a part around it."""
    for setting in reversed(settings):
        if problem.location is None and f"{problem.path}.".startswith(f"{setting.path}."):
            return attrs.evolve(problem, location=setting.location)
    return problem


def add_adapters(config: ServingEngine.Config, adapters: Sequence[str]) -> ServingEngine.Config:
    """Add adapters to the config, each as `NAME=DIR`.

    Raises:
        RequestError: If an adapter has a different form, a name is repeated, or the runner does not support adapters.
    """
    runner = config.runner
    if not adapters:
        return config
    if not isinstance(runner, ModelRunner.Config):
        raise RequestError(f"a {type(runner).__qualname__} does not support adapters\n    fix: remove --adapter")
    directories = dict(runner.adapters)
    for text in adapters:
        name, _, directory = text.partition("=")
        if not (name and directory):
            raise RequestError(f"--adapter {text!r} has no name or no directory\n    expected: NAME=DIR")
        if name in directories:
            raise RequestError(f"--adapter {name} is given twice\n    fix: use a unique name for each adapter")
        directories[name] = directory
    return attrs.evolve(config, runner=attrs.evolve(runner, adapters=directories))
