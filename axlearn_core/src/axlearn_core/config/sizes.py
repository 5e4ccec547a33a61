"""Sizes and factors that are relative to a base size and resolved when the layer is built.

A feature can therefore set such a value without knowing the base size, which the user may change later.
"""

from typing import Any

from axlearn_core.config.node import Node, node, setting


@node
class Scaled(Node[int]):
    """`factor` times a base size, rounded up to a multiple. Llama's feed-forward layer uses 8/3 of the width."""

    factor: float = setting(default=1.0, gt=0)
    multiple_of: int = setting(default=1, ge=1)

    def build(self, *, base: int, **_: object) -> int:
        """Return the size, computed from `base`."""
        size = round(base * self.factor, 6)  # 8/3 is inexact, but 8/3 * 384 must be 1024
        return -int(-size // self.multiple_of) * self.multiple_of


def size_of(size: int | Node[int], base: int) -> int:
    """Return a size. Resolve it against `base` if it is a node."""
    return size.build(base=base) if isinstance(size, Node) else size


def factor_of(factor: float | Node[float], **sizes: Any) -> float:
    """Return a factor. Build it with `sizes` if it is a node."""
    return factor.build(**sizes) if isinstance(factor, Node) else factor
