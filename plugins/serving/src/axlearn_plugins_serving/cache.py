"""An engine's cache: its blocks, slots and cached prompt prefixes."""

from collections import Counter
from typing import NamedTuple

from axlearn_plugins_serving.blocks import BlockPool, Key, block_keys, root_key, tail_key
from axlearn_plugins_serving.request_state import RequestState


class Match(NamedTuple):
    """The cached part of a prompt.

    Attributes:
        shared: Blocks that contain the beginning of the prompt, in order.
        source: Block that contains the rest of the prompt. After it is copied, only one token is left to compute.
    """

    shared: list[int]
    source: int | None


class Cache:
    """A cache that assigns blocks and slots to requests.

    Args:
        pool: The runner's blocks.
        slots: Maximum number of running requests.
        prefixes: Whether requests with a common prefix share the prefix's blocks.
        window: Number of keys that a token attends to in any layer, including itself; None if there is no limit.
    """

    def __init__(self, pool: BlockPool, slots: int, *, prefixes: bool = True, window: int | None = None):
        self.pool, self.prefixes, self.window = pool, prefixes, window
        self.version = 0
        self._slots = list(range(slots - 1, -1, -1))
        self._announced: Counter[Key] = Counter()  # keys of blocks that requests are computing

    @property
    def free_slots(self) -> int:
        """The number of free slots."""
        return len(self._slots)

    def find(self, state: RequestState) -> Match | None:
        """Find the cached part of a waiting request's prompt.

        Returns:
            None if another request is computing the next block. Waiting for that block avoids computing it twice.
        """
        if not self.prefixes or not state.sent_prompt_logprobs:  # log-probabilities are not cached
            return Match([], None)
        self._compute_keys(state)
        size, length = self.pool.block_size, len(state.tokens)
        full = (length - 1) // size  # always compute the last token, because its logits are needed
        shared = self.pool.match(state.keys[:full])
        if len(shared) < full:
            return None if state.keys[len(shared)] in self._announced else Match(shared, None)
        if length - full * size == 1:
            return Match(shared, None)
        if length % size == 0:
            key = state.keys[full]
            source = next(iter(self.pool.match([key])), None)
        else:
            key = self._prompt_tail_key(state, length)
            source = self.pool.tail(key)
        return None if source is None and key in self._announced else Match(shared, source)

    def begin(self, state: RequestState, match: Match, *, headroom: int = 0) -> list[tuple[int, int]] | None:
        """Give a waiting request a slot, and blocks for all its tokens.

        Args:
            state: State of the request, without steps in flight.
            match: Latest result of `find`.
            headroom: Number of blocks that must stay free.

        Returns:
            Blocks to copy, as (source, target). If there is no room, returns None and changes nothing.
        """
        size, length, shared = self.pool.block_size, len(state.tokens), match.shared
        count = -(-length // size) - len(shared)
        if not self._slots or self.pool.available - self.pool.count_idle(shared) < count + headroom:
            return None
        self.pool.hold(shared)
        fresh = self.pool.allocate(count)
        assert fresh is not None
        state.blocks, state.slot = shared + fresh, self._slots.pop()
        state.target, state.stored, state.shares = length, len(shared), True
        state.computed = len(shared) * size if match.source is None else length - 1
        self._announce(state)
        return [] if match.source in (None, fresh[0]) else [(match.source, fresh[0])]

    def extend(self, state: RequestState, positions: int) -> bool:
        """Give a running request blocks for its first `positions` positions.

        Returns False if there are not enough blocks.
        """
        missing = -(-positions // self.pool.block_size) - len(state.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        state.blocks += blocks
        return True

    def store(self, state: RequestState) -> None:
        """Share the blocks that submitted steps computed for a request."""
        if not (state.shares and self.prefixes):
            return
        size = self.pool.block_size
        full = min(state.computed, len(state.tokens)) // size
        if full > state.stored:
            self._compute_keys(state)
            for index in range(state.stored, full):
                self.pool.set_content(state.blocks[index], state.keys[index])
                if state.announced:
                    self._retract(state.announced.popleft())
            state.stored = full
        if state.announced and state.computed >= state.target:  # only the tail is left
            key = state.announced.popleft()
            self.pool.set_tail(state.blocks[state.target // size], key)
            self._retract(key)

    def trim(self, state: RequestState) -> None:
        """Release the blocks of a running request that have left the attention window.

        Submitted steps may still read them. This is safe, because their next owner writes to them in a later step.
        """
        if self.window is None:
            return
        first = min(state.computed, len(state.tokens) - 1)  # positions of rejected drafts are computed again
        behind = max(0, first - self.window + 1) // self.pool.block_size
        if behind > state.freed:
            self.pool.release(state.blocks[state.freed : behind])
            state.freed = behind

    def end(self, state: RequestState) -> None:
        """Release the blocks and the slot of a running request.

        Contents stay cached until the blocks are reallocated.
        """
        assert state.slot is not None
        self.store(state)
        while state.announced:
            self._retract(state.announced.popleft())
        self.pool.release(state.blocks[state.freed :])
        self._slots.append(state.slot)
        state.blocks, state.slot = [], None
        state.computed = state.target = state.stored = state.freed = 0

    def forget(self, running: list[RequestState]) -> None:
        """Forget all contents after the weights have changed.

        Running requests keep their blocks but stop sharing them.
        """
        self.version += 1
        self.pool.forget()
        self._announced.clear()
        for state in running:
            state.shares = False
            state.announced.clear()

    def _announce(self, state: RequestState) -> None:
        """Announce the blocks that a request will compute.

        Requests with the same prompt then wait for them.
        """
        if not self.prefixes:
            return
        self._compute_keys(state)
        size = self.pool.block_size
        state.announced.extend(state.keys[state.stored : state.target // size])
        if state.target % size:
            state.announced.append(self._prompt_tail_key(state, state.target))
        self._announced.update(state.announced)

    def _retract(self, key: Key) -> None:
        if self._announced[key] > 1:
            self._announced[key] -= 1
        else:
            del self._announced[key]

    def _compute_keys(self, state: RequestState) -> None:
        if state.key_version != self.version:
            state.keys, state.key_version = [], self.version
        root = root_key(state.request.adapter, self.version)
        state.keys = block_keys(root, state.tokens, self.pool.block_size, prefix=state.keys)

    def _prompt_tail_key(self, state: RequestState, length: int) -> Key:
        size = self.pool.block_size
        full = length // size
        parent = state.keys[full - 1] if full else root_key(state.request.adapter, self.version)
        return tail_key(parent, state.tokens[full * size : length])
