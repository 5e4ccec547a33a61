"""`PolicyService`: the server's chat API in this process, answered by the policy of a training run.

The endpoints, the parsers of tool calls and the formats of the responses are those of `axlearn serve`. Prompts are the exact tokens
of the conversation so far, and every answer is recorded.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import attrs

from axlearn_core.errors import AxlearnError
from axlearn_plugins_rl.agents.attempt import current_call
from axlearn_plugins_rl.environments.answer_messages import NumberedReader
from axlearn_plugins_rl.environments.rollout_formats import RolloutFormats
from axlearn_plugins_rl.rollout_contracts import Completion, Policy
from axlearn_plugins_serving.contracts import Output, Request, Statistics, TokenLogprobs
from axlearn_plugins_serving.server.answer_reader import AnswerReader
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.conversation import Conversation
from axlearn_plugins_serving.server.conversation_template import RenderedPrompt, fit_role, template_options
from axlearn_plugins_serving.server.engine_thread import EngineFailedError, EngineThread, Outputs
from axlearn_plugins_serving.server.prompt_job import Job
from axlearn_plugins_serving.server.schemas import SamplingFields
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_serving.server.text_pool import TextPool

T = TypeVar("T")

NAME = "policy"
"""Name of the model in requests."""
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Parameter that a policy may set -> the value that changes nothing."""
_UNSUPPORTED: dict[str, float] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos"), 0),
    **dict.fromkeys(("bad_words", "logit_bias", "stop_token_ids", "prompt_logprobs"), 0),
    **dict.fromkeys(("structured_outputs", "json_schema", "grammar", "include_stop_str_in_output"), 0),
    "repetition_penalty": 1,
    "skip_special_tokens": 1,
}
"""Field that would change the distribution or the recorded text -> the value that changes nothing. 0 stands for empty values."""


@attrs.frozen
class _Limits:
    """What the service asks an engine: the size of the vocabulary and of the context."""

    vocab_size: int
    max_context: int


class PolicyRequests:
    """Answers the engine requests of a service with a policy.

    It has the members of `EngineThread` that requests use.

    Args:
        policy: The policy.
    """

    statistics = Statistics(
        **dict.fromkeys(
            ("waiting", "running", "blocks", "used_blocks", "cached_blocks", "prompt_tokens", "cached_prompt_tokens"), 0
        ),
        **dict.fromkeys(("output_tokens", "preemptions", "steps", "compilations"), 0),
        step_seconds=0.0,
        host_seconds=0.0,
    )
    failure = None

    def __init__(self, policy: Policy):
        self.engine = _Limits(policy.text.tokenizer.vocab_size, policy.max_context)
        self._ends = policy.text.end_tokens
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def active(self) -> int:
        """The number of unfinished requests."""
        return len(self._tasks)

    async def add(self, requests: Sequence[Request], *, bounded: bool = True) -> Outputs:
        """Let the policy answer all requests of a call. See `EngineThread.add`."""
        call, outputs = current_call.get(), Outputs([request.id for request in requests], float("inf"))
        assert call.turn is not None
        turns = [call.turn, *(call.open(call.turn.messages) for _ in requests[1:])]
        for request, turn in zip(requests, turns, strict=True):
            answer = call.attempt.sample(call, turn, max_tokens=request.sampling.max_tokens, seed=request.sampling.seed)
            task = asyncio.ensure_future(self._answer(request, answer, outputs))
            self._tasks[request.id] = task
        return outputs

    def abort(self, ids: Sequence[str]) -> None:
        """Abort requests that have not ended."""
        for id in ids:
            if (task := self._tasks.pop(id, None)) is not None:
                task.cancel()

    async def _answer(self, request: Request, answer: Any, outputs: Outputs) -> None:
        try:
            completion = await answer
        except Exception:  # the attempt keeps the error for the source
            outputs.fail(EngineFailedError("the policy has failed"))
        else:
            outputs.put(self._output(request, completion))
        finally:
            self._tasks.pop(request.id, None)

    def _output(self, request: Request, completion: Completion) -> Output:
        segment = completion.segment
        tokens, scores = [int(token) for token in segment.tokens], segment.model_logprobs
        ends = completion.finish == "stop" and bool(tokens) and tokens[-1] in self._ends
        logprobs = None
        if request.sampling.logprobs is not None and scores is not None:
            pairs = zip(tokens, scores, strict=True)
            logprobs = tuple(TokenLogprobs(token=token, logprob=float(score)) for token, score in pairs)
        return Output(
            id=request.id,
            tokens=tuple(tokens[:-1] if ends else tokens),
            logprobs=logprobs[:-1] if logprobs and ends else logprobs,
            finish="stop" if completion.finish == "stop" else "length",
            stop_token=tokens[-1] if ends else None,
        )


