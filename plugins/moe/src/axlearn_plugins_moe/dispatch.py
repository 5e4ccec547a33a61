"""Dispatches: send tokens to their experts and combine the outputs.

`DroplessDispatch` keeps every token. `CapacityDispatch` drops tokens that exceed an expert's capacity.

B batch, S positions, D width, E experts, K experts per token, R assignments per row, C capacity per expert, F hidden size.
"""

import math
from typing import Literal, Protocol

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_core.config.roles import CompetingTokensRole
from axlearn_core.nn import padding
from axlearn_core.nn.sharding import constrain, is_sharded
from axlearn_core.nn.summaries import Summary, add_summary
from axlearn_plugins_moe import sharded_experts
from axlearn_plugins_moe.exchange import run_exchanged
from axlearn_plugins_moe.experts import BatchedProduct, Experts, GroupedProduct
from axlearn_plugins_moe.routing import Routing, assignment_mask
from axlearn_plugins_transformer.layer_roles import ExpertsKernelRole


class Dispatch(Protocol):
    """Runs the experts on the tokens that are assigned to them.

    It is built without arguments.
    """

    def __call__(self, x: jax.Array, routing: Routing, experts: Experts) -> jax.Array:
        """Return the sum of the experts' outputs, [B, S, D] -> [B, S, D].

        The routing weights multiply the outputs, or the inputs if `experts.weigh_inputs` is set.
        """
        ...


