"""Opens an engine for a model at a path or URI."""

from pathlib import Path
from typing import Any, NamedTuple

import attrs

from axlearn_core.config import Node, find
from axlearn_core.contracts.capabilities import GeneratesTokens, HasVocabulary
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_text.chat_template import PLAIN, ChatTemplate
from axlearn_plugins_transformer.embedding import LearnedPositions


class OpenedEngine(NamedTuple):
    """An engine with what belongs to its model.

    Attributes:
        engine: compiled and ready.
        tokenizer: of the model; None where it has none.
        template: renders conversations (an `axlearn_plugins_text.chat_template.ChatTemplate`); None where the model brings none.
        name: of the model: the last part of the path that it was opened from.
    """

    engine: ServingEngine
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
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
    from axlearn_core.train import load

    loaded = load(uri, step=step)
    engine = build_engine(
        loaded.model, program=loaded.program, tokenizer=loaded.tokenizer, config=config, warm_up=warm_up
    )
    return OpenedEngine(
        engine, loaded.tokenizer, _template(loaded), str(uri).partition("?")[0].rstrip("/").split("/")[-1]
    )


def build_engine(
    model: Any,
    *,
    program: Any = None,
    tokenizer: Tokenizer | None = None,
    config: ServingEngine.Config | None = None,
    warm_up: bool = True,
) -> ServingEngine:
    """An engine for a model with its weights.

    Args:
        model: a `CausalLM`.
        program: of the experiment that it belongs to; by default it is computed on one device.
        tokenizer: its end token ends outputs.
        config: of the engine.
        warm_up: compiles all functions first; without it, each when it is first used.

    Raises:
        RequestError: the model is not a decoder of tokens, or the config does not fit it.
    """
    if not (isinstance(model, GeneratesTokens) and isinstance(model, HasVocabulary)):
        raise RequestError(
            f"a {type(model).__name__} cannot be served: it does not generate tokens\n"
            "    expected: a language model\n    fix: give the directory of one"
        )
    config = _fit(config or ServingEngine.Config(), model)
    runner = config.runner.build(model=model, program=program)
    if warm_up:
        runner.warm_up()
    ends = frozenset() if tokenizer is None else frozenset({tokenizer.eos_id})
    return config.build(runner=runner, end_tokens=ends)


def _fit(config: ServingEngine.Config, model: Any) -> ServingEngine.Config:
    """The config with a context that the model has positions for, where it has a table of them.

    Raises:
        RequestError: a longer one was asked for.
    """
    cfg, runner = getattr(model, "cfg", None), config.runner
    lengths = [n.max_length for n in find(cfg, LearnedPositions).values()] if isinstance(cfg, Node) else []
    if not lengths or not isinstance(runner, ModelRunner.Config) or runner.max_context <= min(lengths):
        return config
    if runner.max_context != ModelRunner.Config().max_context:
        raise RequestError(
            f"the context cannot be {runner.max_context} tokens\n    expected: at most {min(lengths)}, for which the model "
            "has positions\n    fix: lower runner.max_context"
        )
    return attrs.evolve(config, runner=attrs.evolve(runner, max_context=min(lengths)))


def _template(loaded: Any) -> ChatTemplate | None:
    """The template that the model was trained with, or that lies beside its tokenizer."""
    if loaded.tokenizer is None:
        return None
    trained_with = getattr(loaded.config.input, "template", None)
    if isinstance(trained_with, ChatTemplate.Config):
        return trained_with.build(tokenizer=loaded.tokenizer)
    template = ChatTemplate.Config().build(tokenizer=loaded.tokenizer)
    return None if template.source == PLAIN else template
