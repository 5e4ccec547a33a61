"""The blocks of a cache: who holds them, and what they contain for prompts to come.

A full block is known by a key: a hash of its tokens, of the key of the block before it, and at the beginning of the adapter and
the version of the weights. Equal keys mean equal contents, so requests with a common prefix share its blocks (as in vLLM's
automatic prefix caching). Blocks that no request holds keep their content until their room is needed, the longest unused first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

Key = bytes
"""128 bits of SHA-256."""


def root_key(adapter: str | None, version: int) -> Key:
    """What the keys of a request's blocks begin with: caches of other adapters or weights have other keys."""
    return _digest(repr((adapter, version)).encode())


def block_keys(root: Key, tokens: Sequence[int], block_size: int, *, prefix: Sequence[Key] = ()) -> list[Key]:
    """The keys of the full blocks of a sequence.

    Args:
        root: see `root_key`.
        tokens: of the sequence from its beginning.
        block_size: positions of a block.
        prefix: the keys of the first blocks, where they were computed before.
    """
    keys = list(prefix)
    for index in range(len(keys), len(tokens) // block_size):
        content = tokens[index * block_size : (index + 1) * block_size]
        keys.append(_digest((keys[-1] if keys else root) + np.asarray(content, np.int32).tobytes()))
    return keys


def tail_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a prompt's last block that is not full."""
    return _digest(parent + b"tail" + np.asarray(tokens, np.int32).tobytes())


def _digest(content: bytes) -> Key:
    return hashlib.sha256(content).digest()[:16]


class BlockPool:
    """Counts who holds which block. Every block is free, held, or idle: held by nobody, with content under a key.

    Args:
        num_blocks: ids are 0 to `num_blocks` - 1.
        block_size: positions of a block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._contents: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._tails: dict[Key, int] = {}
        self._tail_keys: dict[int, Key] = {}

    @property
    def available(self) -> int:
        """How many blocks can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """How many blocks nobody holds and have content."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """How many blocks are held."""
        return self.num_blocks - self.available

    def match(self, keys: Iterable[Key]) -> list[int]:
        """The blocks of the longest prefix of `keys` that has content. They are not held yet."""
        blocks = []
        for key in keys:
            block = self._contents.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def tail(self, key: Key) -> int | None:
        """The held block that begins with the tail of this key; see `set_tail`."""
        return self._tails.get(key)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: holding them leaves so many fewer to allocate."""
        return sum(1 for block in blocks if self._holders[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each of these blocks, which have content or a holder."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Blocks with one holder and no content; None, and nothing changes, where there are not so many."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a holder from each block of one sequence, in its order. Ends of sequences are evicted before beginnings."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if (tail := self._tail_keys.pop(block, None)) is not None:
                del self._tails[tail]
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def set_content(self, block: int, key: Key) -> None:
        """Says what a held block contains. Where another block has the same content, that one is kept for it."""
        if self._keys[block] is None and key not in self._contents:
            self._keys[block], self._contents[key] = key, block

    def set_tail(self, block: int, key: Key) -> None:
        """Says what a held block begins with, for copies of it. Forgotten with its last holder."""
        if key not in self._tails and block not in self._tail_keys:
            self._tails[key], self._tail_keys[block] = block, key

    def forget(self) -> None:
        """Forgets all contents, such as after a change of the weights. Held blocks stay held."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._contents.clear()
        self._tails.clear()
        self._tail_keys.clear()
        self._keys = [None] * self.num_blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        del self._contents[key]
        return block

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless exactly these sequences of blocks are held, and every block is in one place."""
        holders = [0] * self.num_blocks
        for blocks in owners:
            assert len(set(blocks)) == len(blocks), f"a sequence has a block twice: {blocks}"
            for block in blocks:
                holders[block] += 1
        assert holders == self._holders, f"held: {self._holders}, expected {holders}"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, f"free and idle: {free & idle}"
        assert free | idle == {b for b, count in enumerate(holders) if count == 0}, "a block is lost"
        assert all(self._keys[block] is None for block in free), "a free block has content"
        contents = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert contents == self._contents, "keys and contents differ"
        assert idle <= set(contents.values()), "an idle block has no content"
        assert {block: key for key, block in self._tails.items()} == self._tail_keys, "tails differ"
        assert not set(self._tail_keys) & (free | idle), "a tail is in a block that nobody holds"
