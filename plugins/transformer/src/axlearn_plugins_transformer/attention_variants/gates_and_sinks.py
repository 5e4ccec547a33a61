"""The features `output-gate` and `attention-sinks`."""

from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import Node, node
from axlearn_core.config.tree import edit_nodes
from axlearn_core.errors import Problem
from axlearn_core.nn.initializers import Constant
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import Attention

Tree = TypeVar("Tree", bound=Node[Any])


@node
class OutputGate(Feature):
    """Multiplies the result of every attention layer with a sigmoid gate, before the output projection.

    The gate is a projection of the layer's input (Qiu et al., 2025, arXiv 2505.06708), as in Qwen3-Next. A layer that already has a
    gate keeps its projection. Latent attention (`mla`) has no gate.

    Attributes:
        per: Whether each `element` of a head has a gate (default for new gates), or each `head`.
    """

    stage = "tune"
    excludes = ("mla",)

    per: Literal["element", "head"] | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Set `output_gate` in every attention layer."""

        def add(_: str, part: Any) -> Any:
            if not isinstance(part, Attention.Config):
                return None
            gate = part.output_gate or Linear.Config()
            return attrs.evolve(part, output_gate=gate, output_gate_per=self.per or part.output_gate_per)

        return edit_nodes(cfg, add, no_match=_no_match("output-gate", "output_gate"))


@node
class AttentionSinks(Feature):
    """Adds a trained sink to every head of every attention layer, as in gpt-oss.

    A sink is an extra logit in the softmax without a value, so that a head can attend to nothing (OpenAI, 2025, arXiv 2508.10925,
    section 2.2). New sinks begin at 0. Latent attention (`mla`) has no sinks, and ring attention (`context-parallel`) does not
    support them.
    """

    stage = "tune"
    excludes = ("context-parallel", "mla")

    def apply(self, cfg: Tree) -> Tree:
        """Set `sinks` in every attention layer."""

        def add(_: str, part: Any) -> Any:
            if not isinstance(part, Attention.Config):
                return None
            return attrs.evolve(part, sinks=part.sinks or Constant(value=0.0))

        return edit_nodes(cfg, add, no_match=_no_match("attention-sinks", "sinks"))


def _no_match(feature: str, slot: str) -> Problem:
    return Problem(
        path="model",
        message=f"{feature} finds no attention layer with a slot `{slot}`",
        expected="a layer of the type `attention`",
        fix=f"leave {feature} out",
    )
