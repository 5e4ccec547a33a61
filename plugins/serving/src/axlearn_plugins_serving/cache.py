"""Requests and the cache: which request has which blocks and which slot, and what of a prompt is there already."""

from collections import Counter
from typing import NamedTuple

from axlearn_plugins_serving.blocks import BlockPool, Key, block_keys, root_key, tail_key
from axlearn_plugins_serving.request_state import RequestState


class Match(NamedTuple):
    """What the cache has of a prompt.

    Attributes:
        shared: blocks with the right content, from the first on.
        source: a block with the rest of the prompt: a copy of it leaves one token to compute.
    """

    shared: list[int]
    source: int | None


class Cache:
    """Gives requests their blocks and slots, and takes them back.

    Args:
        pool: of the runner's blocks.
        slots: how many requests can run at one time.
        prefixes: whether requests share the blocks of equal beginnings.
        window: keys that a token of any layer sees, itself included; None without a limit.
    """

    def __init__(self, pool: BlockPool, slots: int, *, prefixes: bool = True, window: int | None = None):
        self.pool, self.prefixes, self.window = pool, prefixes, window
        self.version = 0
        self._slots = list(range(slots - 1, -1, -1))
        self._announced: Counter[Key] = Counter()  # of blocks that requests have begun to compute

    @property
    def free_slots(self) -> int:
        """How many more requests can run."""
        return len(self._slots)

    def find(self, state: RequestState) -> Match | None:
        """What the cache has for a waiting request.

        Returns:
            None where another request computes the next of its blocks right now: waiting for it saves the work.
        """
        if not self.prefixes or not state.sent_prompt_logprobs:  # log-probabilities are had by computing
            return Match([], None)
        self._compute_keys(state)
        size, length = self.pool.block_size, len(state.tokens)
        full = (length - 1) // size  # the last token is always computed: its logits are needed
        shared = self.pool.match(state.keys[:full])
        if len(shared) < full:
            return None if state.keys[len(shared)] in self._announced else Match(shared, None)
        if length - full * size == 1:
            return Match(shared, None)
        if length % size == 0:
            key = state.keys[full]
            source = next(iter(self.pool.match([key])), None)
        else:
            key = self._tail(state, length)
            source = self.pool.tail(key)
        return None if source is None and key in self._announced else Match(shared, source)

    def begin(self, state: RequestState, match: Match, *, headroom: int = 0) -> list[tuple[int, int]] | None:
        """Gives a waiting request a slot, and blocks for all its tokens.

        Args:
            state: of the request; no step is in flight for it.
            match: what `find` found just now.
            headroom: how many blocks have to stay free.

        Returns:
            Blocks to copy, (source, target); None, and nothing changes, where there is no room.
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
        """Gives a running request blocks for its first `positions` positions; False where there are not enough."""
        missing = -(-positions // self.pool.block_size) - len(state.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        state.blocks += blocks
        return True

    def store(self, state: RequestState) -> None:
        """Lets other requests use what submitted steps computed for this one."""
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
        """Gives back the blocks of a running request behind the window of every token to come.

        Submitted steps may still read them: whoever gets them next writes in a later step.
        """
        if self.window is None:
            return
        first = min(state.computed, len(state.tokens) - 1)  # a rejected draft is computed again
        behind = max(0, first - self.window + 1) // self.pool.block_size
        if behind > state.freed:
            self.pool.release(state.blocks[state.freed : behind])
            state.freed = behind

    def end(self, state: RequestState) -> None:
        """Takes blocks and slot from a running request. What was computed stays for others until its room is needed."""
        assert state.slot is not None
        self.store(state)
        while state.announced:
            self._retract(state.announced.popleft())
        self.pool.release(state.blocks[state.freed :])
        self._slots.append(state.slot)
        state.blocks, state.slot = [], None
        state.computed = state.target = state.stored = state.freed = 0

    def forget(self, running: list[RequestState]) -> None:
        """Forgets all contents: the weights are others now. Running requests keep their blocks for themselves."""
        self.version += 1
        self.pool.forget()
        self._announced.clear()
        for state in running:
            state.shares = False
            state.announced.clear()

    def _announce(self, state: RequestState) -> None:
        """Says which blocks the request is going to compute, so that requests with the same prompt wait for them."""
        if not self.prefixes:
            return
        self._compute_keys(state)
        size = self.pool.block_size
        state.announced.extend(state.keys[state.stored : state.target // size])
        if state.target % size:
            state.announced.append(self._tail(state, state.target))
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

    def _tail(self, state: RequestState, length: int) -> Key:
        size = self.pool.block_size
        full = length // size
        parent = state.keys[full - 1] if full else root_key(state.request.adapter, self.version)
        return tail_key(parent, state.tokens[full * size : length])
