"""Speculative decoding (Leviathan et al., 2023).

A drafter proposes several tokens, and the model verifies them in one step.

Only greedy requests use drafts. A drafted token is accepted only if it is the most likely one, so drafts do not change outputs.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import attrs

from axlearn_core.config import Configurable, node, offers, setting
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.contracts import RowResult, TokenLogprobs
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import Limits, Part, SchedulerOutput


@offers("runner", "text")
class Drafter(Protocol):
    """Drafts the next tokens of requests.

    An engine has at most one drafter, in its `drafter` slot. The slot offers the `runner` of the served model, and its `text`
    processor, or None. A drafter may also implement `DraftsTogether`, `CompilesFunctions`, `ReleasesMemory` or `HoldsResources`.
    """

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """Return at most `most` tokens that may follow a request's tokens.

        The list may be empty.
        """
        ...


@runtime_checkable
class DraftsTogether(Protocol):
    """A drafter that drafts for all requests of a step at once."""

    def draft_all(self, requests: Sequence[tuple[RequestState, int]]) -> Sequence[Sequence[int]]:
        """Return the draft of each request.

        Args:
            requests: Each running request, with the maximum number of tokens of its draft.
        """
        ...


class NgramDrafter(Configurable):
    """Prompt lookup (Saxena, 2023): draft what followed the same n-gram earlier.

    It searches the request's own tokens.
    """

    @node
    class Config(Configurable.Config["NgramDrafter"]):
        """Match the last `ngram` tokens and draft the `length` tokens after the match."""

        ngram: int = setting(default=3, ge=1)
        length: int = setting(default=4, ge=1)

    def __init__(self, cfg: Config):
        self.ngram, self.length = cfg.ngram, cfg.length

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """See `Drafter.draft`.

        Only new tokens are indexed; the request keeps the index of earlier ones.
        """
        tokens, places, size = state.tokens, state.places, self.ngram
        for end in range(max(size, state.indexed), len(tokens)):  # skip the last n-gram, which would match itself
            places[tuple(tokens[end - size : end])] = end
        state.indexed = len(tokens)
        place = places.get(tuple(tokens[-size:]))
        return () if place is None else tokens[place : place + min(most, self.length)]


class ModelDrafter(Configurable):
    """Draft with the heads of the model, in the step that chooses the previous token.

    The model is a `DraftsTokens`; see `axlearn_plugins_transformer.causal_lm`.
    """

    @node
    class Config(Configurable.Config["ModelDrafter"]):
        """Draft at most `length` tokens. None uses all tokens that the model drafts."""

        length: int | None = setting(default=None, ge=1)

    def __init__(self, cfg: Config):
        self.length = cfg.length

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        return state.drafts[: most if self.length is None else min(most, self.length)]


def can_draft(state: RequestState) -> bool:
    """Return True if a request always takes the model's most likely token."""
    sampling = state.request.sampling
    masked = sampling.min_tokens or sampling.bad_tokens or state.request.constraint is not None
    return sampling.is_greedy and not sampling.adjusts_logits and not masked


def add_drafts(plan: SchedulerOutput, drafter: Drafter, cache: Cache, limits: Limits) -> None:
    """Add drafts to a plan while the step has room for them.

    Requests that can draft must not have tokens in flight.
    """
    chunk, steps = limits.chunk, [part.count for part in plan.parts]
    room = limits.step_tokens - sum(1 if count == 1 else -(-count // chunk) * chunk for count in steps)
    candidates: list[tuple[int, int]] = []
    for index, part in enumerate(plan.parts):
        length = min(chunk - 1 if chunk > 1 else room - 1, part.state.remaining - 1, limits.positions - part.start - 1)
        if part.decodes and can_draft(part.state) and length > 0:
            candidates.append((index, length))
    requests = [(plan.parts[index].state, length) for index, length in candidates]
    drafts: Iterable[Sequence[int]]
    if isinstance(drafter, DraftsTogether):
        requests = requests[: max(0, room) // max(chunk, 2)]  # as many as fit into the step
        drafts = drafter.draft_all(requests) if requests else ()
    else:
        drafts = (drafter.draft(*request) for request in requests)
    for (index, _), tokens in zip(candidates, drafts, strict=False):
        if room < max(chunk, 2):
            return
        part, draft = plan.parts[index], tuple(tokens)[: chunk - 1 if chunk > 1 else room - 1]
        if draft and cache.extend(part.state, part.start + 1 + len(draft)):
            plan.parts[index] = attrs.evolve(part, count=1 + len(draft), decodes=False, draft=draft)
            room -= -(-(1 + len(draft)) // chunk) * chunk


def accept_draft(part: Part, result: RowResult) -> RowResult:
    """Return the drafted tokens that the model confirms and the token after them."""
    sampling = part.state.request.sampling
    num_logprobs = sampling.logprobs
    certain = 0.0 if sampling.sampling_logprobs else None  # drafts are accepted only from greedy requests
    assert result.target_logprobs is not None
    targets = [place.top[0] for place in result.target_logprobs[: len(part.draft)]]
    count = next((i for i, (best, _) in enumerate(targets) if best != part.draft[i]), len(part.draft))
    places = [
        TokenLogprobs(token=best, logprob=logprob, top=place.top[: num_logprobs or 0], sampling_logprob=certain)
        for (best, logprob), place in zip(targets, result.target_logprobs, strict=False)
    ][: count + 1]
    tokens = [place.token for place in places]
    if count == len(part.draft):
        tokens += result.tokens
        places += [attrs.evolve(last, top=last.top[: num_logprobs or 0]) for last in result.logprobs or ()]
    return RowResult(tokens=tokens, logprobs=None if num_logprobs is None else places)
