"""One text of a model, by the engine of `ax.serve` if a plugin brings one."""

from collections.abc import Iterator, Mapping
from typing import Any

import axlearn_core as ax
from axlearn_core.contracts.capabilities import GeneratesTokens, vocabulary_size
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.run.notices import log_message
from axlearn_core.train.inference import Loaded
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from axlearn_plugins_transformer.text.tokenizers import check_ids

PLAIN_SAMPLING: Mapping[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
"""Options of requests that say all about sampling, so that an engine does not add the defaults of the model."""


def write_text(
    loaded: Loaded, prompt: str, *, max_tokens: int, temperature: float | None = None, seed: int = 0
) -> Iterator[str]:
    """Yields pieces of the text that a model writes after a prompt.

    Models that the engine cannot serve generate by their own method `generate`.

    Args:
        loaded: the model with its tokenizer.
        prompt: what it goes on from.
        max_tokens: at most this many.
        temperature: 0 takes the likeliest token each time. None takes the model's sampling defaults, or 0 if it has none.
        seed: equal seeds draw equal tokens.

    Raises:
        RequestError: the model has no tokenizer, or does not generate.
        InputError: the prompt has a token that the model has no row for.
    """
    text = _processor(loaded)
    ids = _encode(text, loaded.model, prompt)
    engine = None
    try:
        engine = _open(loaded, text, len(ids) + max_tokens)
        options = {**sampling_defaults(text, temperature), "max_tokens": max_tokens, "seed": seed}
        pieces = None if engine is None else engine.stream(ids, **options)
        first = None if pieces is None else next(pieces, "")  # steps are traced here: what cannot be served shows
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
    loaded: Loaded, prompt: str, *, max_tokens: int, temperature: float | None = None, seed: int = 0
) -> Iterator[str]:
    """`write_text` by the model's own method `generate`, without an engine."""
    text = _processor(loaded)
    options: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, **sampling_defaults(text, temperature)}
    if options.pop("top_p", 1.0) < 1 or options.pop("min_p", 0.0) > 0:
        log_message("note: without the serving engine, the model's top_p and min_p are not applied")
    return continue_text(text, loaded.model, prompt, program=loaded.program, **options)


def continue_text(
    text: TextProcessor, model: Any, prompt: str, *, program: Any = None, **options: Any
) -> Iterator[str]:
    """Yields pieces of text from a model's `generate`; a character that spans tokens comes when it is complete.

    Args:
        text: of the model.
        model: generates tokens.
        prompt: what it goes on from.
        program: of the experiment that the model belongs to; None compiles the model on its own, for one device.
        options: of the model's `generate`, such as `max_tokens`, `temperature` and `seed`.

    Raises:
        RequestError: the model does not generate.
        InputError: see `write_text`.
    """
    if not isinstance(model, GeneratesTokens):
        raise RequestError(f"a {type(model).__name__} does not write text: it has no method `generate`")
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
    if rest := output.end():
        yield rest


def sampling_defaults(text: TextProcessor, temperature: float | None) -> Mapping[str, Any]:
    """The sampling options of a request that sets the temperature or nothing; the model's defaults hold for the others."""
    return {"temperature": 0.0, **text.sampling, **({} if temperature is None else {"temperature": temperature})}


def _processor(loaded: Loaded) -> TextProcessor:
    text = text_processor(loaded.config, loaded.tokenizer) if loaded.tokenizer is not None else None
    if text is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot write text")
    return text


def _open(loaded: Loaded, text: TextProcessor, room: int) -> Any:
    """An engine for one request of `room` tokens, or None if no plugin brings the function `serve`."""
    if "serve" not in registry().claims["functions"]:
        return None
    if text.context_length is not None and room > text.context_length:
        log_message(f"note: {room} tokens are more than the {text.context_length} that the model was made for")
    return ax.serve(loaded, set=engine_sizes(1, room), warm_up=False)


def engine_sizes(rows: int, room: int) -> dict[str, Any]:
    """The settings of an engine for `rows` requests of `room` tokens each; functions compile when they are first used."""
    return {
        "runner.max_rows": rows,
        "runner.max_context": room,
        "runner.beyond_context": True,
        "runner.row_buckets": (),
        "runner.chunk_buckets": (),
        "runner.max_step_tokens": min(room, 128),
    }
