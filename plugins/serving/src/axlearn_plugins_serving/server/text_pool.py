"""Threads that tokenize requests.

Long texts would otherwise block the event loop.
"""

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
"""Maximum number of characters or bytes that are processed in the event loop, which is faster than waking a thread."""
HUGE = 256 * 1024
"""Number of characters or bytes above which a request uses the thread for huge texts."""
COUNTED = 1024 * 1024
"""Maximum number of characters that `/tokenize` encodes beyond the context. Longer texts take seconds and
gigabytes of memory."""


class TextPool:
    """Threads that process texts: parse, render and tokenize them.

    Short texts are processed in the event loop, long texts in two threads, and huge texts in a third. A prompt of a few pages
    therefore never waits behind a client that sends megabytes.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-text")

    async def run(self, function: Callable[[], T], size: int) -> T:
        """Call a function that reads `size` characters or bytes, and return its result."""
        if size <= SHORT:
            return function()
        lane = self._long if size <= HUGE else self._huge
        return await asyncio.get_running_loop().run_in_executor(lane, function)

    def close(self) -> None:
        """Cancel work that has not started."""
        for lane in (self._long, self._huge):
            lane.shutdown(wait=False, cancel_futures=True)


class TextLimit:
    """A limit on the length of texts, based on the context.

    A context of N tokens has at most N times as many characters as the longest token. A longer text never fits; a shorter text
    may still have too many tokens.

    Args:
        tokenizer: Tokenizer of the model.
        context: Maximum number of tokens in a prompt and its output.
    """

    def __init__(self, tokenizer: Tokenizer, context: int):
        self._tokenizer, self._context = tokenizer, context

    def check(self, text: str, param: str, *, allowed: int = 0) -> None:
        """Raise `ApiError` (400) if the text cannot fit.

        The first call scans the vocabulary, so call it in a thread.

        Args:
            text: Text of the prompt.
            param: Name of the prompt in the error message.
            allowed: Number of characters to accept even if they do not fit.
        """
        # Each token has at least one character, so this does not need the vocabulary.
        if len(text) <= max(self._context, allowed):
            return
        longest = self._longest
        if longest is not None and len(text) > self._context * longest:
            raise ApiError(
                400,
                f"the context has {self._context} tokens, but the prompt has {len(text)} characters, and a token stands for "
                f"at most {longest}; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    def check_tokens(self, count: int, param: str, new_tokens: int = 1) -> None:
        """Raise `ApiError` (400) if `count` plus `new_tokens` exceeds the context."""
        if count + new_tokens <= self._context:
            return
        message = f"the context has {self._context} tokens, but the prompt has {count}"
        if count + 1 <= self._context:
            message += f" and the output may have {new_tokens}; shorten the prompt or lower the limit of the output"
        elif count > self._context:
            message += "; shorten the prompt"
        else:
            message += ", which leaves no room for an output; shorten the prompt"
        raise ApiError(400, message, param=param, code="context_length_exceeded")

    @functools.cached_property
    def _longest(self) -> int | None:
        return longest_token(self._tokenizer)
