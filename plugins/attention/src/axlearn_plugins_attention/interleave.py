"""The feature `interleave`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, node, setting
from axlearn_core.config.tree import children, join, with_children
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.alternate import Alternate
from axlearn_core.plugins.feature import Feature

Tree = TypeVar("Tree", bound=Node[Any])

EVERY, WINDOW = 2, 4096


@node
class Interleave(Feature):
    """Sliding windows in most layers, and every nth layer global, as in Gemma 2 and 3.

    Layers n - 1, 2 n - 1, ... (from 0) see everything; each other layer sees the last `window` positions. `every` is n,
    by default 2, and `window` is by default that of the attention, where it has one, else 4096 (both as in Gemma 2;
    Gemma 3 has `every=6,window=1024`). Each attention becomes an alternation of n equal ones that differ in their
    window; their settings are then at `attention.children.*`. On an experiment that interleaves already, the options
    that are given are set. Attention layers that alternate in anything else are refused.
    """

    stage = "tune"

    every: int | None = setting(default=None, ge=2)
    window: int | None = setting(default=None, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Puts an `Alternate` in the place of every node with `num_heads` and `window`."""
        count = 0
        problems: list[Problem] = []

        def place(value: Any, path: str) -> Any:
            nonlocal count
            if isinstance(value, Alternate) and any(_is_attention(c) for c in value.children):
                count += 1
                if len({_base(c) for c in (*value.first, *value.children)}) == 1:
                    there = next((c.window for c in value.children if c.window is not None), None)
                    return self._alternation(_base(value.children[-1]), len(value.children), there)
                problems.append(
                    Problem(
                        path=path,
                        message="interleave cannot set the windows of attention layers that alternate in something else",
                        fix="leave interleave out, and set `window` of each of its children",
                    )
                )
                return value
            if _is_attention(value):
                count += 1
                return self._alternation(_base(value), EVERY, value.window)
            return with_children(value, {k: place(v, join(path, k)) for k, v in children(value).items()})

        made = place(cfg, "")
        if problems:
            raise ConfigError(problems)
        if not count:
            raise ConfigError(
                Problem(
                    path="model",
                    message="interleave finds no attention that takes a window",
                    expected="a node with `num_heads` and `window`",
                    fix="leave interleave out",
                )
            )
        return made

    def in_effect(self, cfg: Node[Any]) -> bool:
        """Every attention is interleaved so."""
        return self.apply(cfg) == cfg

    def _alternation(self, base: Any, every: int, window: int | None) -> Alternate:
        local = attrs.evolve(base, window=self.window or window or WINDOW)
        return Alternate(children=(local,) * ((self.every or every) - 1) + (base,))


def _is_attention(value: Any) -> bool:
    return isinstance(value, Node) and {"num_heads", "window"} <= {a.name for a in attrs.fields(type(value))}


def _base(part: Any) -> Any:
    return attrs.evolve(part, window=None) if _is_attention(part) else part