class _InlineTexts(TextPool):
    """Processes texts in the event loop, so that the order of calls does not depend on threads."""

    async def run(self, function: Callable[[], T], size: int) -> T:
        return function()


@attrs.define(eq=False)
class PolicyService(Service):
    """A `Service` whose model is a policy. Each request belongs to the `current_call`.

    Attributes:
        policy: The policy.
        choices: Formats of tool calls and reasoning, and variables of the chat template.
    """

    policy: Policy = attrs.field(kw_only=True)
    choices: RolloutFormats = attrs.field(kw_only=True)

    @classmethod
    def open(cls, policy: Policy, formats: RolloutFormats) -> "PolicyService":
        """Return the service of a policy."""
        thread = cast(EngineThread, PolicyRequests(policy))  # requests use no other members
        return cls(
            thread,
            policy.text,
            NAME,
            tool_parser=formats.config.tool_parser,
            reasoning_parser=formats.config.reasoning_parser,
            policy=policy,
            choices=formats,
        )

    def __attrs_post_init__(self) -> None:
        Service.__attrs_post_init__(self)
        self.text_pool = _InlineTexts()

    async def render(self, conversation: Conversation, size: int, *, limited: bool = True) -> RenderedPrompt:
        """Return the conversation as the exact tokens of its turns. See `Service.render`."""
        call = current_call.get()
        if conversation.continues or not conversation.prompt:
            raise ApiError(
                400, "the policy starts a new answer; it cannot continue a message", param=conversation.param
            )
        template = self.text.data_template
        options = {**self.choices.config.options, **template_options(template.variables, conversation)}
        call.tools, call.options = conversation.use.tools, options
        try:
            call.turn = call.open([fit_role(message, template.source) for message in conversation.messages])
        except AxlearnError as error:
            raise ApiError(400, str(error), param=conversation.param, code="chat_template") from None
        if len(call.turn.tokens) >= self.policy.max_context:
            call.attempt.is_full = True
            self.text_limit.check_tokens(len(call.turn.tokens), conversation.param)
        return RenderedPrompt(call.turn.text, list(call.turn.tokens))

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        fields: SamplingFields,
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        reader: AnswerReader | None = None,
        prompt_logprobs: int | None = None,
        param: str = "prompt",
    ) -> Job:
        """Let the policy answer. See `Service.submit`.

        Raises:
            ApiError: If the request is not a conversation, or asks for another distribution than the policy samples from.
        """
        call = current_call.get()
        if call.turn is None or reader is None:
            raise ApiError(400, "agents send conversations\n    fix: use chat.completions or responses", param=param)
        self._check_sampling(fields, logprobs)
        if reader.use.mode == "required" or reader.budget is not None:
            name = "tool_choice" if reader.use.mode == "required" else "thinking_token_budget"
            raise _unsupported(name, "leave it out")
        room = self.policy.max_context - len(call.turn.tokens)
        call.stop, call.reader = fields.stops, NumberedReader.wrap(reader, call.attempt.numbers)
        return await Service.submit(
            self,
            prompts,
            fields,
            max_tokens=None if max_tokens is None else min(max_tokens, room),
            logprobs=logprobs,
            reader=call.reader,
            param=param,
        )

    def check_prompts(self, prompts: Sequence[Sequence[int]], param: str, new_tokens: int) -> None:
        """Accept the prompt, which `render` has checked. The policy may have drawn tokens that its tokenizer does not have."""

    def _check_sampling(self, fields: SamplingFields, logprobs: int | None) -> None:
        """Raise `ApiError` if a request asks for another distribution than the policy samples from."""
        values = fields.model_dump(include={*_SAMPLING, *_UNSUPPORTED})
        for name, neutral in _SAMPLING.items():
            value, expected = values[name], self.policy.sampling.get(name, neutral)
            if value is not None and value != expected and (value, expected) != (-1, 0):  # top_k -1 stands for 0
                raise _unsupported(name, f"leave it out, or set {name} of the policy", str(value), f"{expected:g}")
        for name, neutral in _UNSUPPORTED.items():
            if (values[name] or 0) != neutral and values[name] is not None:
                raise _unsupported(name, "leave it out")
        if fields.response_format is not None and fields.response_format.type != "text":
            raise _unsupported("response_format", "describe the format in the prompt, and reward it")
        if logprobs:
            raise _unsupported("top_logprobs", "ask for logprobs only")


def _unsupported(name: str, fix: str, got: str = "", expected: str = "") -> ApiError:
    """Return the error for a field that changes the distribution."""
    values = f"\n    got: {got}\n    expected: {expected}" if got else ""
    message = f"{name}: agents are trained on what the policy samples, so a request cannot change how it samples"
    return ApiError(400, f"{message}{values}\n    fix: {fix}", param=name, code="unsupported_sampling")
