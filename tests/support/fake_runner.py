"""A runner without a model, whose tokens are hashes of all tokens before them.

It reads the tokens back through the block table, so a wrong table, a stale block or steps in the wrong order give wrong tokens.
It also asserts the guarantees that a runner relies on.
"""

import functools
import hashlib
import time

import attrs
import numpy as np

from axlearn_core.config import Configurable, node
from axlearn_plugins_serving.contracts import RowResult, Sampling, TokenLogprobs

EMPTY = -1


@functools.lru_cache(maxsize=200_000)
def _hash(version, tokens, salt=b""):
    return int.from_bytes(hashlib.blake2b(repr((version, tokens)).encode() + salt, digest_size=7).digest(), "big")


def next_token(tokens, sampling, seed, generated, vocab_size, mask=None, version=0):
    """Return the token after `tokens`, by a hash over the allowed ones. Sampling also hashes the seed and the token count."""
    salt = f"{seed}/{generated}".encode() if sampling.temperature > 0 else b""
    number = _hash(version, tuple(tokens), salt)
    if mask is None:
        return number % vocab_size
    allowed = [t for t in range(vocab_size) if mask[t // 32] >> (t % 32) & 1]
    return allowed[number % len(allowed)]


def logprobs_of(tokens, token, top, version=0, vocab_size=97):
    """Return log-probabilities that depend on all earlier tokens. The most likely token is the greedy choice."""
    best = next_token(tokens, Sampling(temperature=0.0), 0, 0, vocab_size, version=version)
    value = -(_hash(version, (*tokens, "logprob", token)) % 1000) / 100 - 0.01
    return TokenLogprobs(
        token=token,
        logprob=value,
        top=tuple([(best, -0.01), *((t, -float(t) - 1) for t in range(1, top or 0))][: top or 0]),
    )


def expected(prompt, sampling, *, max_context, vocab_size, end_tokens=frozenset(), seed=0, version=0):
    """Return the tokens and the finish reason of a request that runs alone."""
    tokens, ends = list(prompt), sampling.stop_tokens | (frozenset() if sampling.ignore_end else end_tokens)
    limit = min(max_context - len(prompt), max_context if sampling.max_tokens is None else sampling.max_tokens)
    for count in range(limit):
        banned = {w[-1] for w in sampling.bad_tokens if tokens[len(prompt) :][count + 1 - len(w) :] == list(w[:-1])}
        banned |= ends if count < sampling.min_tokens else set()
        mask = None
        if sampling.bad_tokens or count < sampling.min_tokens:
            bits = [token not in banned for token in range(-(-vocab_size // 32) * 32)]
            mask = np.packbits(bits, bitorder="little").view(np.uint32)
        token = next_token(tokens, sampling, seed, count, vocab_size, mask, version=version)
        if token in ends:
            return tokens[len(prompt) :], "stop"
        tokens.append(token)
    return tokens[len(prompt) :], "length"


class _Pending:
    def __init__(self, results, ready_at):
        self.results, self.ready_at = results, ready_at

    def wait(self):
        if (seconds := self.ready_at - time.perf_counter()) > 0:
            time.sleep(seconds)
        return self.results


class FakeRunner(Configurable):
    """A `Runner`. Each step takes `latency` seconds on a device that runs one step at a time."""

    @node
    class Config(Configurable.Config["FakeRunner"]):
        vocab_size: int = 97
        block_size: int = 4
        num_blocks: int = 64
        max_rows: int = 6
        max_step_tokens: int = 24
        max_blocks_per_request: int = 16
        decode_steps: int = 1
        chunk: int = 1
        latency: float = 0.0
        checks: bool = True

    def __init__(self, cfg):
        self.vocab_size, self.block_size, self.num_blocks = cfg.vocab_size, cfg.block_size, cfg.num_blocks
        self.max_rows, self.max_batch_tokens = cfg.max_rows, cfg.max_step_tokens
        self.max_prompt_tokens, self.adapters = cfg.max_step_tokens, ()
        self.max_blocks_per_request, self.decode_steps = cfg.max_blocks_per_request, cfg.decode_steps
        self.chunk, self.max_logit_bias = cfg.chunk, 300
        self.max_context = self.max_blocks_per_request * self.block_size
        self.compilations, self.latency, self.checks = 0, cfg.latency, cfg.checks
        self.memory = np.full((self.num_blocks, self.block_size), EMPTY, np.int64)
        self.versions = np.zeros((self.num_blocks, self.block_size), np.int64)
        self.slots, self.version, self.free_at, self.fail = {}, 0, 0.0, None
        self.steps, self.computed = [], 0

    def warm_up(self):
        pass

    def assign(self, slot, sampling, seed, output, adapter=None, prompt=()):
        assert 0 <= slot < self.max_rows
        assert isinstance(sampling, Sampling)
        assert 0 <= seed < 2**32
        self.slots[slot] = [sampling, seed, len(output), None]

    def submit(self, rows, steps=1):
        if self.fail is not None:
            raise self.fail
        if self.checks:
            self._check(rows, steps)
        results = [self._compute(row, steps) for row in rows] if self.checks else self._tokens(rows, steps)
        self.steps.append((sum(len(row.tokens) or 1 for row in rows), len(rows), steps))
        self.free_at = max(time.perf_counter(), self.free_at) + self.latency * steps
        return _Pending(results, self.free_at)

    def _tokens(self, rows, steps):
        return [RowResult(tokens=(1,) * steps if row.sample else ()) for row in rows]

    def _check(self, rows, steps):
        assert rows
        assert len(rows) <= self.max_rows
        assert len({row.slot for row in rows}) == len(rows)
        assert sum(len(row.tokens) or 1 for row in rows) <= self.max_batch_tokens
        assert 1 <= steps <= self.decode_steps
        written, table = {}, {}
        for row in rows:
            count = len(row.tokens) or steps
            assert steps == 1 or not row.tokens
            assert steps == 1 or row.mask is None
            assert row.targets is None or len(row.targets) == len(row.tokens)
            assert len(row.blocks) <= self.max_blocks_per_request
            assert row.start + count <= len(row.blocks) * self.block_size
            assert len(set(row.blocks)) == len(row.blocks)
            first, last = row.start // self.block_size, (row.start + count - 1) // self.block_size
            written[row.slot] = set(row.blocks[first : last + 1])
            table[row.slot] = set(row.blocks)
        for slot, blocks in written.items():
            for other, tokens in table.items():
                assert other == slot or not blocks & tokens, f"slot {slot} writes what slot {other} has"

    def _compute(self, row, steps):
        slot = self.slots[row.slot]
        sampling, seed = slot[:2]
        tokens, logprobs, target_logprobs = list(row.tokens), [], []
        position = row.start
        for token in tokens or [slot[3]]:
            assert token is not None, "no token was chosen for this slot yet"
            self._write(row.blocks, position, token)
            position += 1
        self.computed += len(tokens) or steps
        top = max(1, sampling.logprobs or 0) if row.verifies else sampling.num_prompt_logprobs
        for index, target in enumerate(row.targets or ()):
            before = self._read(row.blocks, row.start + index + 1)
            target_logprobs.append(logprobs_of(before[0], target, top, before[1]))
        next_tokens = []
        for step in range(steps if row.sample else 0):
            if step:
                self._write(row.blocks, position, next_tokens[-1])
                position += 1
            before, version = self._read(row.blocks, position)
            next_tokens.append(next_token(before, sampling, seed, slot[2], self.vocab_size, row.mask, version))
            scores = logprobs_of(before, next_tokens[-1], sampling.logprobs, version)
            logprobs.append(attrs.evolve(scores, sampling_logprob=-0.5 if sampling.sampling_logprobs else None))
            slot[2] += 1
        if next_tokens:
            slot[3] = next_tokens[-1]
        return RowResult(
            tokens=next_tokens,
            logprobs=logprobs if sampling.logprobs is not None else None,
            target_logprobs=target_logprobs if row.targets is not None else None,
        )

    def _write(self, blocks, position, token):
        self.memory[blocks[position // self.block_size], position % self.block_size] = token
        self.versions[blocks[position // self.block_size], position % self.block_size] = self.version

    def _read(self, blocks, length):
        """Return the cached tokens and the version of the weights that computed them, or all versions."""
        blocks = list(blocks[: -(-length // self.block_size)])
        versions = self.versions[blocks].reshape(-1)[:length]
        version = int(versions[0]) if (versions == versions[0]).all() else tuple(versions.tolist())
        return tuple(self.memory[blocks].reshape(-1)[:length].tolist()), version

    def copy_blocks(self, pairs):
        for source, target in pairs:
            assert source != target
            self.memory[target], self.versions[target] = self.memory[source], self.versions[source]

    def read_blocks(self, blocks):
        return self.memory[list(blocks)]

    def write_blocks(self, blocks, contents):
        self.memory[list(blocks)] = contents

    def update_weights(self, weights, *, share=False):
        self.version = weights
        return 0
