"""A user's project on this framework: the source of N block modules and M experiments.

No two modules compute the same. They differ in their normalization, residual connections, attention scores and
feed-forward layers. They define the inputs and outputs of their children, and do not know the features.
"""

from pathlib import Path

PACKAGE = "zoo"

BLOCK = '''"""Block {i}: {residual}; attention: {attention}."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.linear import Linear, Projection
from axlearn_plugins_transformer.attention import AttentionLayer, PositionEncoding, cached_slots
from axlearn_plugins_transformer.feed_forward import FeedForward, GatedFeedForward, PlainFeedForward
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import Causal, SlidingWindow
from axlearn_plugins_transformer.kv_cache import ContiguousCache, KVCache, build_cache
from axlearn_plugins_transformer.norm import LayerNorm, Norm, RMSNorm


class Attention{i}(Layer):
    """{attention}."""

    @node
    class Config(Layer.Config["Attention{i}"]):
        input_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=2, ge=1)
        position: Node[PositionEncoding] | None = None
        scores: Node[Any] | None = None  # a layer that changes the op before it runs
        projection: Node[Projection] = Linear.Config()
        kv_cache: Node[KVCache] = ContiguousCache.Config()

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        width, heads = (cfg.input_dim,), (cfg.num_heads, cfg.input_dim // cfg.num_heads)
        axes = ("embed", "heads", "head_dim")
        for name in ("query", "key", "value"):
            made = self.child(cfg.projection, rngs=rngs, input_dims=width, output_dims=heads, axes=axes)
            setattr(self, name, made)
        axes = ("heads", "head_dim", "embed")
        self.output = self.child(cfg.projection, rngs=rngs, input_dims=heads, output_dims=width, axes=axes)
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, num_heads=heads[0], head_dim=heads[1])
        if cfg.scores is not None:
            self.scores = self.child(cfg.scores, rngs=rngs, num_heads=heads[0])

    def cache_spec(self):
        heads, width = self.cfg.num_heads, self.cfg.input_dim
        return build_cache(self.cfg.kv_cache).spec(heads, width // heads, self.precision.compute)

    def __call__(self, x, context, cache=None):
        q, k, v = self.query(x), self.key(x), self.value(x)
        {prepare}
        if self.cfg.position is not None:
            at = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if context.positions is None else context.positions
            q, k = self.position(q, k, at)
        mask = Causal() & SlidingWindow({window})
        op = AttentionOp(q, k, v, mask=mask, {score})
        if self.cfg.scores is not None:
            op = self.scores(op)
        if cache is None:
            mixed = op.run()
        else:
            mixed, cache = build_cache(self.cfg.kv_cache).attend(cache, op, cached_slots(context), None)
        return self.output({mixed}), cache


class Block{i}(Layer):
    """{residual}."""

    @node
    class Config(Layer.Config["Block{i}"]):
        input_dim: int = interface(default=REQUIRED)
        attention: Node[AttentionLayer] = Attention{i}.Config()
        feed_forward: Node[FeedForward] = {feed_forward}
        norm: Node[Norm] = {norm}

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.attention = self.child(cfg.attention, rngs=rngs, input_dim=cfg.input_dim)
        self.feed_forward = self.child(cfg.feed_forward, rngs=rngs, input_dim=cfg.input_dim)
        self.first_norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)
        self.second_norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)

    def cache_spec(self):
        return self.attention.cache_spec()

    def __call__(self, x, context, cache=None):
{forward}
        return {result}, cache
'''

RESIDUALS = (
    (
        "pre-norm",
        ("y, cache = self.attention(self.first_norm(x), context, cache)", "x = x + {a} * y"),
        "x + self.feed_forward(self.second_norm(x))",
    ),
    (
        "post-norm",
        ("y, cache = self.attention(x, context, cache)", "x = self.first_norm(x + {a} * y)"),
        "self.second_norm(x + self.feed_forward(x))",
    ),
    (
        "attention and feed-forward side by side",
        ("h = self.first_norm(x)", "y, cache = self.attention(h, context, cache)", "h = self.second_norm(x)"),
        "x + {a} * y + self.feed_forward(h)",
    ),
    (
        "outputs normalised",
        ("y, cache = self.attention(x, context, cache)", "x = x + {a} * self.first_norm(y)"),
        "x + self.second_norm(self.feed_forward(x))",
    ),
)
PREPARED = (
    ("queries bounded", "q = 3.0 * jnp.tanh(q / 3.0)"),
    ("normalised queries and keys", "q, k = (y / (1e-3 + jnp.abs(y).mean(-1, keepdims=True)) for y in (q, k))"),
    ("keys bounded", "k = jnp.tanh(k)"),
)
SCORED = (
    ("", "scale={scale}"),
    ("scores capped", "scale={scale}, softcap=5.0"),
    ("scores sharpened", "scale={scale} * {sharp}"),
    ("keys decay with the distance", "scale={scale}, bias=LinearBias(({decay},) * self.cfg.num_heads)"),
)
MIXED = ("mixed", "mixed * jax.nn.sigmoid(v)", "mixed + 0.1 * v")
FEED_FORWARDS = (
    "GatedFeedForward.Config(hidden_dim=16)",
    'PlainFeedForward.Config(hidden_dim=16, activation="gelu")',
    'GatedFeedForward.Config(hidden_dim=16, activation="relu_squared")',
    'PlainFeedForward.Config(hidden_dim=16, activation="silu")',
    'GatedFeedForward.Config(hidden_dim=16, activation="gelu_tanh")',
)

