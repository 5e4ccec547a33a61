"""A learner that says in which dtype and memory its optimizer's state is kept, and by which schedule stages compute gradients."""

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
    """The shipped learner; what its optimizer keeps of each parameter is in a dtype and a memory of its own.

    Updates are computed as before: the state is read into the device's memory and into the dtype that the optimizer
    itself would keep it in, and stored again afterwards. Numbers that are not of a parameter (counters) stay as they are.
    """

    @node
    class Config(Learner.Config):
        """`state_dtype` is what moments are stored in, None what the optimizer wants; `offload` keeps them on the host, which is
        execution: they are computed with on the device. `pipelined` takes the gradients of a pipelined stack with
        `schedule: 1f1b` by that schedule, which is execution too.
        """

        computes_like = Learner.Config

        state_dtype: str | None = None
        offload: bool = setting(default=False, kind="execution")
        pipelined: bool = setting(default=False, kind="execution", hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """A dtype that there is not."""
            if self.state_dtype is not None and self.state_dtype not in DTYPES:
                yield Problem(
                    path="state_dtype",
                    message=f"{self.state_dtype!r} is not a dtype for optimizer state",
                    expected=f"one of {', '.join(DTYPES)}",
                    nearest=nearest(self.state_dtype, DTYPES),
                )

    cfg: Any

    def init(self, params: Any) -> LearnerState:
        """The state for a pytree of parameters; see `Learner.init`."""
        return self._store(super().init(params))

    def value_and_grad(self, loss: Loss, params: Any, variables: Any, batch: Any, key: jax.Array | None = None) -> Any:
        """`((mean loss, summaries, variables), grads)`; see `Learner.value_and_grad`."""
        if self.cfg.pipelined:
            from axlearn_plugins_parallelism.one_forward_one_backward import interleave_gradients

            loss = interleave_gradients(loss)
        return super().value_and_grad(loss, params, variables, batch, key)

    def update(
        self, grads: Any, state: LearnerState, params: Any, loss: jax.Array
    ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
        """(new params, new state, scalar summaries); see `Learner.update`."""
        like = jax.eval_shape(super().init, params).optimizer
        own = jax.tree.map(lambda x, spec: self._read(x, spec), state.optimizer, like)
        params, state, summaries = super().update(grads, state._replace(optimizer=own), params, loss)
        return params, self._store(state), summaries

    def place(self, places: LearnerState, state: LearnerState) -> LearnerState:
        """The shardings of the state, moments in the host's memory where they are offloaded."""
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

        def narrowed(x: Any) -> Any:
            return x.astype(dtype) if dtype and jnp.ndim(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

        return state._replace(optimizer=jax.tree.map(narrowed, state.optimizer))
