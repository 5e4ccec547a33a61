"""A property for `axlearn prove`: the paged engine produces the tokens and the logits of the forward pass.

This module needs `axlearn-plugins-verify`, which loads it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import jax
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.config import patch
from axlearn_core.contracts.capabilities import GeneratesTokens
from axlearn_core.errors import AxlearnError
from axlearn_plugins_serving.admission import MAX_LOGPROBS
from axlearn_plugins_serving.contracts import Output, Request, Sampling, TokenLogprobs
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import build_engine, check_decoder, remove_kernels
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_serving.runner_program import RunnerProgram
from axlearn_plugins_transformer.cache_spec import has_states
from axlearn_plugins_verify.properties.causality import bidirectional
from axlearn_plugins_verify.properties.decode import exact_caches
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import (
    check_precisely,
    competing_tokens,
    compute_logits,
    logits_tolerance,
    missing_logits,
    model_weights,
    prefix_length,
    random_rows,
    rows_shape,
)
from axlearn_plugins_verify.prove.reuse import reuse

BLOCK = 2
"""Tokens per cache block. The number is small, so that short prompts span several blocks."""
CHUNK, STEP = 2, 4
"""Prompt tokens per row of a step, and per step."""
RUNNING = 3
"""Number of requests that run at the same time. A fourth request preempts the last of them."""
ENGINE = "engine"
"""Key of the engine that the seeds of a proof share."""


class PagedDecoding:
    """Serves four greedy requests with the engine of `axlearn serve`, and compares them with the forward pass.

    The prompts have different lengths and are computed in chunks. The second prompt starts with the same tokens as the first, so
    it shares the first one's blocks. The fourth request has a higher priority and arrives when all slots are taken, so the third
    one loses its blocks and is computed again. Each token must have the largest logit of the forward pass, up to rounding, and
    the log-probabilities of tokens must be equal.
    """

    summary: ClassVar[str] = "the paged engine gives the tokens and the logits of the forward pass"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models that cannot be served."""
        reason = missing_logits(case) or bidirectional(case) or competing_tokens(case)
        if reason is not None:
            return reason
        if not isinstance(case.program().functional.describe(), GeneratesTokens):
            return "the model does not generate tokens"
        if prefix := prefix_length(case):
            return f"some of the random prompts do not contain the prefix of {prefix} tokens"
        if rows_shape(case)[1] < 2 * STEP:
            return f"rows of {rows_shape(case)[1]} tokens are too short for prompts in chunks"
        try:
            check_decoder(case.config.model)
            RunnerProgram(_runner(case), remove_kernels(case.config.model), jax.local_devices()[:1])
        except AxlearnError as error:
            return f"the model cannot be served: {str(error).splitlines()[0]}"
        return None

    def check(self, case: Any) -> Outcome:
        """Compare log-probabilities, then tokens. Keys and values are stored in the dtype of the model."""
        exact, _ = exact_caches(case.config)
        return check_precisely(case, lambda config: self._check(case, case.program(_served(patch(config, exact)))))

    def _check(self, case: Any, program: Program) -> Outcome:
        weights, length = model_weights(case, program), rows_shape(case)[1]
        requests = list_requests(case)
        engine = reuse_engine(case, program, weights)
        before = engine.statistics()
        try:
            answers, numbers = serve_requests(engine, requests), engine.statistics()
        except Exception:  # its requests may still run
            del program.attachments[ENGINE]
            engine.close()
            raise
        rows = np.zeros((len(requests), length), np.int32)
        for row, request in zip(rows, requests, strict=True):
            tokens = [*request.prompt, *answers[request.id].tokens]
            row[: len(tokens)] = tokens
        logits = compute_logits(program, weights, {"tokens": rows})
        tolerance = logits_tolerance(case, program, {"tokens": rows})
        scale = float(np.sqrt(np.mean(np.square(np.linalg.norm(logits, axis=-1))))) or 1.0
        worst, difference = 0.0, None
        for exact, request in zip(logits, requests, strict=True):
            for token in compare_answer(request, answers[request.id], exact, scale):
                worst = max(worst, token.error)
                if difference is None and not token.error <= tolerance:
                    difference = token
        cached = numbers.cached_prompt_tokens - before.cached_prompt_tokens
        shared = f"{cached} shared tokens and {numbers.preemptions - before.preemptions} preempted"
        return Outcome(
            error=worst,
            tolerance=tolerance,
            compared=f"tokens and log-probabilities of {len(requests)} requests, with {shared}",
            difference=difference,
        )


def _served(config: Any) -> Any:
    return patch(config, {"model": remove_kernels(config.model)})


def reuse_engine(case: Any, program: Program, weights: ModelWeights) -> ServingEngine:
    """Return the engine of a program with the given weights.

    An engine that was built for an earlier seed gets the weights, so that its functions need not be compiled again.
    """

    def build() -> ServingEngine:
        model = program.functional.bind(weights.params, weights.variables)
        config = ServingEngine.Config(runner=_runner(case), tensor_parallel=1)
        return build_engine(model, program=program, config=config, warm_up=False)

    if ENGINE in program.attachments:
        program.attachments[ENGINE].update_weights(weights)
    return reuse(program, ENGINE, build)


