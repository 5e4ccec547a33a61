"""What is integrated: RoPE, MoE and dropout, which are installed, and token shift, which comes as a package of its own.

Also the modifiers: ten lines of Python that a user could write instead of installing a feature.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import map
from axlearn_plugins_moe.layer import MixtureOfExperts
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.dropout import DropoutOutput

ACTIVATION = {
    "rope": "rope:theta=100",  # at this width and length the default base would hardly turn anything
    "moe": "moe:num_experts=4,top_k=2",
    "token-shift": "token-shift:mix=0.3",
    "dropout": "dropout:rate=0.5,embedding=false",
}
"""Feature -> what follows `--with`, and the one line that the launcher of a project needs."""

SHIFT_PACKAGE = "packages/axlearn-plugins-token-shift"

SHIFT_FILES = {
    "pyproject.toml": """[project]
name = "axlearn-plugins-token-shift"
version = "1.0"
dependencies = ["axlearn-core>=0.1,<0.2"]

[project.entry-points."axlearn.components"]
token-shift = "axlearn_plugins_token_shift:TokenShift"

[project.entry-points."axlearn.features"]
token-shift = "axlearn_plugins_token_shift:UseTokenShift"
""",
    "src/axlearn_plugins_token_shift/__init__.py": '''"""Token shift (Peng et al., 2023, RWKV)."""

from typing import Any

import jax.numpy as jnp

from axlearn_core.config import REQUIRED, Node, find, interface, node, patch, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.layer import Layer
from axlearn_core.plugins.feature import Feature


class TokenShift(Layer):
    """`inner(x + mix * (x of the token before - x))`."""

    @node
    class Config(Layer.Config["TokenShift"]):
        input_dim: int = interface(default=REQUIRED)
        inner: Node[Any] = REQUIRED
        mix: float = setting(default=0.5, ge=0, le=1)

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.inner = self.child(cfg.inner, rngs=rngs, input_dim=cfg.input_dim)

    def __call__(self, x):
        """[B, S, D] -> [B, S, D]."""
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return self.inner(x + self.cfg.mix * (before - x))


@node
class UseTokenShift(Feature):
    """Each feed-forward layer sees a token mixed with the one before it; where one does already, `mix` is set."""

    stage = "wrap"

    mix: float = setting(default=0.5, ge=0, le=1)

    def apply(self, cfg):
        found = find(cfg, "**.feed_forward")
        if not found:
            raise ConfigError(Problem(path="model", message="has no feed_forward", fix="leave token-shift out"))
        inner = {p: n.inner if isinstance(n, TokenShift.Config) else n for p, n in found.items()}
        return patch(cfg, {p: TokenShift.Config(inner=n, mix=self.mix) for p, n in inner.items()})

    def in_effect(self, cfg):
        return self.apply(cfg) == cfg
''',
}


def integrate(root: Path, feature: str) -> None:
    """All that a user does to have a feature in every experiment of a project."""
    if feature == "token-shift":
        for name, text in SHIFT_FILES.items():
            file = root / SHIFT_PACKAGE / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    launch = root / "launch.py"
    launch.write_text(launch.read_text().replace("FEATURES = [\n", f'FEATURES = [\n    "{ACTIVATION[feature]}",\n'))


def rope_modifier(cfg: Any) -> Any:
    """Rotary position embeddings in every attention."""

    def place(part: Any) -> Any:
        if not (hasattr(part, "num_heads") and hasattr(part, "position")):  # the decoder takes learned positions
            return part
        return attrs.evolve(part, position=RotaryEmbedding.Config(theta=100.0))

    return map(cfg, place)


def moe_modifier(cfg: Any) -> Any:
    """Experts of the size and kind of each feed-forward layer in its place."""

    def place(part: Any) -> Any:
        if not hasattr(part, "feed_forward"):
            return part
        old = part.feed_forward
        sizes = {"num_experts": 4, "top_k": 2, "hidden_dim": old.hidden_dim}
        experts = MixtureOfExperts.Config(**sizes, gate=getattr(old, "gate", None), activation=old.activation)
        return attrs.evolve(part, feed_forward=experts)

    return map(cfg, place)


def dropout_modifier(cfg: Any) -> Any:
    """Dropout behind the attention and the feed-forward layer of each block."""

    def place(part: Any) -> Any:
        halves = {name: getattr(part, name) for name in ("attention", "feed_forward") if hasattr(part, name)}
        wrapped = {name: DropoutOutput.Config(inner=half, dropout=0.5) for name, half in halves.items()}
        return attrs.evolve(part, **wrapped)

    return map(cfg, place)


MODIFIERS = {"rope": rope_modifier, "moe": moe_modifier, "dropout": dropout_modifier}
"""Each gives the tree that the installed feature gives; the benchmark holds them against each other."""


def modifier_lines() -> dict[str, int]:
    """Lines of code of each modifier: neither docstrings nor blank lines. Token shift's is its feature's `apply`."""
    found = {name: _lines(ast.parse(inspect.getsource(function))) for name, function in MODIFIERS.items()}
    shift = ast.parse(SHIFT_FILES["src/axlearn_plugins_token_shift/__init__.py"])
    apply = next(n for n in ast.walk(shift) if isinstance(n, ast.FunctionDef) and n.name == "apply")
    return found | {"token-shift": _lines(apply)}


def _lines(code: ast.AST) -> int:
    """Lines that any statement or expression touches, without docstrings."""
    said = [n.body[0] for n in ast.walk(code) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
    left_out = {id(part) for text in said for part in ast.walk(text)}
    return len({n.lineno for n in ast.walk(code) if isinstance(n, LINED) and id(n) not in left_out})


LINED = (ast.stmt, ast.expr, ast.keyword)
