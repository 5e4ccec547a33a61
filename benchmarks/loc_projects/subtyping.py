"""The baseline: the same project in plain NumPy, in which parents instantiate their children.

Every parent has a method that creates its child, so a feature needs subtypes: a subclass of each module, and then a
subclass of each parent that creates it. Blank lines, docstrings and options of the features are omitted, and the
features are in a package that is not counted. So this is the minimum number of lines for this style.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "subtyped"
CACHED = ("fp8-cache", "min-gru")
"""Features whose cells generate through the caches."""
TOKENS = np.random.default_rng(0).integers(0, 32, 6)

LAYERS = '''"""Layers that all blocks share."""

import numpy as np


def weights(rows, columns, seed):
    return np.random.default_rng(seed).normal(size=(rows, columns)) / rows**0.5


def normed(x):
    return x / np.sqrt(1e-6 + (x * x).mean(-1, keepdims=True))


class FeedForward:
    def __init__(self, width, hidden, seed):
        self.up, self.down = weights(width, hidden, seed + 4), weights(hidden, width, seed + 5)

    def __call__(self, x):
        return np.maximum(x @ self.up, 0) @ self.down


class Cache:
    def __init__(self):
        self.parts = []

    def append(self, key, value):
        self.parts.append((key, value))
        return (np.concatenate(arrays) for arrays in zip(*self.parts))


class CrossEntropy:
    def __call__(self, logits, targets):
        return (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets]).mean()
'''

BLOCK = '''"""Block {i}."""

import numpy as np
from subtyped.layers import Cache, FeedForward, normed, weights


class Attention{i}:
    def __init__(self, width, heads, seed):
        self.heads = heads
        self.query, self.key, self.value, self.output = (weights(width, width, seed + k) for k in range(4))

    def scores(self, query, key):
        return np.einsum("qnh,knh->nqk", query, key) * {scale}

    def weigh(self, scores):
        seen = np.exp(scores - scores.max(-1, keepdims=True))
        return seen / seen.sum(-1, keepdims=True)

    def make_cache(self):
        return Cache()

    def __call__(self, x, cache=None):
        q, k, v = ((x @ w).reshape(len(x), self.heads, -1) for w in (self.query, self.key, self.value))
        if cache is not None:
            k, v = cache.append(k, v)
        distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
        scores = np.where((distance >= 0) & (distance < {window}), self.scores(q, k), -1e9)
        mixed = np.einsum("nqk,knh->qnh", self.weigh(scores), v)
        return mixed.reshape(x.shape) @ self.output


class Block{i}:
    def __init__(self, width, heads, hidden, seed):
        self.attention = self.make_attention(width, heads, seed)
        self.feed_forward = self.make_feed_forward(width, hidden, seed)

    def make_attention(self, width, heads, seed):
        return Attention{i}(width, heads, seed)

    def make_feed_forward(self, width, hidden, seed):
        return FeedForward(width, hidden, seed)

    def make_cache(self):
        return self.attention.make_cache()

    def __call__(self, x, cache=None):
        x = x + {a} * self.attention(normed(x), cache)
        return x + self.feed_forward(normed(x))
'''

EXPERIMENT = '''"""Experiment {j}."""

import numpy as np
from subtyped.layers import CrossEntropy, normed, weights
{imports}


class Experiment{j}:
    width, heads, hidden, layers, seed = {width}, 2, {hidden}, {layers}, {seed}

    def __init__(self):
        self.embedding = weights(32, self.width, self.seed)
        self.blocks = [self.make_block(100 * (n + 1) + self.seed) for n in range(self.layers)]
        self.objective = self.make_objective()

    def make_objective(self):
        return CrossEntropy()

    def make_caches(self):
        return [block.make_cache() for block in self.blocks]

    def __call__(self, tokens, caches=None):
        x = self.embedding[tokens]
        for block, cache in zip(self.blocks, caches or [None] * self.layers):
            x = block(x, cache)
        return normed(x) @ self.embedding.T

    def loss(self, tokens, targets):
        return self.objective(self(tokens), targets)
{cells}'''

CELL = """

class Experiment{j}Block{i}(Experiment{j}):
    def make_block(self, seed):
        return Block{i}(self.width, self.heads, self.hidden, seed)
