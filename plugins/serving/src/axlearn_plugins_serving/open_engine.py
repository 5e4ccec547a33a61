"""Opens an engine for a model at a path or URI."""

from pathlib import Path
from typing import Any, NamedTuple

from axlearn_core.contracts.parts import Tokenizer
from axlearn_plugins_serving.contracts import Engine
from axlearn_plugins_serving.engine import ServingEngine


class OpenedEngine(NamedTuple):
    """An engine with what belongs to its model.

    Attributes:
        engine: compiled and ready.
        tokenizer: of the model; None where it has none.
        template: renders conversations (an `axlearn_plugins_text.chat_template.ChatTemplate`); None where the model brings none.
        name: of the model: the last part of the path that it was opened from.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    template: Any
    name: str


def open_engine(
    uri: str | Path, *, config: ServingEngine.Config | None = None, step: int | None = None, warm_up: bool = True
) -> OpenedEngine:
    """Opens the weights at a path or URI, and an engine for them.

    Args:
        uri: a run directory, a directory in Hugging Face format, exported adapters, or what an installed plugin opens.
        config: of the engine.
        step: which checkpoint of a run; by default the newest.
        warm_up: compiles all functions first; without it, each when it is first used.

    Raises:
        CheckpointError: nothing known lies there, no such checkpoint, or it is damaged.
        RequestError: the model is not a decoder of tokens, or the config does not fit it.
    """
    raise NotImplementedError
