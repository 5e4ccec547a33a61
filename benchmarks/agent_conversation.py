"""Conversations of an agent with a server: the model calls a tool, and the next turn sends back the call and its result."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import httpx

Message = dict[str, Any]


@attrs.frozen
class Turn:
    """One request of a conversation.

    Attributes:
        prompt: Tokens of the prompt.
        output: Tokens of the answer, as the model generated them.
        cached: Number of prompt tokens that the server reports as cached.
        seconds: Time from sending the request to the first event with a token.
        message: The answer, as later requests send it back.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    cached: int
    seconds: float
    message: Message

    @property
    def new(self) -> int:
        """Number of prompt tokens that the server computed."""
        return len(self.prompt) - self.cached

    def count_shared(self, earlier: "Turn") -> int:
        """Count the leading tokens of the prompt that the server computed for an earlier turn.

        The last token of an answer is chosen, but its keys and values are never computed.
        """
        computed = [*earlier.prompt, *earlier.output[:-1]]
        pairs = enumerate(zip(self.prompt, computed, strict=False))
        return next((i for i, (token, other) in pairs if token != other), min(len(self.prompt), len(computed)))


def converse(
    client: httpx.Client, first: Sequence[Message], results: Sequence[str], body: Mapping[str, Any]
) -> Iterator[Turn]:
    """Yield the turns of a conversation.

    Args:
        client: Client of the server.
        first: Messages of the first turn.
        results: Results of the tool calls of each turn. The conversation ends after the last call whose result is here.
        body: Further fields of each request, such as `tools`.
    """
    messages = list(first)
    for result in results:
        turn = ask(client, {**body, "messages": messages})
        yield turn
        messages.append(turn.message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result} for call in turn.message["tool_calls"]
        ]


def ask(client: httpx.Client, body: Mapping[str, Any]) -> Turn:
    """Send a request to `/v1/chat/completions` and read its stream.

    Raises:
        ValueError: If the server reports an error, or if the answer has no complete tool call.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    begin, seconds = time.perf_counter(), None
    prompt: list[int] = []
    output: list[int] = []
    usage: dict[str, Any] = {}
    answer = _Answer()
    with client.stream("POST", "/v1/chat/completions", json={**body, **options}) as response:
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {response.read().decode()}")
        for event in _events(response):
            usage = event.get("usage") or usage
            prompt = event.get("prompt_token_ids") or prompt
            for choice in event["choices"]:
                seconds = seconds if seconds is not None else time.perf_counter() - begin
                output += choice.get("token_ids") or ()
                answer.add(choice["delta"])
    if seconds is None:
        raise ValueError("the answer has no events")
    return Turn(prompt, output, usage["prompt_tokens_details"]["cached_tokens"], seconds, answer.message())


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            yield event


@attrs.define
class _Answer:
    """The text and the calls of a stream."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = attrs.field(factory=dict)

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add the `delta` of an event."""
        self.content += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            call = self.calls.setdefault(
                piece["index"], {"id": piece.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["function"]["name"] += piece["function"].get("name", "")
            call["function"]["arguments"] += piece["function"].get("arguments", "")

    def message(self) -> Message:
        """Return the answer. Raises `ValueError` if it has no call, or if a call's arguments are not JSON."""
        if not self.calls:
            raise ValueError(f"the answer has no tool call: {self.content[:80]!r}")
        for call in self.calls.values():
            json.loads(call["function"]["arguments"])
        return {"role": "assistant", "content": self.content or None, "tool_calls": list(self.calls.values())}
