"""One text of a model, by the engine that serves it where `axlearn-plugins-serving` is installed."""

from collections.abc import Iterator
from typing import Any

import axlearn_core as ax
from axlearn_core.contracts.capabilities import encode_prompt
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.train.inference import Loaded, generate_text
from axlearn_core.train.session import log_message


def write_text(loaded: Loaded, prompt: str, *, max_tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Yields pieces of the text that a model writes after a prompt.

    Models that the engine cannot serve generate by their own method `generate`.

    Args:
        loaded: the model with its tokenizer.
        prompt: what it goes on from.
        max_tokens: at most this many.
        temperature: 0 takes the likeliest token each time.
        seed: equal seeds draw equal tokens.

    Raises:
        RequestError: the model has no tokenizer, or does not generate.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot write text")
    room = len(encode_prompt(tokenizer, prompt) or [tokenizer.eos_id]) + max_tokens
    engine = None
    try:
        engine = _open(loaded, room)
        pieces = (
            None if engine is None else engine.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        )
        first = None if pieces is None else next(pieces, "")  # steps are traced here: what cannot be served shows
    except AxlearnError as error:
        log_message(f"note: generated without the serving engine: {str(error).splitlines()[0]}")
        if engine is not None:
            engine.close()
        engine = pieces = first = None
    if engine is None or pieces is None or first is None:
        yield from generate_text(
            loaded.model, tokenizer, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        return
    with engine:
        yield first
        yield from pieces


def _open(loaded: Loaded, room: int) -> Any:
    """An engine for one request of so many tokens; None where the plugin is missing."""
    if "serve" not in registry().claims["functions"]:
        return None
    sizes: dict[str, Any] = {"max_rows": 1, "max_context": room, "row_buckets": (), "chunk_buckets": ()}
    sizes["max_step_tokens"] = min(room, 128)
    return ax.serve(loaded, set={f"runner.{name}": value for name, value in sizes.items()}, warm_up=False)
