"""`ResponseAnswer`: the answer to a request to `/v1/responses`."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import attrs
import pydantic

from axlearn_plugins_serving.server.answer_blocks import AnswerBlocks, Block, Change
from axlearn_plugins_serving.server.api_errors import ApiError, unexpected_error
from axlearn_plugins_serving.server.conversation import Conversation
from axlearn_plugins_serving.server.http import event
from axlearn_plugins_serving.server.logprobs import chat_logprobs
from axlearn_plugins_serving.server.prompt_job import Delta, Job, ScoredToken
from axlearn_plugins_serving.server.response_store import RecordTooLargeError, StoredResponse
from axlearn_plugins_serving.server.schemas import ResponseRequest
from axlearn_plugins_serving.server.server_log import log
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_serving.server.text_scores import TextScores

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


@attrs.define
class ResponseAnswer:
    """A response, returned in one piece or as a stream of events.

    Attributes:
        service: The served model.
        body: The request.
        job: The engine's request.
        conversation: The messages that the response answers.
        previous: The stored response that the conversation continues, or None.
        id: Id of the response.
    """

    service: Service
    body: ResponseRequest
    job: Job
    conversation: Conversation
    previous: StoredResponse | None = None
    id: str = attrs.field(init=False)
    _blocks: AnswerBlocks = attrs.field(factory=AnswerBlocks, init=False)
    _scores: TextScores = attrs.field(factory=TextScores, init=False)
    _writing: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _ids: dict[int, str] = attrs.field(factory=dict, init=False)
    _created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _sequence: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.id = self.service.new_id("resp_")

    async def answer(self) -> dict[str, Any]:
        """Compute and return the complete response, and store it if the request says so.

        Raises:
            ApiError: The engine fails, or a background response cannot be stored.
        """
        waits = bool(self.body.background)
        async for deltas in self.job.deltas():
            if waits:
                await self.store(self.as_json("in_progress"))
                waits = False
            for delta in deltas:
                self._read(delta)
        self._blocks.end()
        return await self._finish(self._status())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events, in the order that the API defines."""
        yield self._event("response.created", response=self.as_json("in_progress"))
        yield self._event("response.in_progress", response=self.as_json("in_progress"))
        try:
            async for deltas in self.job.deltas():
                for delta in deltas:
                    for change in self._read(delta):
                        for chunk in self._change(change):
                            yield chunk
        except ApiError as error:
            yield self._event("response.failed", response=await self.fail(error))
            return
        except Exception:
            log.exception("the response %s failed", self.id)
            yield self._event("response.failed", response=await self.fail(unexpected_error()))
            return
        for change in self._blocks.end():
            for chunk in self._change(change):
                yield chunk
        status = self._status()
        yield self._event(f"response.{status}", response=await self._finish(status))

    def as_json(self, status: str) -> dict[str, Any]:
        """Return the response with the output so far.

        Args:
            status: `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
        """
        body, usage, defaults = self.body, self.job.usage, self.service.text.sampling
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        running = status in ("queued", "in_progress")
        has_output = not running and status != "failed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.job.model,
            "output": [self._item(block, status) for block in self._blocks.blocks] if has_output else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": bool(body.store),
            "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
            if body.text is not None and body.text.format is not None
            else {"format": {"type": "text"}},
            "tool_choice": body.tool_choice.model_dump()
            if isinstance(body.tool_choice, pydantic.BaseModel)
            else body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if running else counts,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _read(self, delta: Delta) -> list[Change]:
        """Add an output to the blocks, and return the changes."""
        if self.job.choices[0].request.sampling.logprobs is None:
            return self._blocks.add(delta.pieces)
        changes: list[Change] = []
        self._scores.add(delta)
        for piece in delta.pieces:
            scored = self._scores.take(piece)
            for change in self._blocks.add((piece,)):
                if change.kind == "extend":
                    change.block.scored += scored
                    change = attrs.evolve(change, scored=scored)
                changes.append(change)
        return changes

    def _status(self) -> str:
        return "incomplete" if self.job.choices[0].finish == "length" else "completed"

    async def _finish(self, status: str) -> dict[str, Any]:
        response = self.as_json(status)
        if not self.body.store:
            return response
        try:
            await self.store(response)
        except ApiError as error:
            if self.body.background:  # nobody else would get the response
                raise
            log.warning("the response %s is not stored: %s", self.id, error.message)
            return {**response, "store": False}
        return response

    async def fail(self, error: ApiError) -> dict[str, Any]:
        """Return the response as failed, and store it if the request says so. It has no output."""
        code = "invalid_prompt" if error.status == 400 else "server_error"
        response = {**self.as_json("failed"), "error": {"code": code, "message": error.message}}
        if self.body.store:
            try:
                await self.store(response)
            except ApiError as refusal:
                log.warning("the failed response %s is not stored: %s", self.id, refusal.message)
        return response

    async def store(self, response: dict[str, Any]) -> None:
        """Store the response with its conversation.

        Raises:
            ApiError: 400 if it is too large, 500 if it cannot be written.
        """
        # If the caller is cancelled, the write still ends before the next one starts.
        await asyncio.shield(self._store(response))

    async def _store(self, response: dict[str, Any]) -> None:
        items = self.body.input
        sent = (
            [{"type": "message", "role": "user", "content": items}]
            if isinstance(items, str)
            else [i.sent for i in items]
        )
        messages = [dict(message) for message in self.conversation.messages]
        if self.body.instructions:
            del messages[0]  # they apply to this response only
        if response["output"]:
            messages.append(self._message())
        stored = StoredResponse(response, sent, messages)
        async with self._writing:
            try:
                await asyncio.to_thread(self.service.responses.put, stored, self.previous)
            except RecordTooLargeError as error:
                raise ApiError(400, f"store: {error}", param="store", code="response_too_large") from None
            except Exception:
                log.exception("the response %s cannot be written", self.id)
                message = "store: the server could not write the response; see the server's log"
                raise ApiError(500, message, param="store", code="internal_error") from None

    def _message(self) -> dict[str, Any]:
        """Return the answer as a message for the chat template."""
        blocks = self._blocks
        message: dict[str, Any] = {"role": "assistant", "content": blocks.join("text")}
        if reasoning := blocks.join("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := blocks.tool_calls:
            message["tool_calls"] = calls
        return message

    def _change(self, change: Change) -> Iterator[bytes]:
        """Yield the events of a change."""
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        part = place if block.kind == "call" else {**place, "content_index": 0}
        name = {"call": "function_call_arguments", "reasoning": "reasoning_text", "text": "output_text"}[block.kind]
        if change.kind == "extend":
            more = {"logprobs": self._logprobs(change.scored)} if block.kind == "text" else {}
            yield self._event(f"response.{name}.delta", **part, delta=change.text, **more)
            return
        if change.kind == "open":
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=self._part(block, empty=True))
            return
        if block.kind == "call":
            yield self._event(f"response.{name}.done", **part, arguments=block.text, name=block.name)
        else:
            whole = self._part(block)
            more = {"logprobs": whole["logprobs"]} if block.kind == "text" else {}
            yield self._event(f"response.{name}.done", **part, text=block.text, **more)
            yield self._event("response.content_part.done", **part, part=whole)
        item = self._item(block, self._status())
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _item_id(self, block: Block) -> str:
        if block.index not in self._ids:
            self._ids[block.index] = self.service.new_id(_PREFIXES[block.kind])
        return self._ids[block.index]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return an item of the output.

        Args:
            block: The block.
            status: Status of the response. `in_progress` leaves out the content.
        """
        running = status == "in_progress"
        status = status if status in ("in_progress", "completed") else "incomplete"
        head = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            arguments = "" if running else block.text
            return {
                "type": "function_call",
                **head,
                "call_id": block.call_id,
                "name": block.name,
                "arguments": arguments,
            }
        content = [] if running else [self._part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _part(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs(() if empty else block.scored)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        return chat_logprobs(self.service.grammars, scored, self.body.top_logprobs or 0)["content"]
