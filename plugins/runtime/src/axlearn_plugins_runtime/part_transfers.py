"""Parts of a local tier that go from machine to machine, over the links of the devices."""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_core.checkpoint.shards import Box
from axlearn_core.compose.functions import array_function
from axlearn_plugins_runtime.local_tier import LocalParts, Need, Part, is_covered, overlaps_of

CHUNK = 16 * 2**20
Pairs = tuple[tuple[int, int], ...]
"""(source, destination) process indices; a process is the source of one pair at most, and the destination of one."""


@attrs.frozen
class Transfer:
    """A part that goes from one process to another; every process knows all of them.

    Attributes:
        files: (name, bytes) of each file of the part.
    """

    source: int
    target: int
    part: Part
    files: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size in self.files)

    def spans(self, begin: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        """(file, offset in it, offset in the chunk, bytes) of what a chunk of the stream holds."""
        start = 0
        for name, size in self.files:
            low, high = max(begin, start), min(end, start + size)
            if low < high:
                yield name, low - start, low - begin, high - low
            start += size


def offer_parts(parts: LocalParts, candidates: Sequence[Part], missing: Sequence[Sequence[Need]]) -> list[Any]:
    """What this machine has of what processes miss, as JSON: [process, part, files, [[need, box], ...]]."""
    offers = []
    for part in candidates:
        arrays = parts.index([part])
        for process, needs in enumerate(missing):
            overlaps = [[i, box] for i, need in enumerate(needs) for box in overlaps_of(need, arrays)]
            if overlaps:
                offers.append([process, attrs.astuple(part), parts.describe(part), overlaps])
    return offers


def plan_transfers(missing: Sequence[Sequence[Need]], offers: Sequence[Sequence[Any]]) -> list[Transfer] | None:
    """Which parts go where, so that nobody misses anything; None where nobody has what is missing.

    Args:
        missing: by process.
        offers: by process that offers.
    """
    transfers = []
    load: dict[int, int] = {}
    for process, needs in enumerate(missing):
        covered: list[dict[Box, None]] = [{} for _ in needs]
        meant = [(len(o[3]), source, o) for source, own in enumerate(offers) for o in own if o[0] == process]
        # The part that helps most first; of equal ones, from whoever sends least.
        for _, source, (_, part, files, overlaps) in sorted(meant, key=lambda m: (-m[0], load.get(m[1], 0), m[1])):
            boxes = [(i, tuple(map(tuple, box))) for i, box in overlaps]
            if all(box in covered[i] for i, box in boxes):
                continue
            for i, box in boxes:
                covered[i][box] = None
            transfer = Transfer(source, process, Part(*part), tuple((n, s) for n, s in files))
            transfers.append(transfer)
            load[source] = load.get(source, 0) + transfer.bytes
        if not all(is_covered(need, list(boxes)) for need, boxes in zip(needs, covered, strict=True)):
            return None
    return transfers


def rounds_of(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Transfers that go at once: in each round a process sends one and receives one."""
    pending = list(transfers)
    while pending:
        senders: set[int] = set()
        receivers: set[int] = set()
        batch = []
        for transfer in pending:
            if transfer.source not in senders and transfer.target not in receivers:
                senders.add(transfer.source)
                receivers.add(transfer.target)
                batch.append(transfer)
        yield batch
        pending = [t for t in pending if t not in batch]


def send_parts(transfers: Sequence[Transfer], parts: LocalParts) -> int:
    """Runs transfers; all processes have the same list. Returns the bytes that this process received.

    What arrives damaged, or cannot be written, is not a complete part: hashes are compared when it is read.
    """
    own, received = jax.process_index(), 0
    for group in rounds_of(transfers):
        pairs: Pairs = tuple((t.source, t.target) for t in group)
        outgoing = next((t for t in group if t.source == own), None)
        incoming = next((t for t in group if t.target == own), None)
        longest = max(t.bytes for t in group)
        size = min(CHUNK, longest)
        receiver = _Receiver(parts, incoming) if incoming else None
        for begin in range(0, longest, max(size, 1)):
            chunk = np.zeros(size, np.uint8)
            if outgoing:
                _read_chunk(parts, outgoing, begin, chunk)
            arrived = exchange_bytes(chunk, pairs)
            if receiver:
                receiver.write(begin, arrived)
        if receiver and incoming:
            received += incoming.bytes
            receiver.finish()
    return received


def _read_chunk(parts: LocalParts, transfer: Transfer, begin: int, chunk: np.ndarray) -> None:
    for name, offset, at, count in transfer.spans(begin, begin + chunk.size):
        try:
            parts.storage.read_into(f"{transfer.part.folder}/{name}", offset, chunk[at : at + count].data)
        except Exception:  # gone meanwhile: zeros, whose hash the receiver compares
            parts.excluded.add(transfer.part)
            return


class _Receiver:
    """Writes one part beside its place, then renames it."""

    def __init__(self, parts: LocalParts, transfer: Transfer):
        self.transfer = transfer
        self.target = parts.root / transfer.part.folder
        self.folder = self.target.with_name(f".{self.target.name}.from-{transfer.source}")
        self.error: OSError | None = None

    def write(self, begin: int, chunk: np.ndarray) -> None:
        if self.error is not None:  # the others send on all the same
            return
        try:
            for name, offset, at, count in self.transfer.spans(begin, begin + chunk.size):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.seek(offset)
                    file.write(chunk[at : at + count].data)
        except OSError as error:
            self.error = error

    def finish(self) -> None:
        try:
            if self.error is None:
                for name, size in self.transfer.files:
                    if not size:
                        (self.folder / name).touch()
                self.folder.rename(self.target)
        except OSError:
            return  # another process of this machine was sent it too


def as_json(needs: Sequence[Need]) -> list[Any]:
    """Needs for other processes."""
    return [[path, box] for path, box in needs]


def from_json(rows: Sequence[Any]) -> list[Need]:
    """Needs of another process."""
    return [(path, tuple(map(tuple, box))) for path, box in rows]


def exchange_bytes(chunk: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Passes bytes from process to process over the links of the devices: no network service, nothing to authenticate.

    Returns what the source paired with this process passed; zeros where there is none. All processes call it together.

    Args:
        chunk: uint8 [n], with the same n on every process.
        pairs: the same on every process.
    """
    mesh, permute = _permutation(pairs)
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    buffer = jax.make_array_from_process_local_data(sharding, chunk[None], (jax.process_count(), chunk.size))
    return np.asarray(permute(buffer).addressable_shards[0].data)[0]


@functools.cache
def _permutation(pairs: Pairs) -> tuple[Mesh, jax.stages.Wrapped]:
    """A device of each process, and the program that passes a row of each along the pairs."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[p] for p in range(jax.process_count())]), ("process",))
    spec = PartitionSpec("process")

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "process", pairs)

    return mesh, array_function()(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))
