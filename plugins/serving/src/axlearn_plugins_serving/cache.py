"""An engine's cache: its blocks, slots and cached prompt prefixes."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from axlearn_plugins_serving.blocks import BlockPool, Key, block_keys, root_key, tail_key
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.snapshots import Snapshots


class Match(NamedTuple):
    """The cached part of a prompt.

    Attributes:
        shared: Blocks that contain the beginning of the prompt, in order.
        source: Block that contains the rest of the prompt. After it is copied, only one token is left to compute.
        state: Row with the recurrent state after the shared blocks.
    """

    shared: list[int]
    source: int | None
    state: int | None = None


class Cache:
    """A cache that assigns blocks and slots to requests.

    Args:
        pool: The runner's blocks.
        slots: Maximum number of running requests.
        prefixes: Whether requests with a common prefix share the prefix's blocks.
        window: Number of keys that a token attends to in any layer, including itself; None if there is no limit.
        prefix: Number of leading tokens that attend in both directions. Requests share blocks only if these tokens are equal.
        snapshots: Saved recurrent states, for a model that has them. A request can then share a prefix only if the state after it
            was saved.
    """

    def __init__(
        self,
        pool: BlockPool,
        slots: int,
        *,
        prefixes: bool = True,
        window: int | None = None,
        prefix: int = 0,
        snapshots: Snapshots | None = None,
    ):
        self.pool, self.prefixes, self.window, self.snapshots = pool, prefixes, window, snapshots
        self.prefix = prefix
        self.version = 0
        self._adapter_versions: Counter[str] = Counter()
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
        if self.snapshots is not None:
            return self._find_state(self.snapshots, state, shared, full)
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

    def _find_state(self, snapshots: Snapshots, state: RequestState, shared: list[int], full: int) -> Match | None:
        """Find the longest cached prefix, of at most `shared`, after which the recurrent state was saved."""
        count, row = snapshots.find(state.keys[: len(shared)])
        if count < full and state.keys[full - 1] in self._announced:  # its request saves the state after this block
            return None
        state.branch = len(shared)
        return Match(shared[:count], None, row)

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
        if self.snapshots is not None and match.state is not None:
            self.snapshots.use(state.keys[len(shared) - 1])
        state.blocks, state.slot, state.restored = shared + fresh, self._slots.pop(), match.state
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

    def plan_snapshots(self, state: RequestState, start: int, end: int, chunk: int) -> dict[int, int]:
        """Return the rows in which a step saves a request's recurrent state, by position.

        States are saved before the last token of a prompt, at the end of a prefix that the request shares with other requests,
        and at the latest block boundary of an output.

        Args:
            state: State of the request.
            start: Position of the first token of the step.
            end: Position after the last token.
            chunk: Number of prompt tokens that are computed together. States between its multiples do not exist.
        """
        rows: dict[int, int] = {}
        if self.snapshots is None or not (state.shares and self.prefixes):
            return rows
        size = self.pool.block_size
        boundaries = {state.branch * size, (state.target - 1) // size * size}
        for position in sorted(boundaries) if start < state.target else [end // size * size]:
            exists = (position - start) % chunk == 0 or position == end or start >= state.target
            if start < position <= end and exists and not self._is_saved(self.snapshots, state, position):
                row = self.snapshots.take()
                if row is not None:
                    rows[position] = row
                    state.saved.append((position, row))
        return rows

    def _is_saved(self, snapshots: Snapshots, state: RequestState, position: int) -> bool:
        index = position // self.pool.block_size - 1
        return index < len(state.keys) and snapshots.has(state.keys[index])

    def _store_states(self, snapshots: Snapshots, state: RequestState) -> None:
        """Share the saved states whose tokens are known."""
        size, count = self.pool.block_size, min(state.computed, len(state.tokens))
        while state.saved and state.saved[0][0] <= count:
            position, row = state.saved.popleft()
            self._compute_keys(state)
            key = state.keys[position // size - 1]
            snapshots.register(key, row)
            if position > state.target:  # one state for the output of each request
                if state.output_state not in (None, key):
                    snapshots.discard(state.output_state)
                state.output_state = key

    def store(self, state: RequestState) -> None:
        """Share the blocks and states that submitted steps computed for a request."""
        if not (state.shares and self.prefixes):
            return
        if self.snapshots is not None:
            self._store_states(self.snapshots, state)
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
        if self.snapshots is not None:
            for _, row in state.saved:
                self.snapshots.release(row)
        state.saved.clear()
        state.restored, state.output_state, state.branch = None, None, 0
        self._slots.append(state.slot)
        state.blocks, state.slot = [], None
        state.computed = state.target = state.stored = state.freed = 0

    def forget(self, running: list[RequestState]) -> None:
        """Forget all contents after the weights have changed.

        Running requests keep their blocks but stop sharing them.
        """
        self.version += 1
        self.pool.forget()
        if self.snapshots is not None:
            self.snapshots.forget()
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

    def root_key(self, adapter: str | None, tokens: Sequence[int], extras: bytes = b"") -> Key:
        """Return the parent key of the first block of a request with these tokens."""
        version = self._adapter_versions[adapter] if adapter is not None else 0
        return root_key(f"{adapter}@{version}" if version else adapter, self.version, tokens[: self.prefix], extras)

    def forget_adapter(self, adapter: str) -> None:
        """Forget the contents that belong to an adapter. Their blocks are the first to be replaced."""
        self._adapter_versions[adapter] += 1

    def _compute_keys(self, state: RequestState) -> None:
        if state.key_version != self.version:
            state.keys, state.key_version = [], self.version
        root = self._state_root(state)
        state.keys = block_keys(root, state.tokens, self.pool.block_size, prefix=state.keys)

    def _state_root(self, state: RequestState) -> Key:
        return self.root_key(state.request.adapter, state.tokens, state.extras_digest)

    def _prompt_tail_key(self, state: RequestState, length: int) -> Key:
        size = self.pool.block_size
        full = length // size
        parent = state.keys[full - 1] if full else self._state_root(state)
        return tail_key(parent, state.tokens[full * size : length])