"""

FEATURES = '''"""The features: base classes for the subtypes of modules."""

import numpy as np
from subtyped.layers import Cache, CrossEntropy, FeedForward, weights


def turned(x, start=0):
    half = x.shape[-1] // 2
    angle = np.arange(start, start + len(x))[:, None, None] * 100.0 ** (-np.arange(half) / half)
    y = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([y.real, y.imag], -1)


class Turned:
    def scores(self, query, key):
        return super().scores(turned(query, len(key) - len(query)), turned(key))


class Experts:
    def __init__(self, width, hidden, seed):
        self.router = weights(width, 4, seed + 6)
        self.experts = [FeedForward(width, hidden, seed + 10 * e) for e in range(4)]

    def __call__(self, x):
        logits = x @ self.router
        kept = np.where(logits >= np.sort(logits)[:, -2:-1], np.exp(logits), 0)
        return sum((kept / kept.sum(-1, keepdims=True))[:, e, None] * f(x) for e, f in enumerate(self.experts))


class WithExperts:
    def make_feed_forward(self, width, hidden, seed):
        return Experts(width, hidden, seed)


class Dropped:
    def __init__(self, layer):
        self.layer = layer

    def make_cache(self):
        return self.layer.make_cache()

    def __call__(self, x, *cache):
        return self.layer(x, *cache) * 2.0 * (np.arange(x.shape[-1]) % 2)


class WithDropout:
    def make_attention(self, width, heads, seed):
        return Dropped(super().make_attention(width, heads, seed))

    def make_feed_forward(self, width, hidden, seed):
        return Dropped(super().make_feed_forward(width, hidden, seed))


class Shifted:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(0.7 * x + 0.3 * np.concatenate([np.zeros_like(x[:1]), x[:-1]]))


class WithShift:
    def make_feed_forward(self, width, hidden, seed):
        return Shifted(super().make_feed_forward(width, hidden, seed))


class RoundedCache(Cache):
    def append(self, key, value):
        return super().append(*(np.round(x * 8) / 8 for x in (key, value)))


class WithRoundedCache:
    def make_cache(self):
        return RoundedCache()


class SmoothedLabels(CrossEntropy):
    def __call__(self, logits, targets):
        uniform = (np.log(np.exp(logits).sum(-1)) - logits.mean(-1)).mean()
        return 0.8 * super().__call__(logits, targets) + 0.2 * uniform


class WithSmoothedLabels:
    def make_objective(self):
        return SmoothedLabels()


class Recurrence:
    def __init__(self, width, seed):
        self.gate, self.value = weights(width, width, seed + 7), weights(width, width, seed + 8)

    def make_cache(self):
        return {"state": 0}

    def __call__(self, x, cache=None):
        gate, states = 1 / (1 + np.exp(-(x @ self.gate))), [(cache or {"state": 0})["state"]]
        for z, value in zip(gate, x @ self.value):
            states.append((1 - z) * states[-1] + z * value)
        if cache is not None:
            cache["state"] = states[-1]
        return np.stack(states[1:])


class WithRecurrence:
    def make_attention(self, width, heads, seed):
        return Recurrence(width, seed)


class WithSinks:
    def weigh(self, scores):
        return np.exp(scores) / (np.exp(scores).sum(-1, keepdims=True) + np.array([[[1.0]], [[2.0]]]))
'''

PREFIX = {
    "rope": "Rope",
    "moe": "Moe",
    "token-shift": "Shift",
    "dropout": "Drop",
    "fp8-cache": "Cache",
    "label-smoothing": "Smooth",
    "min-gru": "Gru",
    "head-sinks": "Sink",
}
IMPORTED = {
    "rope": "Turned",
    "moe": "WithExperts",
    "token-shift": "WithShift",
    "dropout": "WithDropout",
    "fp8-cache": "WithRoundedCache",
    "label-smoothing": "WithSmoothedLabels",
    "min-gru": "WithRecurrence",
    "head-sinks": "WithSinks",
}

OF_BLOCK = """class {prefix}Block{i}({imported}, Block{i}): ...
"""
OF_ATTENTION = """class {prefix}Attention{i}({imported}, Attention{i}): ...
class {prefix}Block{i}(Block{i}):
    def make_attention(self, width, heads, seed):
        return {prefix}Attention{i}(width, heads, seed)
"""
SUBTYPE = {
    "rope": OF_ATTENTION,
    "moe": OF_BLOCK,
    "token-shift": OF_BLOCK,
    "dropout": OF_BLOCK,
    "fp8-cache": OF_ATTENTION,
    "min-gru": OF_BLOCK,
    "head-sinks": OF_ATTENTION,
}
"""Subtypes of a module by feature. An objective has none, because experiments create it."""

PARENT = """class {prefix}Experiment{j}Block{i}(Experiment{j}Block{i}):
    def make_block(self, seed):
        return {prefix}Block{i}(self.width, self.heads, self.hidden, seed)
