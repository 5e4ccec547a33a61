"""The engine's config as a command line sets it."""

from collections.abc import Sequence
from typing import Any

from axlearn_core.config import Decoder, check, patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Setting
from axlearn_plugins_serving.engine import ServingEngine

PREFIX = "serving."


def engine_config(settings: Sequence[Setting], max_queue: int | None = None) -> ServingEngine.Config:
    """The default config with settings of paths under `serving.`.

    Raises:
        ConfigError: values that do not fit together.
        RequestError: a path of something else, an unknown path, or a value that does not fit.
    """
    edits: dict[str, Any] = {} if max_queue is None else {f"{PREFIX}max_waiting": max_queue}
    for setting in settings:
        if not setting.path.startswith(PREFIX):
            raise RequestError(f"{setting.where}: not a path of the engine\n    expected: serving.PATH=VALUE")
        edits[setting.path] = setting.value
    config = patch({"serving": ServingEngine.Config()}, edits, Decoder(registry()).decode_at)["serving"]
    check(config)
    return config
