"""The optimizer of the biases that balance a router."""

import optax

from axlearn_core.config import Node, node, setting
from axlearn_core.learn.optimizers import Optimizer


@node
class SignDescent(Node[Optimizer]):
    """A step of fixed size against the sign of the gradient; it keeps no state.

    Attributes:
        rate: the size of the step. 1e-3 is the bias update speed of DeepSeek-V3 (arXiv 2412.19437, section 4.2).
    """

    rate: float = setting(default=1e-3, gt=0)

    def build(self, **_: object) -> Optimizer:
        """The transformation."""
        return optax.chain(optax.scale_by_sign(), optax.scale(-self.rate))
