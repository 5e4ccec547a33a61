"""Auxiliary losses and summaries: any layer adds them, the root of the model collects them, no parent passes them up.

    add_loss("load_balance", value)          # deep inside a layer
    with collect() as found: ...             # at the root: found.losses, found.summaries

The stack of layers collects within each layer, because values may not leak out of a scan or a rematerialised function,
and adds what its layers reported to the collector outside: losses are summed over the layers, summaries averaged.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.errors import RequestError

Values = dict[str, jax.Array]


@attrs.define(eq=False)
class Collector:
    """What was added while it was in force: name -> float32 scalar."""

    losses: Values = attrs.field(factory=dict)
    summaries: Values = attrs.field(factory=dict)


_in_force: contextvars.ContextVar[Collector | None] = contextvars.ContextVar("axlearn_collector", default=None)


@contextlib.contextmanager
def collect() -> Iterator[Collector]:
    """Puts a fresh collector in force."""
    collector = Collector()
    token = _in_force.set(collector)
    try:
        yield collector
    finally:
        _in_force.reset(token)


def add_loss(name: str, value: jax.Array) -> None:
    """Adds a scalar to the loss that is minimised. Values of one name add up. Nothing happens where nobody collects."""
    collector = _in_force.get()
    if collector is not None:
        value = _scalar(name, value)
        collector.losses[name] = collector.losses[name] + value if name in collector.losses else value


def add_summary(name: str, value: jax.Array) -> None:
    """Reports a scalar; in a stack of layers, the mean over the layers. Nothing happens where nobody collects.

    Raises:
        RequestError: the name is taken.
    """
    collector = _in_force.get()
    if collector is not None:
        if name in collector.summaries:
            raise RequestError(f"two layers add the summary {name!r}; give each its own name")
        collector.summaries[name] = _scalar(name, value)


def add_layers(reports: Sequence[tuple[Values, Values]]) -> None:
    """Adds what the layers of a stack collected: (losses, summaries) of each, scalars or, from a scan, [repeats]."""
    for index, add, combine in ((0, add_loss, jnp.sum), (1, add_summary, jnp.mean)):
        for name in dict.fromkeys(name for report in reports for name in report[index]):
            add(name, combine(jnp.concatenate([jnp.ravel(r[index][name]) for r in reports if name in r[index]])))


def _scalar(name: str, value: jax.Array) -> jax.Array:
    if jnp.shape(value):
        raise RequestError(f"the loss or summary {name!r} has shape {jnp.shape(value)}; it has to be a scalar")
    return jnp.asarray(value, jnp.float32)
