"""Bringing tokens to their experts and back: without dropping any, or with room for a fixed number per expert.

B batch, S positions, D width, E experts, K experts per token, R assignments per row, C room per expert, F hidden size.
"""

import math
from typing import Literal, Protocol

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_core.nn import padding
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain, is_sharded
from axlearn_core.nn.summaries import Summary, add_summary
from axlearn_plugins_moe import sharded_experts
from axlearn_plugins_moe.exchange import exchanged
from axlearn_plugins_moe.experts import BatchedProduct, Experts, GroupedProduct, Product
from axlearn_plugins_moe.routing import Routing, of_tokens
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS, Activation


class Dispatch(Protocol):
    """Runs the experts on the tokens that are assigned to them. Built with nothing."""

    def __call__(self, x: jax.Array, routing: Routing, experts: Experts, activation: Activation) -> jax.Array:
        """[B, S, D] -> [B, S, D]: the weighted sum of the experts' outputs."""
        ...


def _hidden_rows(x: jax.Array, experts: Experts, activation: Activation, product: Product) -> jax.Array:
    """What goes into the down projection."""
    up = tag(experts.up.grouped(x, product), "mlp_up")
    if experts.gate is None:
        return tag(ACTIVATIONS[activation](up), "mlp_hidden")
    return tag(ACTIVATIONS[activation](tag(experts.gate.grouped(x, product), "mlp_gate")) * up, "mlp_hidden")


def _collect(y: jax.Array, token: jax.Array | None, length: int) -> jax.Array:
    """[B, R, D] of weighted outputs -> [B, S, D]: their sum for each token."""
    if token is None:
        return jnp.sum(y.reshape(y.shape[0], -1, length, y.shape[-1]), axis=1)
    empty = jnp.zeros((length, y.shape[-1]), y.dtype)
    return jax.vmap(lambda values, to: empty.at[to].add(values))(y, token)


