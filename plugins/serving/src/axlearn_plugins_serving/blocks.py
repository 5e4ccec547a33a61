"""The pool of cache blocks, which tracks the holders of each block and lets later prompts reuse its contents.

The key of a full block is a hash of its tokens and the previous block's key. The first key also includes the adapter
and the version of the weights. Equal keys mean equal contents, so requests with a common prefix share the prefix's blocks, as
in vLLM's automatic prefix caching. Blocks that no request holds keep their content until they are reallocated, least recently
used first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Key = bytes
"""The first 128 bits of SHA-256."""


def root_key(adapter: str | None, version: int, prefix: Sequence[int] = (), extras: bytes = b"") -> Key:
    """Return the parent key of a request's first block.

    It differs between adapters, between versions of the weights, between prefixes that attend in both directions, because all
    blocks depend on the whole prefix, and between extras (`digest_extras`). As the model is causal, the embedding of a token may
    depend on the extras and on earlier tokens, but not on later ones.
    """
    facts = (adapter, version, extras) if extras else (adapter, version)
    return _digest(repr(facts).encode() + np.asarray(prefix, np.int32).tobytes())


def digest_extras(extras: Mapping[str, np.ndarray]) -> bytes:
    """Return a hash of the extras of a prompt. It is empty if the prompt has no extras."""
    if not extras:
        return b""
    parts = [repr((name, x.shape, str(x.dtype))).encode() + x.tobytes() for name, x in sorted(extras.items())]
    return _digest(b"".join(map(_digest, parts)))


def block_keys(root: Key, tokens: Sequence[int], block_size: int, *, prefix: Sequence[Key] = ()) -> list[Key]:
    """Return the keys of a sequence's full blocks.

    Args:
        root: Key from `root_key`.
        tokens: Tokens of the sequence from its beginning.
        block_size: Positions per block.
        prefix: Keys of the first blocks, if they were computed before.
    """
    keys = list(prefix)
    for index in range(len(keys), len(tokens) // block_size):
        content = tokens[index * block_size : (index + 1) * block_size]
        keys.append(_digest((keys[-1] if keys else root) + np.asarray(content, np.int32).tobytes()))
    return keys


def tail_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a prompt's last, partial block."""
    return _digest(parent + b"tail" + np.asarray(tokens, np.int32).tobytes())


def _digest(content: bytes) -> Key:
    return hashlib.sha256(content).digest()[:16]


class BlockPool:
    """A pool of blocks with their holders.

    A block is free, held, or idle. An idle block has no holder, but its content is still registered under a key.

    Args:
        num_blocks: Number of blocks; ids are 0 to `num_blocks` - 1.
        block_size: Positions per block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._contents: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._tails: dict[Key, int] = {}
        self._tail_keys: dict[int, Key] = {}

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """The number of idle blocks."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """The number of blocks in use."""
        return self.num_blocks - self.available

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Return the blocks for the longest cached prefix of `keys`.

        Does not add holders.
        """
        blocks = []
        for key in keys:
            block = self._contents.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def tail(self, key: Key) -> int | None:
        """Return the held block that begins with the tail registered under `key`, or None.

        See `set_tail`.
        """
        return self._tails.get(key)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Count the idle blocks among `blocks`.

        Idle blocks can be allocated until a request holds them.
        """
        return sum(1 for block in blocks if self._holders[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block. Each must have content or a holder."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Allocate blocks with one holder and no content.

        If there are not enough blocks, returns None and changes nothing.
        """
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each block of a sequence, given in order.

        The last blocks of the sequence are evicted first.
        """
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
        """Set the content of a held block.

        Has no effect if a different block already has this content.
        """
        if self._keys[block] is None and key not in self._contents:
            self._keys[block], self._contents[key] = key, block

    def set_tail(self, block: int, key: Key) -> None:
        """Record the content at the beginning of a held block.

        The block can be copied until its last holder releases it.
        """
        if key not in self._tails and block not in self._tail_keys:
            self._tails[key], self._tail_keys[block] = block, key

    def forget(self) -> None:
        """Forget all contents, for example after the weights have changed.

        Held blocks stay held.
        """
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
        """Assert that exactly these sequences hold blocks.

        Each block must be in exactly one state.
        """
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
        assert not set(self._tail_keys) & (free | idle), "a block that is not held has a tail"
