"""Speculation: tokens that probably come next, checked by the model in one step (Leviathan et al., 2023).

Only for greedy requests: a drafted token is taken where it is the likeliest one, so outputs are those without drafts.
"""

from collections.abc import Sequence
from typing import Protocol

import attrs

from axlearn_core.config import Configurable, node, offers, setting
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.contracts import RowResult, TokenLogprobs
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import Limits, Part, Plan


@offers()
class Drafter(Protocol):
    """Guesses what comes next. One per engine, in the slot `drafter`."""

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow those of a request; none where nothing is known."""
        ...


class NgramDrafter(Configurable):
    """What followed the last tokens when they stood in the request before (prompt lookup; Saxena, 2023)."""

    @node
    class Config(Configurable.Config["NgramDrafter"]):
        """`ngram` tokens have to be the same; then the `length` after them are drafted."""

        ngram: int = setting(default=3, ge=1)
        length: int = setting(default=4, ge=1)

    def __init__(self, cfg: Config):
        self.ngram, self.length = cfg.ngram, cfg.length

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """See `Drafter`. Takes time for the new tokens alone: the places of earlier ones are kept with the request."""
        tokens, places, size = state.tokens, state.places, self.ngram
        for end in range(
            max(size, state.indexed), len(tokens)
        ):  # the last tokens are looked up, and not found as themselves
            places[tuple(tokens[end - size : end])] = end
        state.indexed = len(tokens)
        place = places.get(tuple(tokens[-size:]))
        return () if place is None else tokens[place : place + min(most, self.length)]


def can_draft(state: RequestState) -> bool:
    """Whether the likeliest token of the model itself is what a request takes."""
    sampling = state.request.sampling
    changed = sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty
    return sampling.temperature == 0 and not changed and state.request.constraint is None


def add_drafts(plan: Plan, drafter: Drafter, cache: Cache, limits: Limits) -> None:
    """Puts drafts into the room that a step has left. No request of `can_draft` has tokens in flight."""
    chunk, steps = limits.chunk, [part.count for part in plan.parts]
    room = limits.step_tokens - sum(1 if count == 1 else -(-count // chunk) * chunk for count in steps)
    for index, part in enumerate(plan.parts):
        state = part.state
        if room < max(chunk, 2):
            return
        if not (part.decodes and can_draft(state)):
            continue
        most = min(chunk - 1 if chunk > 1 else room - 1, state.remaining - 1, limits.positions - part.start - 1)
        draft = tuple(drafter.draft(state, most)) if most > 0 else ()
        if draft and cache.extend(state, part.start + 1 + len(draft)):
            plan.parts[index] = attrs.evolve(part, count=1 + len(draft), decodes=False, draft=draft)
            room -= -(-(1 + len(draft)) // chunk) * chunk


def accept_draft(part: Part, result: RowResult) -> RowResult:
    """The tokens that the model chooses: drafted ones as far as they are the likeliest, and the one after them."""
    num_logprobs = part.state.request.sampling.logprobs
    assert result.target_logprobs is not None
    targets = [place.top[0] for place in result.target_logprobs[: len(part.draft)]]
    count = next((i for i, (best, _) in enumerate(targets) if best != part.draft[i]), len(part.draft))
    places = [
        TokenLogprobs(token=best, logprob=logprob, top=place.top[: num_logprobs or 0])
        for (best, logprob), place in zip(targets, result.target_logprobs, strict=False)
    ][: count + 1]
    tokens = [place.token for place in places]
    if count == len(part.draft):
        tokens += result.tokens
        places += [attrs.evolve(last, top=last.top[: num_logprobs or 0]) for last in result.logprobs or ()]
    return RowResult(tokens=tokens, logprobs=None if num_logprobs is None else places)