def _spread(x: jax.Array, token: jax.Array | None, count: int) -> jax.Array:
    """[B, S, D] -> [B, R, D]: the token of each of R assignments."""
    if token is not None:
        return jnp.take_along_axis(x, token[..., None], axis=1)
    batch, length, width = x.shape
    return jnp.broadcast_to(x[:, None], (batch, count // length, length, width)).reshape(batch, count, width)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows of [M, D] in another order. Its derivative gathers too: that of an index would scatter."""
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


_permute.defvjp(
    lambda x, order, inverse: (_permute(x, order, inverse), (order, inverse)),
    lambda residuals, g: (_permute(g, residuals[1], residuals[0]), None, None),
)


def _share_dropped(fits: jax.Array, counted: jax.Array | None) -> Summary:
    """The share of the assignments [B, R] that do not fit, of those that are counted."""
    fits = fits.astype(jnp.float32)
    if counted is None:
        return Summary(1 - jnp.mean(fits), jnp.float32(fits.size), "mean", "assignments")
    weight = jnp.sum(counted, dtype=jnp.float32)
    return Summary(1 - padding.masked_mean(fits, counted), weight, "mean", "assignments")


class DroplessDispatch(Configurable):
    """Sorts the assignments by expert and multiplies groups of any size (Gale et al., 2022, "MegaBlocks").

    On several devices each holds its share of the experts (the logical axis `experts`): the tokens of the devices that
    share the experts among them are gathered, each device runs its own experts on them, and the sums are scattered back.
    Nothing is ever dropped; the price is that each of these devices has memory for the tokens of all of them. With
    `exchange="all-to-all"` each token goes to the devices of its own experts alone: less to send where those are fewer than
    the devices, for the same memory.
    """

    @node
    class Config(Configurable.Config["DroplessDispatch"]):
        """`kernel` names an implementation of the op `grouped_matmul`; None has the best one chosen.

        `exchange` is execution too: no token is dropped by either.
        """

        kernel: str | None = setting(default=None, kind="execution")
        exchange: Literal["all-gather", "all-to-all"] = setting(default="all-gather", kind="execution")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, x: jax.Array, routing: Routing, experts: Experts, activation: Activation) -> jax.Array:
        """[B, S, D] -> [B, S, D]."""

        def local(x: jax.Array, routing: Routing, experts: Experts, device: sharded_experts.Device) -> jax.Array:
            return self._local(x, routing, experts, activation, device)

        if is_sharded():
            return sharded_experts.over_devices(local, x, routing, experts, gathers=self.cfg.exchange == "all-gather")
        return local(x, routing, experts, sharded_experts.Device())

    def _local(
        self, x: jax.Array, routing: Routing, experts: Experts, activation: Activation, device: sharded_experts.Device
    ) -> jax.Array:
        """The part of the sum that the experts of a device give."""
        count, width = experts.num_experts, x.shape[-1]
        rows = _spread(x, routing.token, routing.expert.shape[1]).reshape(-1, width)
        expert = routing.expert.reshape(-1)

        def run(rows: jax.Array, expert: jax.Array) -> jax.Array:
            return self._grouped_rows(rows, expert, experts, activation, device)

        if device.exchange:
            y = exchanged(rows, expert, device.exchange, device.devices, count, run)
        else:
            y = run(rows, expert if device.first is None else expert - device.first)
        y = y.reshape(x.shape[0], -1, width) * routing.weight[..., None].astype(y.dtype)
        return _collect(y, routing.token, x.shape[1])

    def _grouped_rows(
        self,
        rows: jax.Array,
        expert: jax.Array,
        experts: Experts,
        activation: Activation,
        device: sharded_experts.Device,
    ) -> jax.Array:
        """[M, D] -> [M, D], each row by its expert; zero for the rows of experts that the device does not have."""
        count, is_local = experts.num_experts, None
        if device.first is not None or device.exchange:
            is_local = (expert >= 0) & (expert < count)
            expert = jnp.where(is_local, expert, count)  # behind all groups
            rows = jnp.where(is_local[:, None], rows, 0)
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        places = jnp.arange(order.size, dtype=jnp.int32)
        inverse = jnp.zeros_like(order).at[order].set(places, unique_indices=True, mode="promise_in_bounds")
        sizes = jnp.sum(jax.nn.one_hot(expert, count, dtype=jnp.int32), axis=0)

        product = GroupedProduct(sizes, self.cfg.kernel)
        hidden = _hidden_rows(_permute(rows, order, inverse), experts, activation, product)
        y = experts.down.grouped(hidden, attrs.evolve(product, adds=device.adds))
        y = _permute(y, inverse, order)
        return y if is_local is None else jnp.where(is_local[:, None], y, 0)


class CapacityDispatch(Configurable):
    """Each expert has room for a fixed number of tokens of a row; the rest are dropped (Lepikhin et al., 2020, "GShard").

    All first choices are served before any second choice, and earlier positions before later ones. What is dropped
    passes by the layer in the residual stream alone; its share is the summary `dropped_assignments`.
    """

    @node
    class Config(Configurable.Config["CapacityDispatch"]):
        """`capacity_factor` is the room over what an even load needs; at `num_experts / top_k` nothing can be dropped."""

        capacity_factor: float = setting(default=1.25, gt=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def capacity(self, length: int, assignments: int, num_experts: int) -> int:
        """How many of the `assignments` of a row of `length` tokens an expert takes."""
        needed = math.ceil(round(self.cfg.capacity_factor * assignments / num_experts, 6))
        return max(1, min(length, needed))  # a token chooses an expert once at most

    def __call__(self, x: jax.Array, routing: Routing, experts: Experts, activation: Activation) -> jax.Array:
        """[B, S, D] -> [B, S, D]."""
        (batch, length, width), count = x.shape, experts.num_experts
        expert, capacity = routing.expert, self.capacity(length, routing.expert.shape[1], count)
        order = jnp.argsort(expert, axis=1, stable=True).astype(jnp.int32)
        sizes = jnp.sum(jax.nn.one_hot(expert, count, dtype=jnp.int32), axis=1)  # [B, E]
        starts = jnp.cumsum(sizes, axis=1) - sizes
        position = jnp.argsort(order, axis=1).astype(jnp.int32) - jnp.take_along_axis(starts, expert, axis=1)
        fits = position < capacity
        add_summary("dropped_assignments", _share_dropped(fits, of_tokens(expert, length, routing.token)))

        place = jnp.arange(capacity, dtype=jnp.int32)[None, None]
        filled = (place < sizes[..., None]).reshape(batch, -1)  # [B, E * C]
        sorted_place = jnp.minimum(starts[..., None] + place, expert.shape[1] - 1).reshape(batch, -1)
        assignment = jnp.take_along_axis(order, sorted_place, axis=1)
        token = assignment % length
        if routing.token is not None:
            token = jnp.take_along_axis(routing.token, assignment, axis=1)
        rows = jnp.where(filled[..., None], jnp.take_along_axis(x, token[..., None], axis=1), 0)
        y = self._run(rows.reshape(batch, count, capacity, width), experts, activation)
        slot = jnp.where(fits, expert * capacity + position, 0)
        y = jnp.take_along_axis(y.reshape(batch, -1, width), slot[..., None], axis=1)
        weight = jnp.where(fits, routing.weight, 0)
        return _collect(y * weight[..., None].astype(y.dtype), routing.token, length)

    @staticmethod
    def _run(rows: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
        """[B, E, C, D] -> [B, E, C, D]: each expert on its rows."""

        def laid_out(x: jax.Array, last: str) -> jax.Array:
            # Experts first, so that they get their mesh axis and rows what is left: the exchange is an all-to-all.
            return constrain(x, "experts", "batch", None, last)

        product = BatchedProduct()
        rows = laid_out(jnp.swapaxes(rows, 0, 1), "activation_embed")
        hidden = laid_out(_hidden_rows(rows, experts, activation, product), "activation_mlp")
        y = laid_out(experts.down.grouped(hidden, product), "activation_embed")
        return constrain(jnp.swapaxes(y, 0, 1), "batch", None, None, "activation_embed")
