"""The `interleave` feature."""

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
    """The window of a layer: the number of positions that each query sees, or None for all.

    The number includes the query's own position. The node is meant for use in an `alternate`.
    """

    size: int | None = setting(default=None, ge=1)

    def build(self, **_: object) -> int | None:
        """Return the size."""
        return self.size


@node
class Interleave(Feature):
    """Uses sliding windows in most layers, and global attention in every nth layer.

    Gemma 2 and 3 use this pattern. Layers n - 1, 2 n - 1, ... (from 0) are global; the other layers see the last
    `window` positions. The feature sets only `window`, in every attention layer. If the model already interleaves, the
    feature sets the given options. It rejects models whose windows vary by layer in any other way.

    Attributes:
        every: n (default: 2, as in Gemma 2; Gemma 3 uses `every=6,window=1024`).
        window: Window size (default: the attention's own window, or 4096, as in Gemma 2, if it is unset).
    """

    stage = "tune"

    every: int | None = setting(default=None, ge=2)
    window: int | None = setting(default=None, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Set `window` in every node with a `WindowRole`."""
        no_match = Problem(
            path="model",
            message="interleave finds no attention layer with a window",
            expected="a layer with the role WindowRole",
            fix="leave interleave out",
        )
        return edit_nodes(cfg, lambda _, part: self._set(part), no_match=no_match)

    def _set(self, part: Any) -> Any:
        if not isinstance(part, WindowRole):
            return None
        node: Any = part
        pattern = _parse_window(node.window)
        if pattern is None:
            raise ConfigError(
                Problem(
                    path="window",
                    message="interleave cannot change windows that already vary by layer in a different pattern",
                    fix="leave interleave out, or set this to a number or to null",
                )
            )
        return attrs.evolve(node, window=self._windows(*pattern))

    def _windows(self, every: int, window: int) -> Alternate:
        local = Window(size=self.window or window)
        return Alternate(children=(local,) * ((self.every or every) - 1) + (Window(),))


def _parse_window(window: Any) -> tuple[int, int] | None:
    """Return (every, window) of a `window` setting.

    Returns None if this feature cannot have set it.
    """
    if window is None or isinstance(window, int):
        return EVERY, window or WINDOW
    if not isinstance(window, Alternate) or not window.children or window.first:
        return None
    *local, last = window.children
    if last != Window() or len(set(local)) != 1 or not isinstance(local[0], Window) or local[0].size is None:
        return None
    return len(window.children), local[0].size
