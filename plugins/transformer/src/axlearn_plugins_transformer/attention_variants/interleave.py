"""The feature `interleave`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, node, setting
from axlearn_core.config.tree import edit_nodes
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.layer_roles import WindowRole

Tree = TypeVar("Tree", bound=Node[Any])

EVERY, WINDOW = 2, 4096


@node
class Window(Node[int | None]):
    """How many positions back a layer sees, itself included; None is all of them. For `alternate` in a window's place."""

    size: int | None = setting(default=None, ge=1)

    def build(self, **_: object) -> int | None:
        """The size."""
        return self.size


@node
class Interleave(Feature):
    """Sliding windows in most layers, and every nth layer global, as in Gemma 2 and 3.

    Layers n - 1, 2 n - 1, ... (from 0) see everything; each other layer sees the last `window` positions. `every` is n,
    by default 2, and `window` is by default that of the attention, where it has one, else 4096 (both as in Gemma 2;
    Gemma 3 has `every=6,window=1024`). It sets `window` of every attention layer, and nothing else. On an experiment
    that interleaves already, the options that are given are set. Windows that differ by layer in another way are
    refused.
    """

    stage = "tune"

    every: int | None = setting(default=None, ge=2)
    window: int | None = setting(default=None, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Sets `window` of every node with the role `WindowRole`."""
        nothing = Problem(
            path="model",
            message="interleave finds no attention that takes a window",
            expected="a layer with the role WindowRole",
            fix="leave interleave out",
        )
        return edit_nodes(cfg, lambda _, part: self._set(part), nothing=nothing)

    def _set(self, part: Any) -> Any:
        if not isinstance(part, WindowRole):
            return None
        node: Any = part
        pattern = _parse_window(node.window)
        if pattern is None:
            raise ConfigError(
                Problem(
                    path="window",
                    message="interleave cannot change windows that differ by layer in another way",
                    fix="leave interleave out, or set this to a number or to null",
                )
            )
        return attrs.evolve(node, window=self._windows(*pattern))

    def _windows(self, every: int, window: int) -> Alternate:
        local = Window(size=self.window or window)
        return Alternate(children=(local,) * ((self.every or every) - 1) + (Window(),))


def _parse_window(window: Any) -> tuple[int, int] | None:
    """(every, window) of what stands in a window's place; None where this feature could not have put it there."""
    if window is None or isinstance(window, int):
        return EVERY, window or WINDOW
    if not isinstance(window, Alternate) or not window.children or window.first:
        return None
    *local, last = window.children
    if last != Window() or len(set(local)) != 1 or not isinstance(local[0], Window) or local[0].size is None:
        return None
    return len(window.children), local[0].size
