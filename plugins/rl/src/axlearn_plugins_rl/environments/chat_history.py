"""`ChatHistory`: the conversations of a rollout as tokens.

Each turn continues the exact tokens of the turns before it. Only new text is encoded, so tokens that the policy drew are never
encoded again. If the chat template leaves out a part of an earlier turn, such as its reasoning, the whole conversation is encoded
again and starts a new trajectory, because the server would send the model the same tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.errors import InputError
from axlearn_plugins_rl.recorded_experts import join_completion
from axlearn_plugins_rl.rollout_contracts import Completion, Message, Segment, Trajectory
from axlearn_plugins_transformer.text.chat_template import ChatTemplate, RenderedChat
from axlearn_plugins_transformer.text.messages import REASONING, normalize_messages
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.protocols import special_tokens_of


@attrs.frozen(kw_only=True, eq=False)
class Turn:
    """A conversation that the policy answers.

    Attributes:
        tokens: The context.
        text: Text of the context, with special tokens spelled out.
        messages: The messages, normalized.
        setting: Tools and variables of the template.
        segments: Segments of the context.
        previous: The answer that the conversation continues, or None if it was encoded afresh.
        order: Number of the first turn of its trajectory.
    """

    tokens: tuple[int, ...]
    text: str
    messages: list[dict[str, Any]]
    setting: Any
    segments: Trajectory
    previous: "_Answer | None" = None
    order: int = 0


@attrs.define(kw_only=True, eq=False)
class _Answer:
    """A turn with its answer.

    Attributes:
        turn: The turn.
        message: The answer, normalized.
        segments: The context and the answer.
        text: Text of the segments, with special tokens spelled out.
        end: Spelling of the token that ended the answer, or "" if it ended otherwise.
        is_continued: Whether a later turn continues its trajectory.
    """

    turn: Turn
    message: dict[str, Any]
    segments: Trajectory
    text: str
    end: str
    is_continued: bool = False


class ChatHistory:
    """The conversations of one rollout.

    Args:
        text: Text processor of the policy.
        template: Chat template. None uses the policy's template with the date of the training data.
    """

    def __init__(self, text: TextProcessor, template: ChatTemplate | None = None):
        self._text, self._template = text, template or text.data_template
        self._answers: list[_Answer] = []
        self._trajectories: dict[int, Trajectory] = {}
        self._count = 0
        special = special_tokens_of(text.tokenizer)
        eos = text.tokenizer.eos_id
        self._spellings = {
            token: self._template.special["eos_token"] if token == eos else special.get(token, "")
            for token in text.end_tokens
        }

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The trajectories, in the order in which they began."""
        return tuple(trajectory for _, trajectory in sorted(self._trajectories.items()))

    def open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Return the context for an answer to a conversation.

        Args:
            messages: The conversation.
            tools: Descriptions of the functions that the model may call.
            options: Further variables of the template.

        Raises:
            InputError: If the template rejects the conversation.
        """
        setting = {"tools": list(tools) or None, "options": dict(options or {})}
        rendered = self._template.render(messages, prompt=True, **setting)
        normal = normalize_messages(messages)
        order, self._count = self._count, self._count + 1
        for answer in sorted(self._answers, key=lambda a: (len(a.turn.messages), not a.is_continued), reverse=True):
            if (delta := self._continue(answer, normal, setting, rendered.text)) is None:
                continue
            return self._extend(answer, normal, setting, delta, order)
        tokens = self._text.encode_rendered(rendered)
        return Turn(
            tokens=tuple(tokens),
            text=rendered.text,
            messages=normal,
            setting=setting,
            segments=(_context(tokens),),
            order=order,
        )

    def add(self, turn: Turn, completion: Completion, message: Message) -> None:
        """Add the answer to a turn.

        Args:
            turn: The turn.
            completion: The answer as tokens.
            message: The answer as a message.
        """
        tokens = [int(token) for token in completion.segment.tokens]
        end = self._spellings.get(tokens[-1], "") if tokens and completion.finish == "stop" else ""
        written = self._text.spell(tokens[:-1] if end else tokens) + end
        segments = join_completion(turn.segments, completion)
        self._trajectories[turn.order] = segments
        self._answers.append(
            _Answer(
                turn=turn,
                message=normalize_messages([message])[0],
                segments=segments,
                text=turn.text + written,
                end=end,
            )
        )

    def _extend(self, answer: _Answer, messages: list[dict[str, Any]], setting: Any, delta: str, order: int) -> Turn:
        """Return the turn that continues an answer.

        Only one turn continues a trajectory. Others repeat its tokens as context, so that no token is trained on twice.
        """
        segments = answer.segments
        if answer.is_continued:
            segments = (_context(np.concatenate([segment.tokens for segment in segments])),)
        else:
            answer.is_continued, order = True, answer.turn.order
        new = self._text.encode_rendered(RenderedChat(delta)) if delta else []
        segments = (*segments, _context(new)) if new else segments
        return Turn(
            tokens=tuple(int(token) for segment in segments for token in segment.tokens),
            text=answer.text + delta,
            messages=messages,
            setting=setting,
            segments=segments,
            previous=answer,
            order=order,
        )

    def _continue(self, answer: _Answer, messages: list[dict[str, Any]], setting: Any, rendered: str) -> str | None:
        """Return the text after an answer, or None if the conversation does not continue it.

        Args:
            answer: The answer.
            messages: The conversation, normalized.
            setting: Tools and variables of the template.
            rendered: Text of the conversation.
        """
        count = len(answer.turn.messages)
        if len(messages) <= count or messages[:count] != answer.turn.messages or setting != answer.turn.setting:
            return None
        if _facts(messages[count]) != _facts(answer.message):
            return None
        if rendered.startswith(answer.text):
            return rendered[len(answer.text) :]
        return self._skip_answer(answer, messages[: count + 1], setting, rendered)

    def _skip_answer(self, answer: _Answer, messages: list[dict[str, Any]], setting: Any, rendered: str) -> str | None:
        """Return the text after an answer that the template writes differently than the policy did.

        For example, a template may format the arguments of calls differently. Returns None if the text before the answer changes,
        or if the template leaves out a part of the answer.
        """
        try:
            before = self._template.render(messages[:-1], **setting).text
        except InputError:
            return None
        if not rendered.startswith(before):
            return None
        ends = {answer.end} if answer.end else set(self._spellings.values()) - {""}
        places = {end: rendered.find(end, len(before)) for end in ends}
        place, end = min(((place, end) for end, place in places.items() if place >= 0), default=(-1, ""))
        if place < 0 or not _shows(rendered[len(before) : place], messages[-1]):
            return None
        return rendered[place + len(end) if answer.end else place :]


def _context(tokens: Sequence[int] | np.ndarray) -> Segment:
    return Segment(tokens=np.asarray(tokens, np.int32))


def _facts(message: Mapping[str, Any]) -> Any:
    """Return what an answer says, without the ids of its calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    calls = [(function.get("name"), function.get("arguments")) for function in functions]
    return message["role"], str(message["content"]).strip(), str(message.get(REASONING[0], "")).strip(), calls


def _shows(rendered: str, message: Mapping[str, Any]) -> bool:
    """Return True if a rendered answer contains all parts of a message."""
    _, content, reasoning, calls = _facts(message)
    return all(str(part) in rendered for part in (content, reasoning, *(name for name, _ in calls)))
