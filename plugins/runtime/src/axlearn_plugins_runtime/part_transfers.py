"""Transfers of local-tier parts between machines, over the device links."""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_core.checkpoint.shards import Box
from axlearn_core.compose.functions import array_function
from axlearn_plugins_runtime.local_tier import LocalParts, Need, Part, find_overlaps, is_covered

CHUNK = 16 * 2**20
Pairs = tuple[tuple[int, int], ...]
"""(source, destination) process indices. A process is the source of at most one pair and the destination of at most one."""


@attrs.frozen
class Transfer:
    """The transfer of a part from one process to another. Every process knows all transfers.

    Attributes:
        source: Index of the sending process.
        target: Index of the receiving process.
        part: Part to send.
        files: (name, bytes) of each file of the part.
    """

    source: int
    target: int
    part: Part
    files: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(size for _, size in self.files)

    def spans(self, begin: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield (file, file offset, chunk offset, bytes) for each piece of the chunk from `begin` to `end` in the stream."""
        start = 0
        for name, size in self.files:
            low, high = max(begin, start), min(end, start + size)
            if low < high:
                yield name, low - start, low - begin, high - low
            start += size


def offer_parts(parts: LocalParts, candidates: Sequence[Part], missing: Mapping[int, Sequence[Need]]) -> list[Any]:
    """Return this machine's parts that other processes need, as JSON: [process, part, files, [[need, box], ...]]."""
    offers = []
    for part in candidates:
        arrays = parts.index([part])
        for process, needs in missing.items():
            overlaps = [[i, box] for i, need in enumerate(needs) for box in find_overlaps(need, arrays)]
            if overlaps:
                offers.append([process, attrs.astuple(part), parts.describe(part), overlaps])
    return offers


def plan_transfers(missing: Mapping[int, Sequence[Need]], offers: Sequence[Sequence[Any]]) -> list[Transfer] | None:
    """Plan transfers that give every process its missing boxes. Returns None if a box is not offered.

    Args:
        missing: Missing needs by process.
        offers: Offers of each process, from `offer_parts`.
    """
    transfers = []
    load: dict[int, int] = {}
    for process, needs in missing.items():
        covered: list[dict[Box, None]] = [{} for _ in needs]
        relevant = [(len(o[3]), source, o) for source, rows in enumerate(offers) for o in rows if o[0] == process]
        # Prefer the part that covers the most boxes, then the process that sends the fewest bytes.
        for _, source, (_, part, files, overlaps) in sorted(relevant, key=lambda m: (-m[0], load.get(m[1], 0), m[1])):
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


def plan_copies(part: Part, rows: Sequence[Sequence[Any]], copies: int) -> list[Transfer]:
    """Plan transfers of each process's part to other machines.

    Args:
        part: Part of one process. The parts of the other processes have the same step, attempt and timeline.
        rows: (machine, files) of each process.
        copies: Number of copies of each part.
    """
    transfers, count = [], len(rows)
    for source, (machine, files) in enumerate(rows):
        others = (p % count for p in range(source + 1, source + count))
        targets = itertools.islice((p for p in others if rows[p][0] != machine), copies)
        source_part = attrs.evolve(part, process=source)
        transfers += [Transfer(source, target, source_part, tuple((n, s) for n, s in files)) for target in targets]
    return transfers


def transfers_as_json(transfers: Sequence[Transfer] | None) -> Any:
    """Encode transfers as JSON."""
    return None if transfers is None else [attrs.astuple(transfer) for transfer in transfers]


def transfers_from_json(rows: Any) -> list[Transfer] | None:
    """Decode transfers from JSON."""
    if rows is None:
        return None
    return [
        Transfer(source, target, Part(*part), tuple((n, s) for n, s in files)) for source, target, part, files in rows
    ]


def list_missing(rows: Sequence[Any]) -> list[Any]:
    """Return the process and the needs of each process that misses anything."""
    return [[process, needs] for process, needs in enumerate(rows) if needs]


def group_rounds(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Group transfers into rounds. In each round a process sends and receives at most one part."""
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
    """Run transfers and return the bytes that this process received. All processes must pass the same list.

    A part that arrives damaged or cannot be written is incomplete. Its hashes are compared when it is read.
    """
    process, received = jax.process_index(), 0
    for group in group_rounds(transfers):
        pairs: Pairs = tuple((t.source, t.target) for t in group)
        outgoing = next((t for t in group if t.source == process), None)
        incoming = next((t for t in group if t.target == process), None)
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
    for name, offset, position, count in transfer.spans(begin, begin + chunk.size):
        try:
            parts.storage.read_into(f"{transfer.part.folder}/{name}", offset, chunk[position : position + count].data)
        except Exception:  # the part was deleted: send zeros, so that the receiver's hash check fails
            parts.excluded.add(transfer.part)
            return


class _Receiver:
    """Writes a part to a temporary folder, then renames it."""

    def __init__(self, parts: LocalParts, transfer: Transfer):
        self.transfer = transfer
        self.target = parts.root / transfer.part.folder
        self.folder = self.target.with_name(f".{self.target.name}.from-{transfer.source}")
        self.error: OSError | None = None

    def write(self, begin: int, chunk: np.ndarray) -> None:
        if self.error is not None:  # the exchange is collective, so keep receiving
            return
        try:
            for name, offset, position, count in self.transfer.spans(begin, begin + chunk.size):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.seek(offset)
                    file.write(chunk[position : position + count].data)
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
            return  # another process on this machine received the same part


def as_json(needs: Sequence[Need]) -> list[Any]:
    """Encode needs as JSON."""
    return [[path, box] for path, box in needs]


def from_json(rows: Sequence[Any]) -> list[Need]:
    """Decode needs from JSON."""
    return [(path, tuple(map(tuple, box))) for path, box in rows]


def exchange_bytes(chunk: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Send bytes between processes over the device links. This requires neither a network service nor authentication.

    All processes must call it together.

    Args:
        chunk: uint8 array of shape [n], with the same n on every process.
        pairs: Pairs of processes, the same on every process.

    Returns:
        The chunk that was sent to this process, or zeros if none was sent.
    """
    mesh, permute = _permutation(pairs)
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    buffer = jax.make_array_from_process_local_data(sharding, chunk[None], (jax.process_count(), chunk.size))
    return np.asarray(permute(buffer).addressable_shards[0].data)[0]


@functools.cache
def _permutation(pairs: Pairs) -> tuple[Mesh, jax.stages.Wrapped]:
    """Return a mesh of one device per process, and a compiled function that permutes rows along the pairs."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[p] for p in range(jax.process_count())]), ("process",))
    spec = PartitionSpec("process")

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "process", pairs)

    return mesh, array_function()(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))
