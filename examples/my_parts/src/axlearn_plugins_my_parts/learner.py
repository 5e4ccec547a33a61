"""The `sign-learner` component."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.extend import Batch, Configurable, Loss, global_norm, node, setting, value_and_grad


class SignLearner(Configurable):
    """Updates each parameter by a constant step against the sign of its gradient.

    Source: Bernstein et al., 2018.
    """

    @node
    class Config(Configurable.Config["SignLearner"]):
        """Settings for `SignLearner`.

        Attributes:
            learning_rate: Size of the step.
            accumulate_steps: Number of microbatches per step.
        """

        learning_rate: float = setting(default=1e-3, gt=0)
        accumulate_steps: int = setting(default=1, kind="microbatches", ge=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, params: Any) -> dict[str, jax.Array]:
        """Return the state: the number of updates."""
        return {"updates": jnp.zeros((), jnp.int32)}

    def value_and_grad(self, loss: Loss, params: Any, variables: Any, batch: Batch, key: jax.Array | None) -> Any:
        """Return the loss and gradients. See `axlearn_core.contracts.parts.Learner`."""
        return value_and_grad(loss, params, variables, batch, key, self.cfg.accumulate_steps)

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """Return the parameters, because the learner keeps no average."""
        return params

    def update(self, grads: Any, state: Any, params: Any, loss: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Update the parameters. Skip the update if the loss or a gradient is not finite."""
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)

        def move(param: jax.Array, grad: jax.Array) -> jax.Array:
            step = self.cfg.learning_rate * jnp.sign(grad)
            return jnp.where(finite, param - step.astype(param.dtype), param)

        updates = state["updates"] + finite.astype(jnp.int32)
        return jax.tree.map(move, params, grads), {"updates": updates}, {"grad_norm": norm, "skipped": ~finite}
