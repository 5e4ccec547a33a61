"""An engine in plain Python for tests of the server. Its tokens depend only on the tokens before them.

Each step answers a random subset of the running requests, so that requests overlap in many ways. It counts blocks, so that a test
can check that all were freed.
"""

import hashlib
import random
import time

import attrs
import numpy as np

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Output, QueueFullError, Statistics, TokenLogprobs

BLOCK = 16


def next_token(tokens, vocab_size, script=None, at=0):
    """Return the token after `tokens`."""
    if script is not None:
        return script[at] if at < len(script) else None
    digest = hashlib.blake2b(np.asarray(tokens[-8:], np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def scores(token, count, vocab_size):
    top = tuple(((token + i) % vocab_size, -0.25 - i) for i in range(count))
    return TokenLogprobs(token=token, logprob=-0.25, top=top)


@attrs.define
class Running:
    request: object
    output: list
    blocks: int
    reported: bool = False
    started: float = attrs.field(factory=time.monotonic)


class FakeEngine:
    """An `Engine`.

    Args:
        script: Output of every request, or a function of the request that returns it; None uses hashes.
        fail_at: Step that raises an error.
        delay: Duration of a step in seconds.
    """

    def __init__(
        self,
        vocab_size=257,
        max_context=256,
        blocks=512,
        max_waiting=10_000,
        max_running=64,
        script=None,
        delay=0.0,
        fail_at=None,
        eos_id=None,
        seed=0,
    ):
        self.vocab_size, self.max_context = vocab_size, max_context
        self.blocks, self.free = blocks, blocks
        self.max_waiting, self.max_running = max_waiting, max_running
        self.script, self.delay, self.fail_at, self.eos_id = script, delay, fail_at, eos_id
        self.waiting, self.running = {}, {}
        self.random = random.Random(seed)
        self.steps = self.output_tokens = self.prompt_tokens = 0
        self.closed = False
        self.aborted = []
        self.seen = []

    def add(self, request):
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests are waiting", 1.5)
        if not request.prompt or len(request.prompt) >= self.max_context:
            raise RequestError(f"the prompt has {len(request.prompt)} tokens")
        assert request.id not in self.waiting
        assert request.id not in self.running
        self.seen.append(request)
        self.waiting[request.id] = request

    def abort(self, id):
        self.aborted.append(id)
        self.waiting.pop(id, None)
        if (gone := self.running.pop(id, None)) is not None:
            self.free += gone.blocks

    def busy(self):
        return bool(self.waiting or self.running)

    def step(self):
        self.steps += 1
        if self.delay:
            time.sleep(self.delay)
        if self.fail_at is not None and self.steps >= self.fail_at:
            raise RuntimeError("the device is lost")
        for id in list(self.waiting):
            need = -(-(len(self.waiting[id].prompt)) // BLOCK) + 4
            if len(self.running) >= self.max_running or need > self.free:
                break
            self.free -= need
            self.running[id] = Running(self.waiting.pop(id), [], need)
            self.prompt_tokens += len(self.running[id].request.prompt)
        return [self._advance(id) for id in list(self.running) if self.random.random() < 0.8]

    def _advance(self, id):
        state = self.running[id]
        request, sampling = state.request, state.request.sampling
        if request.embeds:
            self.free += self.running.pop(id).blocks
            return Output(id=id, embedding=np.asarray(request.prompt[:4], np.float32), finish="stop")
        script = self.script(request) if callable(self.script) else self.script
        tokens, finish, stop_token = [], None, None
        limit = sampling.max_tokens or self.max_context
        for _ in range(self.random.randint(1, 3)):
            at = len(state.output)
            if at >= limit or len(request.prompt) + at >= self.max_context:
                finish = "length"
                break
            token = next_token([*request.prompt, *state.output], self.vocab_size, script, at)
            if request.constraint is not None:
                bits = np.unpackbits(request.constraint.mask().view(np.uint8), bitorder="little")
                allowed = np.flatnonzero(bits)
                if token not in allowed and (token is not None or len(allowed) < self.vocab_size):
                    token = int(allowed[(token or 0) % len(allowed)])
            ends = token is None or token == self.eos_id or token in sampling.stop_tokens
            if ends and not (sampling.ignore_end and token is not None and token not in sampling.stop_tokens):
                finish, stop_token = "stop", token
                break
            state.output.append(token)
            tokens.append(token)
            self.output_tokens += 1
            if request.constraint is not None and request.constraint.accept(token):
                finish = "stop"
                break
        if finish is None and (
            len(state.output) >= limit or len(request.prompt) + len(state.output) >= self.max_context
        ):
            finish = "length"
        prompt_logprobs = None
        if sampling.scores_prompt and not state.reported:
            prompt_logprobs = tuple(
                scores(t, sampling.num_prompt_logprobs, self.vocab_size) for t in request.prompt[1:]
            )
        state.reported = True
        if finish is not None:
            self.free += self.running.pop(id).blocks
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = tuple(scores(t, sampling.logprobs, self.vocab_size) for t in tokens)
        return Output(
            id=id,
            tokens=tuple(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_token=stop_token,
            started=state.started,
        )

    def statistics(self):
        return Statistics(
            waiting=len(self.waiting),
            running=len(self.running),
            blocks=self.blocks,
            used_blocks=self.blocks - self.free,
            cached_blocks=0,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=0,
            output_tokens=self.output_tokens,
            preemptions=0,
            steps=self.steps,
            compilations=0,
            step_seconds=0.0,
            host_seconds=0.0,
        )

    def update_weights(self, weights, version=None, *, share=False):
        raise NotImplementedError

    def close(self):
        self.closed = True
