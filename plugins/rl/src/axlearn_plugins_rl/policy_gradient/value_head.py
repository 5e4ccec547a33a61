"""Values from the hidden states of the policy."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax

from axlearn_core.config import Configurable, Node, node
from axlearn_plugins_finetune.objectives.scalar_head import ScalarHead


class ValueHead(Configurable, nnx.Module):
    """A linear map from the hidden states of the policy to values. It needs almost no memory."""

    @node
    class Config(Configurable.Config["ValueHead"]):
        """The gradient of the values.

        Attributes:
            detach: Stop the gradient of the values at the hidden states, so that it does not change the policy.
        """

        detach: bool = False

        @property
        def constant_terms(self) -> str | None:
            """See `axlearn_core.contracts.capabilities.HasConstantTerms`."""
            return "the hidden states" if self.detach else None

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        self.cfg = cfg
        self.head = ScalarHead(model, rngs=rngs, bias=True)

    def predict(self, hidden: jax.Array, inputs: Mapping[str, Any]) -> jax.Array:
        """See `policy_terms.ValueModel`."""
        return self.head(lax.stop_gradient(hidden) if self.cfg.detach else hidden)
