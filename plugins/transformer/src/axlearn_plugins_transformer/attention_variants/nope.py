"""The `nope` feature."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node, setting
from axlearn_core.config.tree import fill_slots
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import PositionEncoding

Tree = TypeVar("Tree", bound=Node[Any])


@node
class NoPositions(Feature):
    """Removes the position encoding from every nth layer (NoPE), as in Llama 4 and SmolLM 3.

    Layers n - 1, 2 n - 1, ... (from 0) have no position encoding. Only the causal mask tells them the order of the tokens
    (Kazemnejad et al., 2023, arXiv 2305.19466). The other layers keep their encoding. If the model already has such layers,
    the feature sets n.

    Attributes:
        every: n (default: 4).
    """

    stage = "tune"

    every: int | None = setting(default=None, ge=2)

    def apply(self, cfg: Tree) -> Tree:
        """Alternate every position encoding with none."""
        no_match = Problem(
            path="model",
            message="nope finds no attention layer with a slot for a position encoding",
            expected="a layer with a slot `Node[PositionEncoding]`",
            fix="leave nope out, or annotate the attention's slot as `Node[PositionEncoding]`",
        )
        return fill_slots(cfg, PositionEncoding, lambda _, old: self._alternate(old), no_match=no_match)

    def _alternate(self, old: Any) -> Node[Any]:
        if old is None:
            raise ConfigError(
                Problem(
                    path="",
                    message="has no position encoding that nope could remove",
                    fix="leave nope out, or add a position encoding first: --with rope",
                )
            )
        every, encoding = 4, old
        if isinstance(old, Alternate):
            *encodings, last = old.children
            if last is not None or old.first or not encodings or any(part != encodings[0] for part in encodings):
                raise ConfigError(
                    Problem(
                        path="",
                        message="nope cannot change position encodings that already vary by layer in another pattern",
                        fix="leave nope out, or set this to one encoding",
                    )
                )
            every, encoding = len(old.children), encodings[0]
        return Alternate(children=(encoding,) * ((self.every or every) - 1) + (None,))
