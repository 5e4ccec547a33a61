"""Generate a single text with a model.

Uses the engine of `ax.serve` if a plugin provides it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import axlearn_core as ax
from axlearn_core.contracts.capabilities import GeneratesTokens, vocabulary_size
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.run.notices import log_message
from axlearn_core.train.inference import LoadedModel
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from axlearn_plugins_transformer.text.tokenizers import check_ids

PLAIN_SAMPLING: Mapping[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling options that override all defaults of the model."""


def write_text(
    loaded: LoadedModel, prompt: str, *, max_tokens: int, temperature: float | None = None, seed: int = 0
) -> Iterator[str]:
    """Yield pieces of the text that a model generates after a prompt.

    If the engine cannot serve the model, use the model's `generate` method.

    Args:
        loaded: The model with its tokenizer.
        prompt: Text to continue.
        max_tokens: Maximum number of tokens.
        temperature: 0 always takes the most probable token. None uses the model's sampling defaults, or 0 if it has none.
        seed: Seed for sampling.

    Raises:
        RequestError: The model has no tokenizer or cannot generate.
        InputError: A token of the prompt is not in the model's vocabulary.
    """
    text = _processor(loaded)
    ids = _encode(text, loaded.model, prompt)
    engine = None
    try:
        engine = _open(loaded, text, len(ids) + max_tokens)
        options = {**sampling_defaults(text, temperature), "max_tokens": max_tokens, "seed": seed}
        pieces = None if engine is None else engine.stream(ids, **options)
        first = None if pieces is None else next(pieces, "")  # traces the steps, so an unsupported model fails here
    except AxlearnError as error:
        log_message(f"note: generated without the serving engine: {str(error).splitlines()[0]}")
        if engine is not None:
            engine.close()
        engine = pieces = first = None
    if engine is None or pieces is None or first is None:
        yield from stream_text(loaded, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        return
    with engine:
        yield first
        yield from pieces


def stream_text(
    loaded: LoadedModel, prompt: str, *, max_tokens: int, temperature: float | None = None, seed: int = 0
) -> Iterator[str]:
    """Generate text like `write_text`, but without an engine.

    Uses the model's `generate` method.
    """
    text = _processor(loaded)
    options: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, **sampling_defaults(text, temperature)}
    ignored = {name: options.pop(name) for name in ("top_p", "min_p", "repetition_penalty") if name in options}
    if names := [f"{name} {value:g}" for name, value in ignored.items() if value != PLAIN_SAMPLING[name]]:
        log_message(
            f"note: without the serving engine, the model's sampling defaults are not applied: {', '.join(names)}"
        )
    return continue_text(text, loaded.model, prompt, program=loaded.program, **options)


def continue_text(
    text: TextProcessor, model: Any, prompt: str, *, program: Any = None, **options: Any
) -> Iterator[str]:
    """Yield pieces of text from a model's `generate`.

    A character that spans tokens is yielded once it is complete.

    Args:
        text: Text processor of the model.
        model: A model that generates tokens.
        prompt: Text to continue.
        program: Program of the model's experiment. None compiles the model separately, for one device.
        **options: Options for the model's `generate`, such as `max_tokens`, `temperature` and `seed`.

    Raises:
        RequestError: The model cannot generate.
        InputError: See `write_text`.
    """
    if not isinstance(model, GeneratesTokens):
        raise RequestError(f"a {type(model).__name__} cannot write text: it does not have a method `generate`")
    return _pieces(text, model, _encode(text, model, prompt), program=program, **options)


def _encode(text: TextProcessor, model: Any, prompt: str) -> list[int]:
    ids = text.encode_prompt(prompt)
    check_ids(text.tokenizer, ids, vocabulary_size(model), "the prompt")
    return ids


def _pieces(text: TextProcessor, model: Any, ids: list[int], **options: Any) -> Iterator[str]:
    output = text.output(ids)
    for token in model.generate(ids, eos_id=text.tokenizer.eos_id, **options):
        if token in text.end_tokens:
            break
        if piece := output.push(token):
            yield piece
    if remainder := output.end():
        yield remainder


def sampling_defaults(text: TextProcessor, temperature: float | None) -> Mapping[str, Any]:
    """Return sampling options with the given temperature, if any.

    The model's defaults apply to the other options.
    """
    return {"temperature": 0.0, **text.sampling, **({} if temperature is None else {"temperature": temperature})}


def _processor(loaded: LoadedModel) -> TextProcessor:
    text = text_processor(loaded.config, loaded.tokenizer) if loaded.tokenizer is not None else None
    if text is None:
        raise RequestError("this run's input does not have a tokenizer, so its model cannot write text")
    return text


def _open(loaded: LoadedModel, text: TextProcessor, num_tokens: int) -> Any:
    """Return an engine for one request of `num_tokens` tokens.

    Returns None if no plugin provides a `serve` function.
    """
    if "serve" not in registry().claims["functions"]:
        return None
    if text.context_length is not None and num_tokens > text.context_length:
        log_message(f"note: {num_tokens} tokens exceed the model's context length of {text.context_length}")
    return ax.serve(loaded, set=engine_sizes(1, num_tokens), warm_up=False)


def engine_sizes(rows: int, num_tokens: int) -> dict[str, Any]:
    """Return engine settings for `rows` requests of `num_tokens` tokens each.

    Functions are compiled on first use.
    """
    return {
        "runner.max_rows": rows,
        "runner.max_context": num_tokens,
        "runner.beyond_context": True,
        "runner.row_buckets": (),
        "runner.chunk_buckets": (),
        "runner.max_step_tokens": min(num_tokens, 128),
    }
