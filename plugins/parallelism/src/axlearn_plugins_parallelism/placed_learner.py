"""A learner with options for the dtype and memory of the optimizer state, and for 1F1B gradients."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Loss
from axlearn_core.errors import Problem, nearest
from axlearn_core.learn.learner import Learner, LearnerState

HOST = "pinned_host"
DTYPES = ("float32", "bfloat16", "float16")


class PlacedLearner(Learner):
    """A `Learner` that can store the optimizer's moments in a different dtype or in host memory.

    Updates do not change: the state is loaded onto the device and cast to the optimizer's usual dtype, and stored again afterwards.
    Scalars such as counters keep their dtype and location.
    """

    @node
    class Config(Learner.Config):
        """Config of a `PlacedLearner`.

        Attributes:
            state_dtype: Storage dtype of the moments. None keeps the optimizer's dtype.
            offload: Whether to keep the moments in host memory. Affects execution only, as updates run on the device.
            pipelined: Whether to use the 1F1B schedule for gradients if the model has a pipelined stack with `schedule: 1f1b`.
                Affects execution only.
        """

        computes_like = Learner.Config

        state_dtype: str | None = None
        offload: bool = setting(default=False, kind="execution")
        pipelined: bool = setting(default=False, kind="execution", hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Report an unknown dtype."""
            if self.state_dtype is not None and self.state_dtype not in DTYPES:
                yield Problem(
                    path="state_dtype",
                    message=f"{self.state_dtype!r} is not a dtype for optimizer state",
                    expected=f"one of {', '.join(DTYPES)}",
                    nearest=nearest(self.state_dtype, DTYPES),
                )

    cfg: Any

    def init(self, params: Any) -> LearnerState:
        """Return the state for a pytree of parameters. See `Learner.init`."""
        return self._store(super().init(params))

    def value_and_grad(self, loss: Loss, params: Any, variables: Any, batch: Any, key: jax.Array | None = None) -> Any:
        """Return `((mean loss, summaries, variables), grads)`. See `Learner.value_and_grad`."""
        if self.cfg.pipelined:
            from axlearn_plugins_parallelism.one_forward_one_backward import interleave_gradients

            loss = interleave_gradients(loss)
        return super().value_and_grad(loss, params, variables, batch, key)

    def update(
        self, grads: Any, state: LearnerState, params: Any, loss: jax.Array
    ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
        """Return (new params, new state, scalar summaries). See `Learner.update`."""
        specs = jax.eval_shape(super().init, params).optimizer
        optimizer = jax.tree.map(lambda x, spec: self._read(x, spec), state.optimizer, specs)
        params, state, summaries = super().update(grads, state._replace(optimizer=optimizer), params, loss)
        return params, self._store(state), summaries

    def place(self, places: LearnerState, state: LearnerState) -> LearnerState:
        """Return the shardings of the state, with host memory for the moments if they are offloaded."""
        if not self.cfg.offload:
            return places
        optimizer = jax.tree.map(
            lambda place, x: place.with_memory_kind(HOST) if x.ndim else place, places.optimizer, state.optimizer
        )
        return places._replace(optimizer=optimizer)

    def _read(self, x: jax.Array, spec: Any) -> jax.Array:
        if self.cfg.offload and x.ndim:
            x = jax.device_put(x, jax.memory.Space.Device)
        return x.astype(spec.dtype)

    def _store(self, state: LearnerState) -> LearnerState:
        dtype = self.cfg.state_dtype

        def cast(x: Any) -> Any:
            return x.astype(dtype) if dtype and jnp.ndim(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

        return state._replace(optimizer=jax.tree.map(cast, state.optimizer))
