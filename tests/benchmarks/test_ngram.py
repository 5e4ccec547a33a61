"""The 5-gram benchmark against counting in dictionaries."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from support.benchmark_scripts import load_benchmark
from support.paths import ROOT

SCRIPT = ROOT / "benchmarks" / "ngram.py"


@pytest.fixture(scope="module")
def ngram():
    return load_benchmark("ngram")


def plain(train: list[bytes], held_out: list[bytes], order: int) -> float:
    tables = [defaultdict(Counter) for _ in range(order)]
    for raw in train:
        padded = b"\0" * (order - 1) + raw
        for i in range(order - 1, len(padded)):
            for n in range(order):
                tables[n][padded[i - n : i]][padded[i]] += 1
    losses = []
    for raw in held_out:
        padded = b"\0" * (order - 1) + raw
        for i in range(order - 1, len(padded)):
            p = 1 / 256
            for n in range(order):
                counts = tables[n].get(padded[i - n : i])
                if counts:
                    p = (counts[padded[i]] + len(counts) * p) / (sum(counts.values()) + len(counts))
            losses.append(-math.log(p))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_it_counts_what_dictionaries_count(ngram, order):
    rng = np.random.default_rng(order)
    draw = lambda n: bytes(rng.choice(np.frombuffer(b"aab\n\xff", np.uint8), n).tolist())  # noqa: E731
    train, held_out = [draw(400), draw(30), b"x"], [draw(100), b"never seen"]
    assert ngram.nats_per_byte(train, held_out, order) == pytest.approx(plain(train, held_out, order), rel=1e-9)
