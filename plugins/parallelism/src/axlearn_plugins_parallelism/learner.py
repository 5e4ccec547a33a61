"""A learner that says in which dtype and in which memory the state of its optimizer is kept."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.config import node, setting
from axlearn_core.errors import Problem, nearest
from axlearn_core.learn.learner import Learner, LearnerState

HOST = "pinned_host"
DTYPES = ("float32", "bfloat16", "float16")


class PlacedLearner(Learner):
    """The shipped learner; what its optimizer keeps of each parameter is in a dtype and a memory of its own.

    Updates are computed as before: the state is read into the device's memory and into the dtype that the optimizer
    itself would keep it in, and stored again afterwards. Numbers that are not of a parameter (counters) stay as they are.
    """

    @node
    class Config(Learner.Config):
        """`state_dtype` is what moments are stored in, None what the optimizer wants; `offload` keeps them on the host, which is
        execution: they are computed with on the device.
        """

        computes_like = Learner.Config

        state_dtype: str | None = None
        offload: bool = setting(default=False, kind="execution")

        def validate(self) -> Iterable[Problem]:
            """A dtype that there is not."""
            if self.state_dtype is not None and self.state_dtype not in DTYPES:
                yield Problem(
                    path="state_dtype",
                    message=f"{self.state_dtype!r} is no dtype of an optimizer's state",
                    expected=f"one of {', '.join(DTYPES)}",
                    nearest=nearest(self.state_dtype, DTYPES),
                )

    cfg: Any

    def init(self, params: Any) -> LearnerState:
        """The state for a pytree of parameters; see `Learner.init`."""
        return self._stored(super().init(params))

    def update(
        self, grads: Any, state: LearnerState, params: Any, loss: jax.Array
    ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
        """(new params, new state, scalar summaries); see `Learner.update`."""
        like = jax.eval_shape(super().init, params).optimizer
        own = jax.tree.map(lambda x, spec: self._read(x, spec), state.optimizer, like)
        params, state, told = super().update(grads, state._replace(optimizer=own), params, loss)
        return params, self._stored(state), told

    def place(self, places: LearnerState, state: LearnerState) -> LearnerState:
        """The shardings of the state, moments in the host's memory where they are offloaded."""
        if not self.cfg.offload:
            return places
        kept = jax.tree.map(
            lambda place, x: place.with_memory_kind(HOST) if x.ndim else place, places.optimizer, state.optimizer
        )
        return places._replace(optimizer=kept)

    def _read(self, x: jax.Array, spec: Any) -> jax.Array:
        if self.cfg.offload and x.ndim:
            x = jax.device_put(x, jax.memory.Space.Device)
        return x.astype(spec.dtype)

    def _stored(self, state: LearnerState) -> LearnerState:
        dtype = self.cfg.state_dtype

        def narrowed(x: Any) -> Any:
            return x.astype(dtype) if dtype and jnp.ndim(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

        return state._replace(optimizer=jax.tree.map(narrowed, state.optimizer))
