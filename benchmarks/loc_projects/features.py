"""The features to integrate: RoPE, MoE and dropout are installed, and five features have their own packages.

Also has the modifiers: ten lines of Python that a user could write instead of installing a feature.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import map
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.dropout import DropoutOutput
from loc_projects import packages

ACTIVATION = {
    "rope": "rope:theta=100",  # at this width and length, the default base would hardly rotate anything
    "moe": "moe:num_experts=4,top_k=2",
    "token-shift": "token-shift:mix=0.3",
    "dropout": "dropout:rate=0.5,embedding=false",
    "fp8-cache": "fp8-cache",
    "label-smoothing": "label-smoothing:amount=0.2",
    "min-gru": "min-gru:gate_bias=0.5",
    "head-sinks": "head-sinks:start=1",
}
"""Text for `--with` by feature. It is also the one line that a project's launcher needs."""


def integrate(root: Path, feature: str) -> None:
    """Apply the user's changes that add a feature to every experiment of a project."""
    if feature in packages.SOURCES:
        packages.write(root, feature)
    launch = root / "launch.py"
    launch.write_text(launch.read_text().replace("FEATURES = [\n", f'FEATURES = [\n    "{ACTIVATION[feature]}",\n'))


def rope_modifier(cfg: Any) -> Any:
    """Add rotary position embeddings to every attention layer."""

    def place(part: Any) -> Any:
        if not (hasattr(part, "num_heads") and hasattr(part, "position")):  # the decoder has learned positions
            return part
        return attrs.evolve(part, position=RotaryEmbedding.Config(theta=100.0))

    return map(cfg, place)


def moe_modifier(cfg: Any) -> Any:
    """Replace each feed-forward layer by experts of its size and kind."""

    def place(part: Any) -> Any:
        if not hasattr(part, "feed_forward"):
            return part
        old = part.feed_forward
        sizes = {"num_experts": 4, "top_k": 2, "hidden_dim": old.hidden_dim}
        experts = MixtureOfExperts.Config(**sizes, gate=getattr(old, "gate", None), activation=old.activation)
        return attrs.evolve(part, feed_forward=experts)

    return map(cfg, place)


def dropout_modifier(cfg: Any) -> Any:
    """Add dropout after the attention and the feed-forward layer of each block."""

    def place(part: Any) -> Any:
        halves = {name: getattr(part, name) for name in ("attention", "feed_forward") if hasattr(part, name)}
        wrapped = {name: DropoutOutput.Config(base=half, dropout=0.5) for name, half in halves.items()}
        return attrs.evolve(part, **wrapped)

    return map(cfg, place)


MODIFIERS = {"rope": rope_modifier, "moe": moe_modifier, "dropout": dropout_modifier}
"""Modifiers by feature. The benchmark checks that each returns the same tree as the installed feature."""


def modifier_lines() -> dict[str, int]:
    """Return the lines of code of each modifier, without docstrings and blank lines.

    The modifier of a package is its feature's `apply`.
    """
    lines = {name: _lines(ast.parse(inspect.getsource(function))) for name, function in MODIFIERS.items()}
    for name, (source, _, _) in packages.SOURCES.items():
        functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
        lines[name] = _lines(next(n for n in functions if n.name == "apply"))
    return lines


def _lines(code: ast.AST) -> int:
    """Return the lines of all statements and expressions, without docstrings."""
    docstrings = [n.body[0] for n in ast.walk(code) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
    left_out = {id(part) for text in docstrings for part in ast.walk(text)}
    return len({n.lineno for n in ast.walk(code) if isinstance(n, LINED) and id(n) not in left_out})


LINED = (ast.stmt, ast.expr, ast.keyword)