def _runner(case: Any) -> ModelRunner.Config:
    return ModelRunner.Config(
        block_size=BLOCK,
        max_rows=RUNNING,
        max_context=rows_shape(case)[1],
        max_step_tokens=STEP,
        chunk=CHUNK,
        row_buckets=(),
        chunk_buckets=(),
    )


def list_requests(case: Any) -> list[Request]:
    """Return the requests: a long prompt, one with the same beginning, a short one, and one with a higher priority.

    A recurrent state is saved before the last token of a prompt, so the second prompt of a recurrent model shares all others.
    """
    tokens, length = random_rows(case, 6, 3), rows_shape(case)[1]
    prompt = length // 2 + 1
    model = case.program().functional.describe()
    shared = BLOCK * ((prompt - 1) // BLOCK if has_states(model.cache_spec()) else prompt // BLOCK // 2)
    prompts = (
        tokens[0, :prompt],
        np.concatenate([tokens[0, :shared], tokens[1, : max(prompt - shared - 1, BLOCK)]]),
        tokens[1, :BLOCK],
        tokens[2, : STEP + 1],
    )
    return [
        Request(
            id=str(index),
            prompt=tuple(map(int, part)),
            priority=-1 if index == RUNNING else 0,
            sampling=Sampling(
                temperature=0.0, max_tokens=length - len(part), logprobs=MAX_LOGPROBS, prompt_logprobs=index == RUNNING
            ),
        )
        for index, part in enumerate(prompts)
    ]


@attrs.define
class Answer:
    """The output of a request.

    Attributes:
        tokens: Output tokens.
        logprobs: Log-probabilities of the tokens.
        prompt_logprobs: Log-probabilities of the prompt's tokens after the first, if requested.
        preempted: Number of output tokens when the request lost its blocks, or None.
    """

    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    preempted: int | None = None

    def add(self, output: Output) -> None:
        """Add the output of a step."""
        self.tokens += output.tokens
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs


def serve_requests(engine: ServingEngine, requests: Sequence[Request]) -> Mapping[str, Answer]:
    """Run requests. The second and third arrive after the first one's first token, and the last when all others decode."""
    answers = {request.id: Answer() for request in requests}
    first, *others, last = requests

    def step() -> None:
        for output in engine.step():
            answers[output.id].add(output)

    def step_until(waiting: Sequence[Request]) -> None:
        while engine.busy() and not all(answers[request.id].tokens for request in waiting):
            step()

    engine.add(first)
    step_until([first])
    for request in others:
        engine.add(request)
    step_until(others)
    before, count = engine.statistics().preemptions, len(answers[others[-1].id].tokens)
    engine.add(last)
    while engine.busy():
        step()
    if engine.statistics().preemptions > before:
        answers[others[-1].id].preempted = count
    return answers


def compare_answer(request: Request, answer: Answer, logits: np.ndarray, scale: float) -> Iterator[Difference]:
    """Yield the error of each token of a request, relative to the norm of a token's logits.

    A log-probability differs from the exact one by at most twice the error of the logits, and so does the gap between the chosen
    token and the best one.

    Args:
        request: The request.
        answer: The request's output.
        logits: Logits of the forward pass, [S, V].
        scale: Root mean square of the logits' norms.
    """
    exact = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    start = len(request.prompt)
    prompt = f"the prompt of {start} tokens"
    if answer.preempted is not None:
        prompt += f", preempted after about {answer.preempted} tokens"
    for place, entry in enumerate(answer.prompt_logprobs):
        yield _logprob_error(entry, exact[place], scale, f"token {place + 2} of {prompt}")
    for index, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        place = start - 1 + index
        name = f"token {index + 1} after {prompt}"
        yield _logprob_error(entry, exact[place], scale, name)
        gap = float(exact[place].max() - exact[place, token]) / (2 * scale)
        detail = f"{name} is {token}, but the forward pass prefers {int(exact[place].argmax())}"
        yield Difference(layer="engine", tensor="tokens", error=gap, detail=detail)
    missing = len(logits) - start - len(answer.tokens)
    if missing:
        detail = f"{missing} of {len(logits) - start} tokens after {prompt} are missing"
        yield Difference(layer="engine", tensor="tokens", error=float("inf"), detail=detail)


def _logprob_error(entry: TokenLogprobs, exact: np.ndarray, scale: float, name: str) -> Difference:
    pairs = [(entry.token, entry.logprob), *entry.top]
    errors = [abs(value - float(exact[token])) / (2 * scale) for token, value in pairs]
    worst = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
    token, value = pairs[worst]
    error = errors[worst] if np.isfinite(errors[worst]) else float("inf")
    detail = f"{name}: log-probability of {token} is {value:.6g}, expected {exact[token]:.6g}"
    return Difference(layer="engine", tensor="logits", error=error, detail=detail)
