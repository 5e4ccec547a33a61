"""Optional capabilities of engines, runners and weights. Callers check for them with `isinstance`.

This module does not import JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class HasConfig(Protocol):
    """A module that stores its own config.

    Attributes:
        cfg: The config, a `Node`.
    """

    cfg: Any


@runtime_checkable
class RunsHeads(Protocol):
    """A runner that can draft tokens with heads of its model.

    Attributes:
        drafts: Whether results contain drafts; see `RowResult.drafts`.
    """

    drafts: bool


@runtime_checkable
class HasWindow(Protocol):
    """A runner whose model has sliding-window attention.

    The engine reuses blocks that have fallen out of the window.

    Attributes:
        window: Number of keys that a token attends to in any layer, including itself; None if a layer attends to all keys.
    """

    window: int | None


@runtime_checkable
class HasPrefix(Protocol):
    """A runner whose model attends in both directions in a prefix.

    The engine computes the whole prefix of a prompt in one chunk.

    Attributes:
        prefix: Number of tokens in the prefix, at most `chunk`; 0 if there is none.
    """

    prefix: int


@runtime_checkable
class KeepsStates(Protocol):
    """A runner that keeps recurrent states in a pool of `max_rows` + `num_snapshots` rows.

    The first `max_rows` rows belong to the slots. The engine saves states in the other rows, so that requests with a common prefix
    and preempted requests can continue from there.

    Attributes:
        num_snapshots: Number of additional rows; None if the model has no recurrent states.
    """

    num_snapshots: int | None


@runtime_checkable
class RecordsTokens(Protocol):
    """A runner whose layers can record facts about tokens in their caches.

    Attributes:
        records: Names of the records. Empty if the layers record nothing.
    """

    records: tuple[str, ...]

    def read_records(self, blocks: Sequence[int], count: int) -> Mapping[str, np.ndarray]:
        """Return the records of the first tokens in the blocks of a request.

        Args:
            blocks: The blocks, in order of position.
            count: Number of tokens T.

        Returns:
            For each name, [T, L, ...], for the L layers that record it.
        """
        ...


@runtime_checkable
class TakesExtras(Protocol):
    """A runner whose prompts may have other inputs than tokens.

    Attributes:
        extras: Whether the runner was built with them.
    """

    extras: bool

    def check_extras(self, count: int, extras: Mapping[str, np.ndarray]) -> None:
        """Check that the model reads the extras of a prompt of `count` tokens. This method may be called from any thread.

        Raises:
            RequestError: If an extra has no effect on the model, has a wrong shape, or is read by its layers.
        """
        ...

    def embed_prompt(self, prompt: Sequence[int], extras: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the embeddings of a prompt of S tokens with its extras, [S, D]."""
        ...


class PendingEmbeddings(Protocol):
    """Embeddings that the devices compute."""

    def wait(self) -> np.ndarray:
        """Wait for the devices and return the embeddings, float32 [B, D]."""
        ...


@runtime_checkable
class EmbedsTokens(Protocol):
    """A runner that can compute the embeddings of texts.

    Attributes:
        embed_buckets: Shapes of batches in ascending order of length, each with `rows` and `length`. Empty if the runner was built
            without embeddings.
    """

    embed_buckets: Sequence[Any]

    def embed(self, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> PendingEmbeddings:
        """Submit texts that fit into one of the shapes, without waiting for their embeddings.

        Args:
            prompts: Tokens of each text.
            adapters: Adapter of each text; None uses the base model.
        """
        ...


@runtime_checkable
class ReleasesMemory(Protocol):
    """A runner or drafter that can free the memory of its devices; see `Sleeps`."""

    def release_memory(self, level: int) -> None:
        """Free the cache and the weights. No step is in flight, and none follows before `restore_memory`."""
        ...

    def restore_memory(self) -> None:
        """Restore the weights, and an empty cache."""
        ...


@runtime_checkable
class CompilesFunctions(Protocol):
    """A drafter that compiles functions."""

    @property
    def compilations(self) -> int:
        """Return the number of functions compiled since `warm_up` ended."""
        ...

    def warm_up(self) -> None:
        """Compile all functions that drafts may need."""
        ...


@runtime_checkable
class HasProgram(Protocol):
    """A runner with a program.

    The engine converts weights in other formats to the program's structure.

    Attributes:
        program: An `axlearn_core.compose.model_program.ModelProgram`.
    """

    program: Any


@runtime_checkable
class ReadsWeights(Protocol):
    """Opened weights that have not been read yet, such as an `axlearn_core.run.RunWeights`."""

    def specs(self) -> Mapping[str, Any]:
        """Return the shape and dtype of each tensor, by path."""
        ...

    def read(self, pattern: str = "**") -> Mapping[str, Any]:
        """Return the tensors whose paths match the pattern, by path."""
        ...


@runtime_checkable
class HoldsResources(Protocol):
    """A runner or drafter with resources to release when its engine closes."""

    def close(self) -> None:
        """Release the resources. The engine makes no further calls."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can free the memory of its devices while it is idle.

    Attributes:
        is_sleeping: Whether the memory is free. The engine then rejects requests.
    """

    is_sleeping: bool

    def sleep(self, level: int = 1) -> None:
        """Free the cache and the weights.

        Args:
            level: 1 keeps the weights in the memory of the host. 2 drops them, and `wake_up` reads them from their source again.

        Raises:
            RequestError: If requests are running, the level is unknown, or the weights have no source that can be read again.
        """
        ...

    def wake_up(self) -> None:
        """Restore the weights, and an empty cache."""
        ...


@runtime_checkable
class ChangesAdapters(Protocol):
    """An engine, or a runner, whose adapters can change while it runs.

    Attributes:
        adapters: Names of the adapters that new requests can use.
    """

    adapters: tuple[str, ...]

    def read_adapter(self, name: str, directory: str) -> Any:
        """Read an adapter and check that it fits the model. May be called in any thread.

        Raises:
            CheckpointError: If the directory has no adapter.
            RequestError: If the adapter does not fit the model or its room for adapters.
        """
        ...

    def add_adapter(self, name: str, adapter: Any) -> None:
        """Add an adapter that `read_adapter` returned.

        Raises:
            RequestError: If the name is in use, or there is no room.
        """
        ...

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. An engine finishes the requests that use it first, but accepts no new ones.

        Raises:
            RequestError: If the name is unknown.
        """
        ...


@runtime_checkable
class NormalizesEmbeddings(Protocol):
    """An engine whose embeddings the server may scale.

    Attributes:
        normalizes_embeddings: Whether the server scales embeddings to length 1.
    """

    normalizes_embeddings: bool


@runtime_checkable
class PacesSteps(Protocol):
    """An engine that can wait for more requests before it plans its next step."""

    def spare_seconds(self) -> float:
        """Return how many seconds `step` can wait without delaying the devices.

        More requests may arrive in the meantime.
        """
        ...


@runtime_checkable
class CompilesElsewhere(Protocol):
    """An engine whose programs are compiled in other processes.

    Attributes:
        start_compilations: Number of programs that XLA compiled there during startup.
    """

    start_compilations: int