"""
PARENT_OF_OBJECTIVE = """class {prefix}Experiment{j}Block{i}({imported}, Experiment{j}Block{i}): ...
"""


def write(root: Path, modules: int, experiments: int) -> None:
    """Write the project."""
    package = root / "src" / PACKAGE
    for folder in ("", "blocks", "experiments"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("")
    (package / "layers.py").write_text(LAYERS)
    for i in range(modules):
        facts = {"i": f"{i:02}", "a": round(0.5 + 0.02 * i, 2), "scale": round(0.3 + 0.01 * i, 2), "window": 2 + i % 7}
        (package / f"blocks/block_{i:02}.py").write_text(BLOCK.format(**facts))
    numbers = [f"{i:02}" for i in range(modules)]
    for j in range(experiments):
        text = EXPERIMENT.format(
            j=f"{j:02}",
            width=(8, 16)[j % 2],
            hidden=16 + j,
            layers=1 + j % 3,
            seed=j,
            imports="\n".join(f"from subtyped.blocks.block_{i} import Block{i}" for i in numbers),
            cells="".join(CELL.format(i=i, j=f"{j:02}") for i in numbers),
        )
        (package / f"experiments/experiment_{j:02}.py").write_text(text)


def integrate(root: Path, feature: str, modules: int, experiments: int) -> None:
    """Write a subtype of every module, and of every parent that creates one."""
    package, names = root / "src" / PACKAGE, {"prefix": PREFIX[feature], "imported": IMPORTED[feature]}
    own = root / "packages/subtyped_features"
    own.mkdir(parents=True)
    (own / "subtyped_features.py").write_text(FEATURES)
    first = f"import numpy as np\nfrom subtyped_features import {IMPORTED[feature]}\n"
    numbers = [f"{i:02}" for i in range(modules)]
    for i in numbers if feature in SUBTYPE else ():
        file = package / f"blocks/block_{i}.py"
        text = file.read_text().replace("import numpy as np\n", first)
        file.write_text(text + SUBTYPE[feature].format(i=i, **names))
    parent = PARENT if feature in SUBTYPE else PARENT_OF_OBJECTIVE
    for j in (f"{j:02}" for j in range(experiments)):
        file = package / f"experiments/experiment_{j}.py"
        text = file.read_text()
        if feature not in SUBTYPE:
            text = text.replace("import numpy as np\n", first)
        for i in numbers:
            if feature in SUBTYPE:
                text = text.replace(f"import Block{i}\n", f"import Block{i}, {PREFIX[feature]}Block{i}\n")
            text += parent.format(i=i, j=j, **names)
        file.write_text(text)


@contextmanager
def importable(root: Path) -> Iterator[None]:
    """Make the project with a feature importable."""
    paths = [str(root / "src"), str(root / "packages/subtyped_features")]
    sys.path[:0] = paths
    try:
        yield
    finally:
        del sys.path[: len(paths)]
        for name in [n for n in sys.modules if n.split(".")[0] in (PACKAGE, "subtyped_features")]:
            del sys.modules[name]


def active(i: int, j: int, feature: str) -> bool:
    """Return whether the feature is active in a cell: it changes the output, which equals that of a hand-made model."""
    parents: Any = __import__(f"{PACKAGE}.experiments.experiment_{j:02}", fromlist=["*"])
    brought: Any = __import__("subtyped_features")
    name = f"Experiment{j:02}Block{i:02}"
    plain, hand, subtype = (getattr(parents, before + name)() for before in ("", "", PREFIX[feature]))
    for n, block in enumerate(hand.blocks):
        seed = 100 * (n + 1) + hand.seed
        if feature == "rope":
            own = block.attention.scores
            block.attention.scores = lambda q, k, own=own: own(brought.turned(q), brought.turned(k))
        elif feature == "moe":
            block.feed_forward = brought.Experts(hand.width, hand.hidden, seed)
        elif feature == "dropout":
            block.attention, block.feed_forward = brought.Dropped(block.attention), brought.Dropped(block.feed_forward)
        elif feature == "token-shift":
            block.feed_forward = brought.Shifted(block.feed_forward)
        elif feature == "fp8-cache":
            block.attention.make_cache = brought.RoundedCache
        elif feature == "min-gru":
            block.attention = brought.Recurrence(hand.width, seed)
        elif feature == "head-sinks":
            block.attention.weigh = lambda scores: brought.WithSinks().weigh(scores)
    if feature == "label-smoothing":
        hand.objective = brought.SmoothedLabels()
    before, after, expected = (_computed(model, feature) for model in (plain, subtype, hand))
    if feature in CACHED and np.abs(before - plain(TOKENS)).max() > 1e-9:
        return False  # the caches of the plain model do not store earlier tokens
    norm = np.linalg.norm(after)
    return bool(np.linalg.norm(after - before) >= 1e-3 * norm and np.linalg.norm(after - expected) <= 1e-9 * norm)


def _computed(model: Any, feature: str) -> Any:
    """Return the values that the feature changes: logits, logits of a generation through the caches, or losses."""
    if feature == "label-smoothing":
        return np.array([model.loss(TOKENS[:n], TOKENS[1 : n + 1]) for n in (1, 3, 5)])
    if feature not in CACHED:
        return model(TOKENS)
    caches = model.make_caches()
    return np.concatenate([model(part, caches) for part in (TOKENS[:4], TOKENS[4:5], TOKENS[5:])])
