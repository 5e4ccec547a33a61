"""Embeddings of texts: the shapes of their batches, pooling, and the queue of an engine.

Legend: B rows, S tokens of a row, D width.
"""

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_serving.contracts import Output, Request
from axlearn_plugins_serving.engine_capabilities import EmbedsTokens, PendingEmbeddings

Pooling = Literal["mean", "last", "cls"]
SHORTEST = 32
"""Smallest S. Larger ones are powers of two, and the maximum context."""


@attrs.frozen
class EmbedBucket:
    """The shapes of a batch of texts.

    Attributes:
        rows: B.
        length: S.
    """

    rows: int
    length: int


def embed_buckets(max_context: int, batch_tokens: int) -> list[EmbedBucket]:
    """Return the shapes of batches, in ascending order of length.

    Each length has a shape for one text, and one for as many texts as fit.

    Args:
        max_context: Maximum number of tokens in a text.
        batch_tokens: Number of tokens in a batch of several texts.
    """
    lengths = [min(SHORTEST, max_context)]
    while lengths[-1] < max_context:
        lengths.append(min(2 * lengths[-1], max_context))
    return [EmbedBucket(rows, s) for s in lengths for rows in sorted({1, max(1, batch_tokens // s)})]


def pool(hidden: jax.Array, lengths: jax.Array, pooling: Pooling) -> jax.Array:
    """Pool the hidden states of each row, [B, S, D] -> float32 [B, D].

    Args:
        hidden: Hidden states.
        lengths: Number of tokens in each row, int32 [B].
        pooling: `mean` averages all tokens, `last` takes the last one, and `cls` the first one.
    """
    if pooling == "cls":
        return hidden[:, 0].astype(jnp.float32)
    if pooling == "last":
        last = jnp.maximum(lengths - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
    is_used = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    total = jnp.sum(jnp.where(is_used[..., None], hidden.astype(jnp.float32), 0.0), axis=1)
    return total / jnp.maximum(lengths, 1)[:, None]


def pack_texts(
    buckets: Sequence[EmbedBucket], prompts: Sequence[Sequence[int]], adapters: Sequence[int]
) -> tuple[EmbedBucket, np.ndarray, np.ndarray, np.ndarray]:
    """Return the smallest shape that fits the texts, and the tokens [B, S], lengths [B] and adapters [B] of a batch.

    Args:
        buckets: Shapes of batches.
        prompts: Tokens of each text.
        adapters: Number of the adapter of each text; 0 is the base model.
    """
    longest = max(map(len, prompts))
    fits = [b for b in buckets if b.rows >= len(prompts) and b.length >= longest]
    bucket = min(fits, key=lambda b: (b.rows * b.length, b.length))
    tokens, lengths = np.zeros((bucket.rows, bucket.length), np.int32), np.zeros((bucket.rows,), np.int32)
    numbers = np.zeros((bucket.rows,), np.int32)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)], lengths[index] = prompt, len(prompt)
        numbers[index] = adapters[index]
    return bucket, tokens, lengths, numbers


@attrs.frozen
class PendingTexts:
    """Embeddings that the devices compute; see `PendingEmbeddings`.

    Attributes:
        array: float32 [B, D] on the devices.
        count: Number of texts.
    """

    array: Any
    count: int

    def wait(self) -> np.ndarray:
        """See `PendingEmbeddings.wait`."""
        return np.asarray(jax.device_get(self.array))[: self.count]


class EmbeddingQueue:
    """The requests for embeddings of an engine.

    Each step of the engine computes one batch: the first waiting request, and later ones of about the same length. Generation
    continues between the batches.
    """

    def __init__(self, runner: EmbedsTokens):
        self._runner = runner
        self._waiting: dict[str, Request] = {}
        self._in_flight: tuple[list[Request], PendingEmbeddings] | None = None

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._waiting) + (0 if self._in_flight is None else len(self._in_flight[0]))

    def __contains__(self, id: str) -> bool:
        """Return True if a request with this id is unfinished."""
        return id in self._waiting or any(request.id == id for request in self._requests_in_flight())

    def adapters(self) -> set[str | None]:
        """Return the adapters that unfinished requests use."""
        return {request.adapter for request in (*self._waiting.values(), *self._requests_in_flight())}

    def add(self, request: Request) -> None:
        """Add a request."""
        self._waiting[request.id] = request

    def abort(self, id: str) -> None:
        """Drop a request. Its result, if the devices compute it, is returned to nobody."""
        self._waiting.pop(id, None)
        if self._in_flight is not None:
            requests, pending = self._in_flight
            self._in_flight = [attrs.evolve(r, id="") if r.id == id else r for r in requests], pending

    def clear(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._in_flight = None

    def submit(self) -> None:
        """Submit the next batch to the devices, if a request waits and no batch is in flight."""
        if self._in_flight is not None or not self._waiting:
            return
        batch = self._next_batch()
        for request in batch:
            del self._waiting[request.id]
        pending = self._runner.embed([r.prompt for r in batch], [r.adapter for r in batch])
        self._in_flight = batch, pending

    def read(self) -> list[Output]:
        """Wait for the batch in flight and return its outputs."""
        if self._in_flight is None:
            return []
        (requests, pending), self._in_flight = self._in_flight, None
        embeddings = pending.wait()
        return [
            Output(id=request.id, embedding=embedding, finish="stop")
            for request, embedding in zip(requests, embeddings, strict=True)
            if request.id
        ]

    def _requests_in_flight(self) -> list[Request]:
        return [] if self._in_flight is None else self._in_flight[0]

    def _next_batch(self) -> list[Request]:
        """Return the first request by priority and arrival, and others that fit into its shape."""
        ordered = sorted(self._waiting.values(), key=lambda request: request.priority)
        length = next(b.length for b in self._runner.embed_buckets if b.length >= len(ordered[0].prompt))
        most = max(b.rows for b in self._runner.embed_buckets if b.length == length)
        return [request for request in ordered if len(request.prompt) <= length][:most]
