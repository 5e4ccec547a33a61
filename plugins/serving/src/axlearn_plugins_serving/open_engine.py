"""Opens an engine for a model at a path or URI."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from axlearn_core.compose import ModelWeights, Part
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import Node, find, patch
from axlearn_core.contracts.capabilities import GeneratesTokens, HasVocabulary
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run import bind_weights, open_weights
from axlearn_core.run.notices import log_message
from axlearn_plugins_serving.contracts import HasConfig
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import serving_program
from axlearn_plugins_serving.programs import ProgramsError
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.embedding import LearnedPositions
from axlearn_plugins_transformer.layer_roles import LanguageModelRole
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from axlearn_plugins_transformer.text.tokenizers import TokenizerJson


class OpenedEngine(NamedTuple):
    """An engine with what belongs to its model.

    Attributes:
        engine: compiled and ready.
        text: encodes and decodes the model's text; None if it has no tokenizer.
        name: of the model: the last part of the path that it was opened from.
    """

    engine: ServingEngine
    text: TextProcessor | None
    name: str

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model, or None."""
        return None if self.text is None else self.text.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template of the model, or None if it brings none and was trained with none."""
        return self.text.template if self.text is not None and self.text.has_template else None


def open_engine(
    uri: str | Path,
    *,
    config: ServingEngine.Config | None = None,
    step: int | None = None,
    warm_up: bool = True,
    programs: Path | None = None,
) -> OpenedEngine:
    """Opens the weights at a path or URI, and an engine for them.

    Args:
        uri: a run directory, a directory in Hugging Face format, exported adapters, or what an installed plugin opens.
        config: of the engine.
        step: which checkpoint of a run; by default the newest.
        warm_up: compiles all functions first; without it, each when it is first used.
        programs: a directory with exported programs, which are loaded instead of compiled. They are code.

    Raises:
        CheckpointError: no weights there, no such checkpoint, or it is damaged.
        RequestError: the model is not a decoder of tokens, or the config does not fit it.
    """
    from axlearn_core.train import Trainer

    configure_devices(None)
    weights: Any = open_weights(uri, step=step)
    experiment = weights.experiment
    if not isinstance(experiment, Trainer.Config):
        raise CheckpointError(f"{uri}: its config is not a trainer's\n    got: {type(experiment).__qualname__}")
    model = without_kernels(experiment.model)
    check_decoder(model)
    text = text_processor(experiment, weights.tokenizer)
    config = fit_config(config or ServingEngine.Config(), model, text)
    program = serving_program(model, experiment.mesh, config)
    specs = program.parts[Part.WEIGHTS]
    places = {path: spec.sharding for path, spec in {**specs.params, **specs.variables}.items()}
    functional = program.functional
    with ThreadPoolExecutor(1) as pool:  # files are read while programs are compiled or loaded
        reading = pool.submit(lambda: functional.weights_of(bind_weights(functional, weights.read("**", places))))
        engine = build_engine(
            functional.describe(),
            program=program,
            text=text,
            config=config,
            warm_up=warm_up,
            programs=programs,
            weights=reading.result,
        )
    warn_of_end_token(uri, experiment.input, weights.tokenizer)
    return OpenedEngine(engine, text, name_of(uri))


def open_with_programs(
    uri: str | Path, programs: Path | None, *, config: ServingEngine.Config | None = None, step: int | None = None
) -> OpenedEngine:
    """`open_engine` with programs that the user did not name: where they do not fit, it compiles, and says so."""
    try:
        return open_engine(uri, config=config, step=step, programs=programs)
    except ProgramsError as error:
        log_message(f"warning: compiling: {error}")
        return open_engine(uri, config=config, step=step)


def name_of(uri: str | Path) -> str:
    """What a model is called: the last part of its path or URI."""
    return str(uri).partition("?")[0].rstrip("/").split("/")[-1]


def build_engine(
    model: Any,
    *,
    program: Any = None,
    text: TextProcessor | None = None,
    config: ServingEngine.Config | None = None,
    warm_up: bool = True,
    programs: Path | None = None,
    weights: Callable[[], ModelWeights] | None = None,
) -> ServingEngine:
    """An engine for a model with its weights.

    Args:
        model: a `CausalLM`.
        program: of the experiment that it belongs to; by default it is computed on one device.
        text: of the model: its end tokens end outputs, and its context length bounds the context.
        config: of the engine.
        warm_up: compiles all functions first; without it, each when it is first used.
        programs: a directory with exported programs, which are loaded instead of compiled. They are code.
        weights: gives those of a model with abstract arrays, when everything else is there.

    Raises:
        RequestError: the programs are not of this model, or the model is not a decoder of tokens, or the config does not fit it.
    """
    if not (isinstance(model, GeneratesTokens) and isinstance(model, HasVocabulary)):
        raise RequestError(
            f"a {type(model).__name__} cannot be served: it does not generate tokens\n"
            "    expected: a language model, whose config has the role LanguageModelRole\n"
            "    fix: give the directory of one"
        )
    config = fit_config(config or ServingEngine.Config(), model.cfg if isinstance(model, HasConfig) else None, text)
    if programs is not None and not isinstance(config.runner, ModelRunner.Config):
        raise RequestError(f"a {type(config.runner).__qualname__} loads no programs\n    fix: leave --programs out")
    devices = 1 if program is None else program.layout.mesh.size
    if config.tensor_parallel not in (None, devices):
        raise RequestError(
            f"this model is on {devices} devices, and tensor_parallel asks for {config.tensor_parallel}\n"
            "    fix: leave it out, serve the model by its path, or give the program of a mesh with as many"
        )
    runner = config.runner.build(model=model, program=program, programs=programs, weights=weights)
    if warm_up:
        runner.warm_up()
    return config.build(runner=runner, end_tokens=frozenset() if text is None else text.end_tokens)


def fit_config(config: ServingEngine.Config, model: Any, text: TextProcessor | None = None) -> ServingEngine.Config:
    """The config of an engine with a context that the model was made for.

    Args:
        config: of the engine.
        model: the config of the model, whose table of positions is a limit without exceptions.
        text: of the model; its context length is a limit unless `runner.beyond_context` is set.

    Raises:
        RequestError: a longer context was asked for.
    """
    runner = config.runner
    if not isinstance(runner, ModelRunner.Config):
        return config
    tables = [n.max_length for n in find(model, LearnedPositions).values()] if isinstance(model, Node) else []
    made_for = [text.context_length] if text is not None and text.context_length and not runner.beyond_context else []
    limit = min([*tables, *made_for], default=runner.max_context)
    if runner.max_context <= limit:
        return config
    if runner.max_context != ModelRunner.Config().max_context:
        if limit in tables:
            reason, fix = "for which the model has positions", "lower runner.max_context"
        else:
            reason = "the context length that the model was made for"
            fix = "lower runner.max_context, or set runner.beyond_context to true"
        raise RequestError(
            f"the context cannot be {runner.max_context} tokens\n    expected: at most {limit}, {reason}\n    fix: {fix}"
        )
    return attrs.evolve(config, runner=attrs.evolve(runner, max_context=limit))


def warn_of_end_token(uri: str | Path, input: Any, tokenizer: Any) -> None:
    """One line where no file of a model names the token that ends a text, and a usual one is taken."""
    if any(part.eos is None and part.path is not None for part in find(input, TokenizerJson).values()):
        log_message(
            f"warning: outputs end at {tokenizer.eos_token!r}, which the vocabulary of {uri} has and no file of it chose; "
            "clients can name others in stop_token_ids"
        )


def check_decoder(model: Node[Any]) -> None:
    """Raises `RequestError` where the config is of a model that does not generate tokens."""
    if not isinstance(model, LanguageModelRole):
        owner = type(model).owner
        name = owner.__name__ if isinstance(owner, type) else type(model).__qualname__
        raise RequestError(
            f"a {name} cannot be served: it does not generate tokens\n"
            "    expected: a language model, whose config has the role LanguageModelRole\n"
            "    fix: give the directory or the experiment of one"
        )


def without_kernels(model: Node[Any]) -> Node[Any]:
    """The config without the kernels that it names: those were named for the machine that it was trained on."""
    kernels = {path: value for path, value in find(model, "**.kernel").items() if isinstance(value, str)}
    if kernels:
        listing = ", ".join(f"{path}={value}" for path, value in kernels.items())
        log_message(f"note: kernels named for training are not asked for here: {listing}")
    return patch(model, dict.fromkeys(kernels)) if kernels else model


def find_template(experiment: Any, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The template for requests to a model, or None if it brings none and was trained with none."""
    text = None if tokenizer is None else text_processor(experiment, tokenizer)
    return text.template if text is not None and text.has_template else None
