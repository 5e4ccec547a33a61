"""Convert the runner's results to request outputs."""

from collections.abc import Sequence

from axlearn_plugins_serving.constraint_failure import ConstraintFailure, describe_failure
from axlearn_plugins_serving.contracts import Constraint, FinishReason, Output, RowResult, TokenLogprobs
from axlearn_plugins_serving.drafting import accept_draft
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import Part
from axlearn_plugins_serving.token_masks import ending_tokens


def read_part(part: Part, result: RowResult, end_tokens: frozenset[int], version: int) -> Output | None:
    """Update the request's state with a result.

    Returns None if there is nothing to output yet.

    Args:
        part: The request's part of a step.
        result: Result of the part.
        end_tokens: Tokens that end every output.
        version: Version of the weights that computed the step.
    """
    state = part.state
    state.drafts = tuple(result.drafts)
    if part.draft:
        output = _build_output(state, accept_draft(part, result), end_tokens, version)
        state.computed = len(state.tokens) - 1  # positions of rejected tokens are computed again
        state.resends_token = True
        return output
    if result.target_logprobs is not None and not state.sent_prompt_logprobs:
        _read_prompt_logprobs(state, part, result.target_logprobs)
    if part.decodes or part.sample:
        return _build_output(state, result, end_tokens, version)
    if state.limit == 0 and part.start + part.count == state.prompt_length:
        return _build_output(state, RowResult(), end_tokens, version)
    return None


def _read_prompt_logprobs(state: RequestState, part: Part, logprobs: Sequence[TokenLogprobs]) -> None:
    """Store the log-probabilities of prompt tokens.

    A preempted request computes some of them twice.
    """
    first = part.start - len(state.prompt_logprobs)
    if first <= 0:
        count = min(part.count, state.prompt_length - 1 - part.start)
        state.prompt_logprobs += list(logprobs[-first:count])


def _build_output(state: RequestState, result: RowResult, end_tokens: frozenset[int], version: int) -> Output:
    sampling, constraint = state.request.sampling, state.request.constraint
    stop_tokens = ending_tokens(sampling, end_tokens)
    finish: FinishReason | None = "length" if state.limit == 0 else None
    stop_token = failure = None
    tokens: list[int] = []
    num_generated = len(state.tokens) - state.prompt_length
    for token in map(int, result.tokens):
        if token in stop_tokens:
            finish, stop_token = "stop", token
            break
        tokens.append(token)
        if constraint is not None:
            finish, failure = _accept(constraint, token)
        if finish is None and num_generated + len(tokens) >= state.limit:
            finish = "length"
        if finish is not None:
            break
    state.tokens += tokens
    prompt_logprobs = None
    if not state.sent_prompt_logprobs:
        prompt_logprobs, state.sent_prompt_logprobs = tuple(state.prompt_logprobs), True
    logprobs = result.logprobs if sampling.logprobs is not None else None
    return Output(
        id=state.request.id,
        tokens=tuple(tokens),
        logprobs=None if logprobs is None else tuple(logprobs[: len(tokens)]),
        prompt_logprobs=prompt_logprobs,
        finish=finish,
        stop_token=stop_token,
        stop_logprobs=None if logprobs is None or stop_token is None else logprobs[len(tokens)],
        version=version,
        cached_tokens=state.cached_tokens or 0,
        error=None if failure is None else failure.message,
        request_wrong=failure is not None and failure.request_wrong,
        started=state.started,
    )


def _accept(constraint: Constraint, token: int) -> tuple[FinishReason | None, ConstraintFailure | None]:
    try:
        return "stop" if constraint.accept(token) else None, None
    except Exception as error:  # constraints may raise anything; only this request fails
        return "error", describe_failure(error)
