"""`GrammarConstraint`: a constraint based on a grammar of llguidance."""

import numpy as np
from llguidance import LLMatcher

from axlearn_core.errors import RequestError

_REJECTED = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that is not allowed."""


class GrammarTooAmbiguousError(RequestError):
    """A grammar needs too much work for one token.

    Attributes:
        reason: What to do, and the library's message.
    """

    def __init__(self, reason: str):
        self.reason = f"needs too much work for one token; simplify its grammar or schema: {reason}"
        super().__init__(f"the constraint {self.reason}")


class GrammarConstraint:
    """A `Constraint` based on a grammar. Call it from a single thread.

    Attributes:
        grammar: The grammar in llguidance's format. Another process can rebuild the constraint from it.
    """

    def __init__(self, matcher: LLMatcher, words: int, grammar: str):
        self._matcher, self._words, self.grammar = matcher, words, grammar

    def copy(self) -> "GrammarConstraint":
        """Return a copy in the same state."""
        return GrammarConstraint(self._matcher.deep_copy(), self._words, self.grammar)

    def mask(self) -> np.ndarray:
        """See `axlearn_plugins_serving.contracts.Constraint`.

        Raises:
            GrammarTooAmbiguousError: The grammar exceeds the library's limits.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        return np.pad(mask, (0, self._words - len(mask))) if len(mask) < self._words else mask[: self._words]

    def accept(self, token: int) -> bool:
        """See `axlearn_plugins_serving.contracts.Constraint`."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n<state>")[0]  # without a dump of the parser
            if _REJECTED in reason:  # the engine drew a token that the mask forbids
                raise ValueError(reason)
            raise GrammarTooAmbiguousError(reason)
