"""Sizes that depend on another one, resolved when the part is built.

No feature then computes from a leaf that a user may still change.
"""

from axlearn_core.config.node import Node, node, setting


@node
class Scaled(Node[int]):
    """`factor` times a base size, rounded up to a multiple (the feed-forward of Llama: 8/3 of the width)."""

    factor: float = setting(default=1.0, gt=0)
    multiple_of: int = setting(default=1, ge=1)

    def build(self, *, base: int, **_: object) -> int:
        """The size for a base size."""
        size = round(base * self.factor, 6)  # 8/3 * 384 is 1024, although 8/3 is rounded
        return -int(-size // self.multiple_of) * self.multiple_of


def size_of(size: int | Node[int], base: int) -> int:
    """A size, given as a number or as a node that is resolved against `base`."""
    return size.build(base=base) if isinstance(size, Node) else size
