"""Which positions each device of a sequence axis has.

The P devices of the axis have consecutive parts of the sequence. Under a causal mask the last one would have most to do;
so each part is cut in two, and device d gets halves d and 2P - 1 - d of all 2P ("zig-zag", as in ring-flash-attention
and Llama 3; Dubey et al., 2024, section 3.3.2): then all have the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Parts(NamedTuple):
    """The parts of the sequence on the devices of some mesh axes, inside a `shard_map`.

    Attributes:
        axes: the mesh axes, outermost first.
        devices: P, of all these axes.
        size: positions of one half (of one part, where parts are not cut).
        halves: 2, or 1 where a part has an odd length: then nothing is exchanged.
    """

    axes: tuple[str, ...]
    devices: int
    size: int
    halves: int

    @classmethod
    def of(cls, axes: Sequence[str], devices: int, length: int) -> "Parts":
        """For `length` positions on each device."""
        halves = 1 if length % 2 else 2
        return cls(tuple(axes), devices, length // halves, halves)

    def start(self, device: Any) -> jax.Array:
        """int32 [halves]: the first slot of each half that a device has after `spread`."""
        device = jnp.asarray(device, jnp.int32)
        order = [device] if self.halves == 1 else [device, 2 * self.devices - 1 - device]
        return jnp.stack(order) * self.size

    def spread(self, x: jax.Array) -> jax.Array:
        """[b, s, ...] -> [halves, b, size, ...]: from consecutive parts to halves in zig-zag."""
        x = jnp.moveaxis(x.reshape(x.shape[0], self.halves, self.size, *x.shape[2:]), 1, 0)
        if self.halves == 1:
            return x
        first, second = (lax.ppermute(h, self.axes, self._route(i)) for i, h in enumerate((x[0], x[1])))
        even = self._is_even()
        return jnp.stack([jnp.where(even, first, second), jnp.where(even, second, first)])

    def gather(self, x: jax.Array) -> jax.Array:
        """The inverse of `spread`."""
        if self.halves == 2:
            even = self._is_even()
            halves = jnp.where(even, x[0], x[1]), jnp.where(even, x[1], x[0])
            back = [[(to, at) for at, to in self._route(i)] for i in range(2)]
            x = jnp.stack([lax.ppermute(h, self.axes, r) for h, r in zip(halves, back, strict=True)])
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def ring(self, x: Any) -> Any:
        """A tree of arrays, each sent to the next device."""
        around = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda v: lax.ppermute(v, self.axes, around), x)

    def _route(self, half: int) -> list[tuple[int, int]]:
        """(from, to) of the first or second halves; even ones end on even devices, whichever end they come from."""
        numbers = [(d, 2 * d + half) for d in range(self.devices)]
        return [(d, n if n < self.devices else 2 * self.devices - 1 - n) for d, n in numbers]

    def _is_even(self) -> jax.Array:
        return lax.axis_index(self.axes) % 2 == 0
