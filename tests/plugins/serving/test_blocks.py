"""Block accounting, and lookup of contents by hash."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from axlearn_plugins_serving.blocks import BlockPool, block_keys, root_key, tail_key

ROOT = root_key(None, 0)


def test_keys_depend_on_everything_before():
    keys = block_keys(ROOT, range(10), 4)
    assert len(keys) == 2
    assert block_keys(ROOT, [0, 1, 2, 3, 9, 9, 9, 9], 4)[0] == keys[0]
    assert block_keys(ROOT, [9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != keys[1]
    assert block_keys(ROOT, range(10), 4, prefix=keys[:1]) == keys
    other_keys = {block_keys(root_key(a, v), range(4), 4)[0] for a, v in [(None, 0), (None, 1), ("a", 0), ("b", 0)]}
    assert len(other_keys) == 4


def test_a_tail_is_not_a_block():
    assert tail_key(ROOT, [0, 1, 2, 3]) != block_keys(ROOT, range(4), 4)[0]


def test_contents_survive_their_holder_until_the_room_is_needed():
    pool = BlockPool(4, 4)
    keys = block_keys(ROOT, range(12), 4)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.set_content(block, key)
    pool.release(blocks)
    assert pool.match(keys) == blocks
    assert (pool.available, pool.idle, pool.used) == (4, 3, 0)
    pool.allocate(2)  # the free block, and the end of the sequence
    assert pool.match(keys) == blocks[:2]
    assert pool.allocate(3) is None
    pool.check([[3, blocks[2]]])


def test_the_longest_unused_goes_first():
    pool = BlockPool(2, 1)
    for token in (0, 1):
        block = pool.allocate(1)
        pool.set_content(block[0], block_keys(ROOT, [token], 1)[0])
        pool.release(block)
    first = pool.match(block_keys(ROOT, [0], 1))
    pool.hold(first)
    pool.release(first)
    pool.allocate(1)
    assert pool.match(block_keys(ROOT, [0], 1)) == first
    assert not pool.match(block_keys(ROOT, [1], 1))


def test_a_tail_is_forgotten_with_its_holder():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.set_tail(blocks[0], b"tail")
    assert pool.tail(b"tail") == blocks[0]
    pool.release(blocks)
    assert pool.tail(b"tail") is None
    pool.check([])


def test_a_lost_block_is_noticed():
    pool = BlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check([])


class Pool(RuleBasedStateMachine):
    """Sequences start with shared blocks, grow and end in any order."""

    def __init__(self):
        super().__init__()
        self.pool, self.sequences = BlockPool(8, 2), []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), stored=st.booleans())
    def begin(self, tokens, stored):
        keys = block_keys(ROOT, tokens, 2)
        shared = self.pool.match(keys)
        count = -(-len(tokens) // 2) - len(shared)
        if self.pool.available - self.pool.count_idle(shared) < count:
            return
        self.pool.hold(shared)
        fresh = self.pool.allocate(count)
        assert not set(fresh) & {b for blocks in self.sequences for b in blocks}
        self.sequences.append(shared + fresh)
        if stored:
            for block, key in zip(self.sequences[-1], keys, strict=False):
                self.pool.set_content(block, key)
            if len(tokens) % 2:
                self.pool.set_tail(self.sequences[-1][-1], tail_key(keys[-1] if keys else ROOT, tokens[-1:]))

    @rule(index=st.integers(0, 100))
    def grow(self, index):
        if self.sequences and (blocks := self.pool.allocate(1)):
            self.sequences[index % len(self.sequences)] += blocks

    @rule(index=st.integers(0, 100))
    def end(self, index):
        if self.sequences:
            self.pool.release(self.sequences.pop(index % len(self.sequences)))

    @rule()
    def forget(self):
        self.pool.forget()

    @invariant()
    def every_block_is_in_one_place(self):
        self.pool.check(self.sequences)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