def _weigh(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply [B, R, D] by the weights [B, R]."""
    return rows * weight[..., None].astype(rows.dtype)


def _collect(y: jax.Array, token: jax.Array | None, length: int) -> jax.Array:
    """Sum the weighted outputs of each token: [B, R, D] -> [B, S, D]."""
    if token is None:
        return jnp.sum(y.reshape(y.shape[0], -1, length, y.shape[-1]), axis=1)
    empty = jnp.zeros((length, y.shape[-1]), y.dtype)
    return jax.vmap(lambda values, indices: empty.at[indices].add(values))(y, token)


def _spread(x: jax.Array, token: jax.Array | None, count: int) -> jax.Array:
    """Gather each assignment's token: [B, S, D] -> [B, R, D]."""
    if token is not None:
        return jnp.take_along_axis(x, token[..., None], axis=1)
    batch, length, width = x.shape
    return jnp.broadcast_to(x[:, None], (batch, count // length, length, width)).reshape(batch, count, width)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Permute the rows of [M, D].

    The gradient is a gather too; the gradient of plain indexing would be a scatter.
    """
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


_permute.defvjp(
    lambda x, order, inverse: (_permute(x, order, inverse), (order, inverse)),
    lambda residuals, g: (_permute(g, residuals[1], residuals[0]), None, None),
)


def _share_dropped(fits: jax.Array, counted: jax.Array | None) -> Summary:
    """Return the fraction of assignments [B, R] that were dropped, ignoring those that are not counted."""
    fits = fits.astype(jnp.float32)
    if counted is None:
        return Summary(1 - jnp.mean(fits), jnp.float32(fits.size), "mean", "assignments")
    weight = jnp.sum(counted, dtype=jnp.float32)
    return Summary(1 - padding.masked_mean(fits, counted), weight, "mean", "assignments")


class DroplessDispatch(Configurable):
    """Sorts assignments by expert and multiplies groups of any size.

    This is the approach of MegaBlocks (Gale et al., 2022). It never drops a token. On several devices, the experts are
    sharded over the logical `experts` axis. Each device gathers the tokens of all devices in its group, runs its own
    experts on them, and scatters the sums back. Each device therefore needs memory for the tokens of the whole group.

    With `exchange="all-to-all"`, each token is sent only to the devices of its own experts. This sends less data if
    a token has fewer experts than there are devices, but needs the same amount of memory.
    """

    @node
    class Config(Configurable.Config["DroplessDispatch"], ExpertsKernelRole):
        """Execution settings; they do not change which tokens the experts process.

        Attributes:
            kernel: Implementation of the `grouped_matmul` op. None selects the best one.
            exchange: Collective that moves tokens between devices.
        """

        kernel: str | None = setting(default=None, kind="execution")
        exchange: Literal["all-gather", "all-to-all"] = setting(default="all-gather", kind="execution")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, x: jax.Array, routing: Routing, experts: Experts) -> jax.Array:
        """Return the weighted sum of the experts' outputs: [B, S, D] -> [B, S, D]."""
        if is_sharded():
            gather = self.cfg.exchange == "all-gather"
            return sharded_experts.run_sharded(self._local, x, routing, experts, gather=gather)
        return self._local(x, routing, experts, sharded_experts.Device())

    def _local(self, x: jax.Array, routing: Routing, experts: Experts, device: sharded_experts.Device) -> jax.Array:
        """Return the partial sum of the experts on one device."""
        count, width = experts.num_experts, x.shape[-1]
        rows = _spread(x, routing.token, routing.expert.shape[1])
        rows = (_weigh(rows, routing.weight) if experts.weigh_inputs else rows).reshape(-1, width)
        expert = routing.expert.reshape(-1)

        def run(rows: jax.Array, expert: jax.Array) -> jax.Array:
            return self._grouped_rows(rows, expert, experts, device)

        if device.exchange:
            y = run_exchanged(rows, expert, device.exchange, device.devices, count, run)
        else:
            y = run(rows, expert if device.first is None else expert - device.first)
        y = y.reshape(x.shape[0], -1, width)
        return _collect(y if experts.weigh_inputs else _weigh(y, routing.weight), routing.token, x.shape[1])

    def _grouped_rows(
        self,
        rows: jax.Array,
        expert: jax.Array,
        experts: Experts,
        device: sharded_experts.Device,
    ) -> jax.Array:
        """Apply each row's expert to the row: [M, D] -> [M, D].

        Rows of experts on other devices are zero.
        """
        count, is_local = experts.num_experts, None
        if device.first is not None or device.exchange:
            is_local = (expert >= 0) & (expert < count)
            expert = jnp.where(is_local, expert, count)  # sorts after all groups
            rows = jnp.where(is_local[:, None], rows, 0)
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        places = jnp.arange(order.size, dtype=jnp.int32)
        inverse = jnp.zeros_like(order).at[order].set(places, unique_indices=True, mode="promise_in_bounds")
        sizes = jnp.sum(jax.nn.one_hot(expert, count, dtype=jnp.int32), axis=0)

        product = GroupedProduct(sizes, self.cfg.kernel, covers_rows=is_local is None)
        hidden = experts.hidden(_permute(rows, order, inverse), product)
        y = experts.down.grouped(hidden, attrs.evolve(product, adds_bias=device.adds_bias))
        y = _permute(y, inverse, order)
        return y if is_local is None else jnp.where(is_local[:, None], y, 0)


class CapacityDispatch(Configurable):
    """Gives each expert a fixed capacity per row and drops the remaining tokens.

    This is the approach of GShard (Lepikhin et al., 2020). First choices take precedence over second choices, and earlier positions
    over later ones. A dropped token skips the expert; only the residual stream carries it. The summary `dropped_assignments`
    reports the fraction of dropped assignments. Padding skips the experts, and the capacity is relative to the tokens of a row.
    """

    @node
    class Config(Configurable.Config["CapacityDispatch"], CompetingTokensRole):
        """Settings for the capacity.

        Attributes:
            capacity_factor: Capacity relative to an even load. With `num_experts / top_k`, nothing can be dropped.
        """

        capacity_factor: float = setting(default=1.25, gt=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def capacity(self, length: int, assignments: int, num_experts: int) -> int:
        """Return the number of assignments that each expert accepts from a row.

        Args:
            length: Tokens in the row.
            assignments: Assignments in the row.
            num_experts: Number of experts.
        """
        needed = math.ceil(round(self.cfg.capacity_factor * assignments / num_experts, 6))
        return max(1, min(length, needed))  # a token chooses an expert at most once

    def __call__(self, x: jax.Array, routing: Routing, experts: Experts) -> jax.Array:
        """Return the weighted sum of the experts' outputs: [B, S, D] -> [B, S, D]."""
        (batch, length, width), count = x.shape, experts.num_experts
        expert, counted = routing.expert, assignment_mask(routing.expert, length, routing.token)
        capacity = limit = self.capacity(length, expert.shape[1], count)
        if counted is not None:
            expert, limit = jnp.where(counted, expert, count), self._row_capacities(counted, length, count)
        order = jnp.argsort(expert, axis=1, stable=True).astype(jnp.int32)
        sizes = jnp.sum(jax.nn.one_hot(expert, count, dtype=jnp.int32), axis=1)  # [B, E]
        starts = jnp.cumsum(sizes, axis=1) - sizes
        first = jnp.take_along_axis(starts, jnp.minimum(expert, count - 1), axis=1)
        position = jnp.argsort(order, axis=1).astype(jnp.int32) - first
        fits = (position < limit) & (expert < count)  # the expert of padding is E, which sorts after all others
        add_summary("dropped_assignments", _share_dropped(fits, counted))

        place = jnp.arange(capacity, dtype=jnp.int32)[None, None]
        filled = (place < sizes[..., None]).reshape(batch, -1)  # [B, E * C]
        sorted_place = jnp.minimum(starts[..., None] + place, expert.shape[1] - 1).reshape(batch, -1)
        assignment = jnp.take_along_axis(order, sorted_place, axis=1)
        token = assignment % length
        if routing.token is not None:
            token = jnp.take_along_axis(routing.token, assignment, axis=1)
        rows = jnp.where(filled[..., None], jnp.take_along_axis(x, token[..., None], axis=1), 0)
        if experts.weigh_inputs:
            rows = _weigh(rows, jnp.take_along_axis(routing.weight, assignment, axis=1))
        y = self._run(rows.reshape(batch, count, capacity, width), experts)
        slot = jnp.where(fits, expert * capacity + position, 0)
        y = jnp.take_along_axis(y.reshape(batch, -1, width), slot[..., None], axis=1)
        weight = jnp.where(fits, 1.0 if experts.weigh_inputs else routing.weight, 0)
        return _collect(_weigh(y, weight), routing.token, length)

    def _row_capacities(self, counted: jax.Array, length: int, num_experts: int) -> jax.Array:
        """Return the capacity for the assignments of each row that are counted, bool [B, R] -> int32 [B, 1]."""
        assignments = counted.shape[1]
        capacities = [self.capacity(length, n, num_experts) for n in range(assignments + 1)]
        return jnp.asarray(capacities, jnp.int32)[jnp.sum(counted, axis=1, keepdims=True)]

    @staticmethod
    def _run(rows: jax.Array, experts: Experts) -> jax.Array:
        """Apply each expert to its rows: [B, E, C, D] -> [B, E, C, D]."""

        def constrain_rows(x: jax.Array, last: str) -> jax.Array:
            # Constrain the expert axis first. The batch gets the remaining mesh axes, so XLA emits an all-to-all.
            return constrain(x, "experts", "batch", None, last)

        product = BatchedProduct()
        rows = constrain_rows(jnp.swapaxes(rows, 0, 1), "activation_embed")
        hidden = constrain_rows(experts.hidden(rows, product), "activation_mlp")
        y = constrain_rows(experts.down.grouped(hidden, product), "activation_embed")
        return constrain(jnp.swapaxes(y, 0, 1), "batch", None, None, "activation_embed")
