"""`StagedConstraint`: a constraint on the answer that leaves the reasoning and the tool calls before it free."""

import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs
import numpy as np

from axlearn_plugins_serving.server.grammar_constraint import GrammarConstraint


@attrs.frozen(kw_only=True)
class Stages:
    """The parts of an output before the answer.

    Attributes:
        reasons: Whether the output begins inside of the reasoning.
        opening: Tokens of the text that begins the reasoning; empty if the model does not reason.
        closing: Tokens of the text after which the answer begins.
        ending: Tokens that end the reasoning and begin the answer. They end with `closing`.
        budget: Maximum number of tokens of the reasoning. After them, `ending` is forced. None sets no limit.
        call: Tokens of the text that begins a tool call; empty if the model may not call tools. After them, any token is allowed.
        ends: Tokens that end an output. The reasoning must not end with one of them, since the answer would be missing.
    """

    reasons: bool = False
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()
    budget: int | None = None
    call: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Stages":
        """Return the stages that `attrs.asdict` wrote to JSON."""
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return cls(**fields)


class StagedConstraint:
    """A constraint that applies a grammar to the answer. Call it from a single thread.

    Args:
        stages: The parts before the answer.
        grammar: Constraint of the answer. None allows any answer.
        words: Number of words in a mask.
    """

    def __init__(self, stages: Stages, grammar: GrammarConstraint | None, words: int):
        self._stages, self._grammar, self._words = stages, grammar, words
        self._stage: Literal["begin", "marker", "reasoning", "answer", "free"] = (
            "reasoning" if stages.reasons else "begin"
        )
        self._markers = [marker for marker in (stages.opening, stages.call) if marker]
        self._read: list[int] = []  # tokens of a marker
        self._tail: deque[int] = deque(maxlen=max(1, len(stages.closing)))
        self._count = self._forced = 0

    @property
    def grammar(self) -> str:
        """The constraint as text. Another process can rebuild the constraint from it."""
        inner = None if self._grammar is None else self._grammar.grammar
        return json.dumps({"stages": attrs.asdict(self._stages), "grammar": inner})

    def copy(self) -> "StagedConstraint":
        """Return a constraint for another output. Only call it before the first token."""
        inner = None if self._grammar is None else self._grammar.copy()
        return StagedConstraint(self._stages, inner, self._words)

    def mask(self) -> np.ndarray:
        """See `axlearn_plugins_serving.contracts.Constraint`."""
        if self._stage == "marker" and self._grammar is not None:
            return self._allow(self._next_of_markers())
        if self._stage == "reasoning" and self._is_over_budget:
            return self._allow({self._stages.ending[self._forced]})
        if self._stage in ("reasoning", "free") or self._grammar is None:
            mask = np.full(self._words, 0xFFFFFFFF, np.uint32)
            return mask & ~self._allow(self._stages.ends) if self._stage == "reasoning" else mask
        mask = self._grammar.mask()
        return mask | self._allow(self._next_of_markers()) if self._stage == "begin" else mask

    def accept(self, token: int) -> bool:
        """See `axlearn_plugins_serving.contracts.Constraint`."""
        if self._stage == "reasoning":
            self._read_reasoning(token)
        elif self._stage == "marker" or (self._stage == "begin" and self._begins_marker(token)):
            self._read_marker(token)
        elif self._stage != "free":
            self._stage = "answer"
            return self._grammar is not None and self._grammar.accept(token)
        return False

    @property
    def _is_over_budget(self) -> bool:
        return self._stages.budget is not None and self._count >= self._stages.budget

    def _next_of_markers(self) -> set[int]:
        position = len(self._read)
        return {m[position] for m in self._markers if list(m[:position]) == self._read and len(m) > position}

    def _begins_marker(self, token: int) -> bool:
        if token not in self._next_of_markers():
            return False
        return self._grammar is None or not self._grammar.mask()[token // 32] >> np.uint32(token % 32) & np.uint32(1)

    def _read_marker(self, token: int) -> None:
        self._stage = "marker"
        self._read.append(token)
        marker = tuple(self._read)
        if marker == self._stages.opening:
            self._tail.extend(self._read)
            self._stage, self._count, self._read = "reasoning", 0, []
        elif marker == self._stages.call:
            self._stage = "free"
        elif self._grammar is None and not self._next_of_markers():
            self._stage = "answer"  # the answer only looked like a marker

    def _read_reasoning(self, token: int) -> None:
        self._forced = self._forced + 1 if self._is_over_budget else 0
        self._count += 1
        self._tail.append(token)
        if tuple(self._tail) == self._stages.closing:
            self._stage = "begin"
            self._markers = [marker for marker in self._markers if marker != self._stages.opening]

    def _allow(self, tokens: Iterable[int]) -> np.ndarray:
        mask = np.zeros(self._words, np.uint32)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask
