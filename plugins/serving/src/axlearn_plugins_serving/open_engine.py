"""Open an engine for a model at a path or URI."""

import contextlib
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
from axlearn_plugins_serving.drafting import ModelDrafter
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_capabilities import CompilesFunctions, HasConfig
from axlearn_plugins_serving.engine_devices import serving_program
from axlearn_plugins_serving.programs import ProgramsError
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.embedding import LearnedPositions
from axlearn_plugins_transformer.layer_roles import LanguageModelRole
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from axlearn_plugins_transformer.text.tokenizers import TokenizerJson


class OpenedEngine(NamedTuple):
    """An engine, with the text processor and the name of its model.

    Attributes:
        engine: The engine, compiled and ready.
        text: Encodes and decodes the model's text; None if the model has no tokenizer.
        name: Name of the model: the last component of the path that it was opened from.
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
        """The chat template that the model has or was trained with, or None."""
        return self.text.template if self.text is not None and self.text.has_template else None


Report = Callable[[str], None]
"""Function that is called with the name of each phase of a long operation, such as "reading the weights"."""


def ignore_phase(_phase: str) -> None:
    """Ignore the name of a phase; see `Report`."""


PrepareText = Callable[[TextProcessor | None], TextProcessor | None]
"""Function that checks or replaces a model's text processor before anything is compiled."""


def keep_text(text: TextProcessor | None) -> TextProcessor | None:
    """Return the text processor unchanged; see `PrepareText`."""
    return text


def open_engine(
    uri: str | Path,
    *,
    config: ServingEngine.Config | None = None,
    step: int | None = None,
    warm_up: bool = True,
    programs: Path | None = None,
    prepare_text: PrepareText = keep_text,
    report: Report = ignore_phase,
) -> OpenedEngine:
    """Open the weights at a path or URI and build an engine for them.

    Args:
        uri: Run directory, directory in Hugging Face format, exported adapters, or a URI that a plugin can open.
        config: Config of the engine.
        step: Checkpoint of a run to open; the default is the newest.
        warm_up: Whether to compile all functions first. Otherwise, each is compiled on first use.
        programs: Directory with exported programs to load instead of compiling. Exported programs are code.
        prepare_text: Checks or replaces the text processor of the model before anything is compiled.
        report: Called when a phase begins.

    Raises:
        CheckpointError: If there are no weights or no such checkpoint, or the checkpoint is damaged.
        RequestError: If the model does not generate tokens or the config does not fit it.
    """
    from axlearn_core.train import Trainer

    report(f"opening {uri}")
    configure_devices(None)
    weights: Any = open_weights(uri, step=step)
    experiment = weights.experiment
    if not isinstance(experiment, Trainer.Config):
        raise CheckpointError(f"{uri}: its config is not a trainer's\n    got: {type(experiment).__qualname__}")
    model = remove_kernels(experiment.model)
    check_decoder(model)
    text = prepare_text(text_processor(experiment, weights.tokenizer))
    config = fit_config(config or ServingEngine.Config(), model, text)
    program = serving_program(model, experiment.mesh, config)
    specs = program.parts[Part.WEIGHTS]
    places = {path: spec.sharding for path, spec in {**specs.params, **specs.variables}.items()}
    functional = program.functional

    def read(*, on_host: bool = False) -> ModelWeights:
        arrays = weights.read("**", None if on_host else places)
        return functional.extract_weights(bind_weights(functional, arrays))

    with ThreadPoolExecutor(1) as pool:  # read files while programs are compiled or loaded
        reading = pool.submit(read)
        engine = build_engine(
            functional.describe(),
            program=program,
            text=text,
            config=config,
            warm_up=warm_up,
            programs=programs,
            weights=reading.result,
            source=read,
            report=report,
        )
    warn_about_end_token(uri, experiment.input, weights.tokenizer)
    return OpenedEngine(engine, text, model_name(uri))


def open_with_programs(
    uri: str | Path,
    programs: Path | None,
    *,
    config: ServingEngine.Config | None = None,
    step: int | None = None,
    prepare_text: PrepareText = keep_text,
    report: Report = ignore_phase,
) -> OpenedEngine:
    """Call `open_engine` with programs that the user did not name.

    If the programs do not match, log a warning and compile the functions instead.
    """
    try:
        return open_engine(uri, config=config, step=step, programs=programs, prepare_text=prepare_text, report=report)
    except ProgramsError as error:
        log_message(f"warning: compiling: {error}")
        return open_engine(uri, config=config, step=step, prepare_text=prepare_text, report=report)


def model_name(uri: str | Path) -> str:
    """Return the name of a model: `org/name` for a model on the hub, otherwise the last component of its path or URI."""
    with contextlib.suppress(ImportError):  # without this package, no model of the hub can be opened
        from axlearn_plugins_models.huggingface.hub import parse_name

        if (name := parse_name(uri)) is not None:
            return name.repository
    last = str(uri).partition("?")[0].rstrip("/").split("/")[-1]
    return Path(uri).resolve().name if last in ("", ".", "..") else last


