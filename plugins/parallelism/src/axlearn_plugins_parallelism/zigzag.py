"""Distribute the positions of a sequence over devices so that causal attention is balanced.

The P devices of the axis start with consecutive parts of the sequence. Under a causal mask, the last device would have the most
work. Each part is therefore cut into two halves, and device d gets halves d and 2P - 1 - d out of 2P. This "zig-zag" order
balances the work of all devices (ring-flash-attention; Llama 3, Dubey et al., 2024, section 3.3.2).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Parts(NamedTuple):
    """The parts of a sequence on the devices along some mesh axes, inside a `shard_map`.

    Attributes:
        axes: Mesh axes, outermost first.
        devices: Number of devices along all these axes (P).
        size: Number of positions in a half, or in a part if parts are not cut.
        halves: 2, or 1 if a part has an odd length. With 1, no positions are exchanged.
    """

    axes: tuple[str, ...]
    devices: int
    size: int
    halves: int

    @classmethod
    def from_axes(cls, axes: Sequence[str], devices: int, length: int) -> "Parts":
        """Build the parts for `length` positions on each device."""
        halves = 1 if length % 2 else 2
        return cls(tuple(axes), devices, length // halves, halves)

    def start(self, device: Any) -> jax.Array:
        """Return the first slot of each half on a device after `spread`, int32 [halves]."""
        device = jnp.asarray(device, jnp.int32)
        order = [device] if self.halves == 1 else [device, 2 * self.devices - 1 - device]
        return jnp.stack(order) * self.size

    def spread(self, x: jax.Array) -> jax.Array:
        """Redistribute consecutive parts into zig-zag halves: [b, s, ...] -> [halves, b, size, ...]."""
        x = jnp.moveaxis(x.reshape(x.shape[0], self.halves, self.size, *x.shape[2:]), 1, 0)
        if self.halves == 1:
            return x
        first, second = (lax.ppermute(h, self.axes, self._route(i)) for i, h in enumerate((x[0], x[1])))
        even = self._is_even()
        return jnp.stack([jnp.where(even, first, second), jnp.where(even, second, first)])

    def gather(self, x: jax.Array) -> jax.Array:
        """Invert `spread`."""
        if self.halves == 2:
            even = self._is_even()
            halves = jnp.where(even, x[0], x[1]), jnp.where(even, x[1], x[0])
            routes = [[(target, source) for source, target in self._route(i)] for i in range(2)]
            x = jnp.stack([lax.ppermute(h, self.axes, r) for h, r in zip(halves, routes, strict=True)])
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def ring(self, x: Any) -> Any:
        """Send a tree of arrays to the next device."""
        route = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda v: lax.ppermute(v, self.axes, route), x)

    def _route(self, half: int) -> list[tuple[int, int]]:
        """Return the (source, target) devices of the first or second halves.

        An even device gets its earlier half from the first halves, and an odd device from the second halves.
        """
        numbers = [(d, 2 * d + half) for d in range(self.devices)]
        return [(d, n if n < self.devices else 2 * self.devices - 1 - n) for d, n in numbers]

    def _is_even(self) -> jax.Array:
        return lax.axis_index(self.axes) % 2 == 0
