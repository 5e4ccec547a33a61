"""`ScriptedPolicy`: a policy without a model, for tests of rollout sources and environments."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from axlearn_core.errors import RequestError
from axlearn_plugins_rl.rollout_contracts import Completion, Segment
from axlearn_plugins_transformer.text.decoding import OutputOptions
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

Script = Callable[[str, int], str]
"""Returns the output for a context (its text, with special tokens spelled out) and a seed."""


class ScriptedPolicy:
    """A `Policy` whose outputs come from a function.

    An output ends with the end-of-document token, unless it reaches a limit or a stop string first. Log-probabilities are hashes
    of the tokens before them, so a test can check which context a token was drawn in.

    Args:
        script: Returns the outputs.
        text: Text processor; the default is one for bytes with the plain chat template.
        max_context: See `Policy`.
        max_tokens: Limit on the tokens of an output.
        delay: Duration of a completion in seconds.

    Attributes:
        contexts: The contexts so far, with the seeds.
    """

    def __init__(
        self,
        script: Script,
        text: TextProcessor | None = None,
        *,
        max_context: int = 4096,
        max_tokens: int = 1024,
        version: int = 0,
        delay: float = 0.0,
    ):
        self.text = text or TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
        self.version, self.max_context = version, max_context
        self.sampling: Mapping[str, float] = {"temperature": 1.0}
        self.contexts: list[tuple[tuple[int, ...], int]] = []
        self._script, self._max_tokens, self._delay = script, max_tokens, delay

    async def sample(
        self, context: Sequence[int], *, seed: int, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """See `Policy.sample`."""
        context = tuple(context)
        room = self.max_context - len(context)
        if not context or room < 1:
            raise RequestError(f"the context has {len(context)} of {self.max_context} tokens")
        self.contexts.append((context, seed))
        if self._delay:
            await asyncio.sleep(self._delay)
        written = self._script(self.text.spell(context), seed)
        tokens = [*self.text.encode_marker(written), self.text.tokenizer.eos_id]
        output, pieces = self.text.output(context, OutputOptions(stops=tuple(stop))), []
        for count, token in enumerate(tokens[:-1], 1):
            pieces.append(output.push(token))
            if output.stopped:
                tokens = tokens[:count]
                break
        limit = min(room, self._max_tokens if max_tokens is None else max_tokens)
        is_cut = len(tokens) > limit
        text = self.text.output_text(context, tokens[:limit]) if is_cut else "".join([*pieces, output.end()])
        tokens = tokens[:limit]
        logprobs = np.array([logprob_of([*context, *tokens[:i]], t) for i, t in enumerate(tokens)], np.float32)
        segment = Segment(
            tokens=np.asarray(tokens, np.int32),
            drawn=True,
            logprobs=logprobs,
            model_logprobs=logprobs,
            version=self.version,
        )
        return Completion(segment=segment, text=text, finish="length" if is_cut else "stop")


def logprob_of(context: Sequence[int], token: int) -> float:
    """Return the log-probability that a `ScriptedPolicy` gives to a token after a context."""
    digest = hashlib.blake2b(np.asarray([*context, token], np.int32).tobytes(), digest_size=2).digest()
    return -1e-3 * (1 + int.from_bytes(digest, "little"))