EXPERIMENT = '''"""Experiment {j}: {layers} layers of width {width}, {optimizer} at {rate}."""

from axlearn_core.learn import AdamW, Learner
from axlearn_plugins_transformer.stack import Stack
from axlearn_core.train import Trainer
from axlearn_plugins_tools.optimizers.muon import Muon
from axlearn_plugins_transformer.text import LanguageModelInput, StandardLibrary, TokenizerJson
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.norm import LayerNorm, RMSNorm
from axlearn_plugins_transformer.transformer import Decoder
{imports}


def experiment(block):
    """Return the experiment with one of the blocks."""
    return Trainer.Config(
        model=CausalLM.Config(
            vocab_size={vocab},
            logit_softcap={cap},
            z_loss={z_loss},
            decoder=Decoder.Config(
                num_layers={layers},
                hidden_dim={width},
                layer=block,
                norm={norm},
                stack=Stack.Config(mode="{mode}"),
            ),
        ),
        learner=Learner.Config(optimizer={optimizer}(learning_rate={rate})),
        input=LanguageModelInput.Config(
            batch_size={batch},
            sequence_length={length},
            source=StandardLibrary.Config(),
            tokenizer=TokenizerJson.Config(builtin="python-2k"),
        ),
        max_steps={steps},
        seed={j},
    )

{cells}
'''

CELL = """
def with_block_{i}():
    return experiment(Block{i}.Config())
"""

LAUNCH = '''"""Train an experiment of this project with all FEATURES: `python launch.py EXPERIMENT`."""

import sys

FEATURES = [
]


def config(experiment):
    """Return the training config of `experiment`."""
    from axlearn_core.plugins.resolve import resolve

    return resolve(experiment, with_=FEATURES).check().config


if __name__ == "__main__":
    from axlearn_core.train import train

    train(sys.argv[1], with_=FEATURES)
'''

PROJECT = """[project]
name = "zoo"
version = "1.0"
dependencies = ["axlearn-core>=0.1,<0.2"]

[project.entry-points."axlearn.components"]
{components}
[project.entry-points."axlearn.experiments"]
{experiments}"""


def block(i: int) -> str:
    """Return the source of module `i`. Each i up to 60 has another combination."""
    name, steps, result = RESIDUALS[i % 4]
    (prepared, prepare), (scored, score) = PREPARED[i % 3], SCORED[(i // 4) % 4]
    values = {"a": round(0.5 + 0.02 * i, 2), "sharp": round(1.1 + 0.05 * i, 2), "decay": round(0.02 + 0.01 * i, 2)}
    window, scale = 2 + i % 7, round(0.3 + 0.01 * i, 2)
    parts = [s for s in (prepared, scored, f"window {window}", f"scale {scale}") if s]
    return BLOCK.format(
        i=f"{i:02}",
        residual=name,
        attention=", ".join(parts),
        prepare=prepare,
        score=score.format(scale=scale, **values),
        window=window,
        mixed=MIXED[i % 3],
        feed_forward=FEED_FORWARDS[i % 5],
        norm=("RMSNorm.Config()", "LayerNorm.Config()", "RMSNorm.Config(eps=1e-5)")[(i // 2) % 3],
        forward="\n".join(f"        {s.format(**values)}" for s in steps),
        result=result.format(**values),
    )


def experiment(j: int, modules: int) -> str:
    """Return the source of experiment `j`, with a function for each module."""
    numbers = [f"{i:02}" for i in range(modules)]
    return EXPERIMENT.format(
        j=j,
        layers=1 + j % 2,
        width=(8, 16)[(j // 2) % 2],
        vocab=32,
        cap=(None, 20.0, 30.0)[j % 3],
        z_loss=(0.0, 1e-4)[(j // 3) % 2],
        norm=("RMSNorm.Config()", "LayerNorm.Config()", "None")[(j // 4) % 3],
        mode="scan" if j % 8 == 3 else "unrolled",  # every scan must be compiled
        optimizer=("AdamW", "Muon")[j % 2],
        rate=round(0.001 * (j + 1), 3),
        batch=8 * (1 + j % 4),
        length=(16, 32, 64)[j % 3],
        steps=100 + 10 * j,
        imports="\n".join(f"from {PACKAGE}.blocks.block_{i} import Block{i}" for i in numbers),
        cells="\n".join(CELL.format(i=i) for i in numbers),
    )


def name(i: int, j: int) -> str:
    """Return the name of a cell's experiment."""
    return f"experiment-{j:02}-block-{i:02}"


def write(root: Path, modules: int, experiments: int) -> None:
    """Write the project."""
    package = root / "src" / PACKAGE
    for folder in ("", "blocks", "experiments"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text(f'"""{(folder or "The project").capitalize()}."""\n')
    for i in range(modules):
        (package / f"blocks/block_{i:02}.py").write_text(block(i))
    for j in range(experiments):
        (package / f"experiments/experiment_{j:02}.py").write_text(experiment(j, modules))
    (root / "launch.py").write_text(LAUNCH)
    (root / "pyproject.toml").write_text(
        PROJECT.format(
            components="".join(
                f'{kind.lower()}-{i:02} = "{PACKAGE}.blocks.block_{i:02}:{kind}{i:02}"\n'
                for i in range(modules)
                for kind in ("Attention", "Block")
            ),
            experiments="".join(
                f'{name(i, j)} = "{PACKAGE}.experiments.experiment_{j:02}:with_block_{i:02}"\n'
                for j in range(experiments)
                for i in range(modules)
            ),
        )
    )