def build_engine(
    model: Any,
    *,
    program: Any = None,
    text: TextProcessor | None = None,
    config: ServingEngine.Config | None = None,
    warm_up: bool = True,
    programs: Path | None = None,
    weights: Callable[[], ModelWeights] | None = None,
    source: Callable[..., ModelWeights] | None = None,
    report: Report = ignore_phase,
) -> ServingEngine:
    """Build an engine for a model.

    Args:
        model: A `CausalLM` with its weights.
        program: Program of the model's experiment; the default uses one device.
        text: Text processor of the model. It sets the end tokens and limits the context length.
        config: Config of the engine.
        warm_up: Whether to compile all functions first. Otherwise, each is compiled on first use.
        programs: Directory with exported programs to load instead of compiling. Exported programs are code.
        weights: Function that returns the weights, if the model's arrays are abstract. It is called last.
        source: Function that reads the weights again; see `ModelRunner`. None if they have no source.
        report: Called when a phase begins.

    Raises:
        RequestError: If the programs are not for this model, the model does not generate tokens, or the config does not fit it.
    """
    if not (isinstance(model, GeneratesTokens) and isinstance(model, HasVocabulary)):
        raise RequestError(
            f"a {type(model).__name__} cannot be served because it does not generate tokens\n"
            "    expected: a language model, whose config has the role LanguageModelRole\n"
            "    fix: name the directory of a language model"
        )
    config = fit_config(config or ServingEngine.Config(), model.cfg if isinstance(model, HasConfig) else None, text)
    if programs is not None and not isinstance(config.runner, ModelRunner.Config):
        raise RequestError(f"a {type(config.runner).__qualname__} cannot load programs\n    fix: remove --programs")
    devices = 1 if program is None else program.layout.mesh.size
    if config.tensor_parallel not in (None, devices):
        raise RequestError(
            f"the model is on {devices} devices, but tensor_parallel is {config.tensor_parallel}\n"
            "    fix: remove tensor_parallel, serve the model by its path, or pass a program with as many devices"
        )
    report("reading the weights")
    runner = config.runner.build(model=model, program=program, programs=programs, weights=weights, source=source)
    if warm_up:
        report("compiling the programs" if programs is None else f"loading the programs in {programs}")
        runner.warm_up()
    end_tokens = frozenset() if text is None else text.end_tokens
    engine = config.build(runner=runner, end_tokens=end_tokens, text=text)
    if warm_up and isinstance(engine.drafter, CompilesFunctions):
        report("compiling the drafter")
        engine.drafter.warm_up()
    return engine


def fit_config(config: ServingEngine.Config, model: Any, text: TextProcessor | None = None) -> ServingEngine.Config:
    """Fit an engine's config to a model.

    Limit the context to what the model supports, use the model's pooling, and let steps draft for a `ModelDrafter`.

    Args:
        config: Config of the engine.
        model: Config of the model. The size of its position table is a hard limit.
        text: Text processor of the model. Its context length is a limit unless `runner.beyond_context` is set.

    Raises:
        RequestError: If the config asks for a longer context.
    """
    runner = config.runner
    if not isinstance(runner, ModelRunner.Config):
        return config
    if text is not None and text.pooling is not None and runner.pooling is None:
        runner = attrs.evolve(runner, pooling=text.pooling)
        config = attrs.evolve(config, runner=runner)
    if isinstance(config.drafter, ModelDrafter.Config):
        runner = attrs.evolve(runner, drafts=True)
        config = attrs.evolve(config, runner=runner)
    tables = [n.max_length for n in find(model, LearnedPositions).values()] if isinstance(model, Node) else []
    context_lengths = (
        [text.context_length] if text is not None and text.context_length and not runner.beyond_context else []
    )
    limit = min([*tables, *context_lengths], default=runner.max_context)
    if runner.max_context <= limit:
        return config
    if runner.max_context != ModelRunner.Config().max_context:
        if limit in tables:
            reason, fix = "the number of positions of the model", "lower runner.max_context"
        else:
            reason = "the context length of the model"
            fix = "lower runner.max_context, or set runner.beyond_context to true"
        raise RequestError(
            f"the context cannot be {runner.max_context} tokens\n    expected: at most {limit}, {reason}\n    fix: {fix}"
        )
    return attrs.evolve(config, runner=attrs.evolve(runner, max_context=limit))


def warn_about_end_token(uri: str | Path, input: Any, tokenizer: Any) -> None:
    """Warn if none of the model's files names the end token, in which case a common one is used."""
    if any(part.eos is None and part.path is not None for part in find(input, TokenizerJson).values()):
        log_message(
            f"warning: outputs end at {tokenizer.eos_token!r}, which is in the vocabulary of {uri} but not set by its files; "
            "clients can set others in stop_token_ids"
        )


def check_decoder(model: Node[Any]) -> None:
    """Raise `RequestError` if the config's model does not generate tokens."""
    if not isinstance(model, LanguageModelRole):
        owner = type(model).owner
        name = owner.__name__ if isinstance(owner, type) else type(model).__qualname__
        raise RequestError(
            f"a {name} cannot be served because it does not generate tokens\n"
            "    expected: a language model, whose config has the role LanguageModelRole\n"
            "    fix: name the directory or the experiment of a language model"
        )


def remove_kernels(model: Node[Any]) -> Node[Any]:
    """Return the config without kernel names.

    The kernels were chosen for the machine that trained the model.
    """
    kernels = {path: value for path, value in find(model, "**.kernel").items() if isinstance(value, str)}
    if kernels:
        listing = ", ".join(f"{path}={value}" for path, value in kernels.items())
        log_message(f"note: serving ignores the kernels that were chosen for training: {listing}")
    return patch(model, dict.fromkeys(kernels)) if kernels else model
