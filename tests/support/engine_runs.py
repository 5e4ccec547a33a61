"""Serving engines with the fake runner, and requests for them."""

import random

from axlearn_core.config import patch
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from support.fake_runner import FakeRunner

VOCABULARY, CONTEXT = 97, 64
END = frozenset({3, 4})


def engine(*, settings=(), end=END, **sizes):
    cfg = patch(ServingEngine.Config(hold_seconds=10.0), dict(settings))
    return cfg.build(runner=FakeRunner.Config(**sizes).build(), end_tokens=end)


def run(engine, requests, *, aborted=(), rng=None, check=True):
    """Return id -> outputs. Requests arrive one by one between steps, and some are aborted."""
    rng, waiting, outputs = rng or random.Random(0), list(requests), {}
    for _ in range(100_000):
        if waiting and rng.random() < 0.6:
            for request in (waiting.pop(0) for _ in range(min(len(waiting), rng.randint(1, 4)))):
                engine.add(request)
        for id in aborted:
            if rng.random() < 0.02:
                engine.abort(id)
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        if check:
            check_blocks(engine)
        if not waiting and not engine.busy():
            return outputs
    raise AssertionError("the requests did not end")


def check_blocks(engine):
    engine.cache.pool.check([state.blocks[state.freed :] for state in engine.scheduler.running])


def tokens(outputs):
    return [t for output in outputs for t in output.tokens]


def requests_at_random(rng, count, **fixed):
    """Return prompts, many of which share a prefix or are equal."""
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (4, 8, 11, 16, 23)]
    requests = []
    for index in range(count):
        prompt = rng.choice(prefixes)[: rng.choice([3, 8, 99])]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 5, 20]))]
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99), max_tokens=rng.choice([1, 4, 17, None]),
            ignore_end=rng.random() < 0.3, stop_tokens=frozenset({5} if rng.random() < 0.3 else ()),
        )  # fmt: skip
        requests.append(
            Request(
                id=str(index), prompt=tuple(prompt), sampling=sampling, priority=rng.choice([0, 0, 0, 1, -1]),
                client=rng.choice("abc"), **fixed,
            )
        )  # fmt: skip
    return requests
