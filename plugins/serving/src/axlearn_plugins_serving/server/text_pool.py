"""Threads in which requests become tokens, so that the event loop never waits for a long text."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from axlearn_core.contracts.parts import Tokenizer
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_transformer.text.token_lengths import longest_token

T = TypeVar("T")

SHORT = 4096
"""Characters or bytes that are read faster than a thread is woken."""
HUGE = 256 * 1024
"""Characters or bytes from which on a request waits in a lane of its own."""
COUNTED = 1024 * 1024
"""Characters of a text that `/tokenize` encodes even if no context holds them. More take seconds and gigabytes."""


class TextPool:
    """Runs what takes as long as its text: parsing, rendering, tokenizing.

    Short texts are read in the event loop. Long ones have two threads, and huge ones a third, so that nobody with a prompt of a
    few pages waits behind a client that sends megabytes.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-text")

    async def run(self, function: Callable[[], T], size: int) -> T:
        """Calls a function that reads `size` characters or bytes, and returns its result."""
        if size <= SHORT:
            return function()
        lane = self._long if size <= HUGE else self._huge
        return await asyncio.get_running_loop().run_in_executor(lane, function)

    def close(self) -> None:
        """Drops what still waits."""
        for lane in (self._long, self._huge):
            lane.shutdown(wait=False, cancel_futures=True)


class TextLimit:
    """Refuses texts that no context can hold, by their length alone.

    A context of N tokens holds at most N times the characters of the longest token. A text within that limit may still have too
    many tokens; a text beyond it always does.

    Args:
        tokenizer: of the model.
        context: tokens of a prompt with its output.
    """

    def __init__(self, tokenizer: Tokenizer, context: int):
        self._tokenizer, self._context = tokenizer, context

    def check(self, text: str, param: str, *, allowed: int = 0) -> None:
        """Raises `ApiError` (400) if the text cannot fit. Takes a moment once for a large vocabulary: call it in a thread.

        Args:
            text: of the prompt.
            param: what the error calls it.
            allowed: characters that are taken whether they fit or not.
        """
        # Each token has a character at least, so the vocabulary need not be looked at.
        if len(text) <= max(self._context, allowed):
            return
        longest = self._longest
        if longest is not None and len(text) > self._context * longest:
            raise ApiError(
                400,
                f"the context has {self._context} tokens, but the prompt has {len(text)} characters, and a token stands for "
                f"{longest} at most; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    def check_tokens(self, count: int, param: str, new_tokens: int = 1) -> None:
        """Raises `ApiError` (400) if a prompt of so many tokens cannot be continued with `new_tokens`."""
        if count + new_tokens > self._context:
            raise ApiError(
                400,
                f"the context has {self._context} tokens, but the prompt has {count} and the output may have {new_tokens}; "
                "shorten the prompt or lower max_tokens",
                param=param,
                code="context_length_exceeded",
            )

    @functools.cached_property
    def _longest(self) -> int | None:
        return longest_token(self._tokenizer)
