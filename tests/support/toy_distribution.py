"""A distribution with experiments, components and features that import no JAX."""

from collections.abc import Callable
from pathlib import Path

Install = Callable[..., Path]

TOY = '''
from typing import Any
from axlearn_core.config import Configurable, Node, REQUIRED, Scaled, interface, node, setting
from axlearn_core.errors import Problem

class NoPosition(Configurable):
    pass

class Rotary(Configurable):
    @node
    class Config(Configurable.Config["Rotary"]):
        theta: float = setting(default=1e4, gt=0)

class Attention(Configurable):
    @node
    class Config(Configurable.Config["Attention"]):
        dim: int = interface()
        num_heads: int = setting(default=4, ge=1)
        num_kv_heads: int | None = None
        position: Node[Any] = NoPosition.Config()

        def validate(self):
            if self.num_kv_heads and self.num_heads % self.num_kv_heads:
                yield Problem(path="num_kv_heads", message="does not divide num_heads", got=str(self.num_kv_heads))

class FeedForward(Configurable):
    @node
    class Config(Configurable.Config["FeedForward"]):
        hidden_dim: int | Node[int] = Scaled(factor=4.0)

class Experts(Configurable):
    @node
    class Config(Configurable.Config["Experts"]):
        hidden_dim: int | Node[int] = Scaled(factor=4.0)
        num_experts: int = 8

class Decoder(Configurable):
    @node
    class Config(Configurable.Config["Decoder"]):
        num_layers: int = REQUIRED
        hidden_dim: int = 64
        attention: Node[Any] = Attention.Config()
        feed_forward: Node[Any] = FeedForward.Config()

class Trainer(Configurable):
    @node
    class Config(Configurable.Config["Trainer"]):
        model: Node[Any] = Decoder.Config(num_layers=2)
        max_steps: int = 100
        learning_rate: float = 1e-3
        tags: tuple[str, ...] = ()
        parts: tuple[Node[Any], ...] = ()

def toy():
    """A small experiment."""
    return Trainer.Config()

def unfinished():
    return Trainer.Config(model=Decoder.Config())
'''

FEATURES = '''
from axlearn_core.config import REQUIRED, find, node, patch, replace_config, setting
from axlearn_core.plugins.feature import Feature
from toy_parts import Attention, Experts, FeedForward, NoPosition, Rotary

@node
class Rope(Feature):
    """Rotary position embeddings.

    On an experiment that has them it sets `theta`.
    """
    stage = "replace"
    theta: float = setting(default=1e4, gt=0)
    def apply(self, cfg):
        if found := find(cfg, Rotary):
            return patch(cfg, {f"{path}.theta": self.theta for path in found})
        return replace_config(cfg, NoPosition, Rotary.Config(theta=self.theta))
    def in_effect(self, cfg):
        return bool(find(cfg, Rotary))

@node
class Moe(Feature):
    """Experts in the place of the feed-forward."""
    stage = "replace"
    excludes = ("toy-wide",)
    num_experts: int = REQUIRED
    names: tuple[str, ...] = ()
    def apply(self, cfg):
        return replace_config(cfg, FeedForward, Experts.Config(num_experts=self.num_experts))

@node
class Wide(Feature):
    stage = "tune"
    def apply(self, cfg):
        return patch(cfg, {"model.hidden_dim": 128})

@node
class Wider(Feature):
    stage = "tune"
    def apply(self, cfg):
        return patch(cfg, {"model.hidden_dim": 256})

@node
class Needy(Feature):
    stage = "tune"
    needs = ("toy-rope",)
    def apply(self, cfg):
        return patch(cfg, {"model.attention.position.theta": 3.0})

@node
class Idle(Feature):
    def apply(self, cfg):
        return cfg

    def in_effect(self, cfg):
        return False

@node
class Misfit(Feature):
    def apply(self, cfg):
        return patch(cfg, {"model.decoder.nope": 1})

@node
class Broken(Feature):
    def apply(self, cfg):
        raise KeyError("oops")

class Unmarked(Feature):
    pass
'''


def install_toy(install: Install) -> Path:
    """Install the distribution for one test, with the function of the fixture `install`."""
    kinds = ("NoPosition", "Rotary", "Attention", "FeedForward", "Experts", "Decoder", "Trainer")
    features = ("Rope", "Moe", "Wide", "Wider", "Needy", "Idle", "Misfit", "Broken", "Unmarked")
    return install(
        "axlearn-plugins-toy",
        "0.3",
        modules={"toy_parts": TOY, "toy_features": FEATURES},
        points={
            "experiments": {"toy": "toy_parts:toy", "unfinished": "toy_parts:unfinished"},
            "components": {f"toy-{k.lower()}": f"toy_parts:{k}" for k in kinds}
            | {"toy-scaled": "axlearn_core.config.sizes:Scaled"},
            "features": {f"toy-{name.lower()}": f"toy_features:{name}" for name in features},
        },
    )
