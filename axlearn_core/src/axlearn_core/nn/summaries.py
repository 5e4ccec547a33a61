"""Auxiliary losses and summaries: any layer adds them, the root of the model collects them, no parent passes them up.

    add_loss("load_balance", value)                          # deep inside a layer
    add_summary("logit_max", maximum(logits))
    with collect() as collector: ...                         # at the root: collector.losses, collector.summaries

The stack of layers collects within each layer, because values may not leak out of a scan or a rematerialised function,
and adds what its layers reported to the collector outside. Losses are summed over the layers. A summary is combined as it
says itself (`Summary`); a plain scalar is averaged over the layers, and over microbatches and batches by their targets.

While held-out data is measured (`held_out`), the root finds no losses: each auxiliary loss is a summary there, so that a
model that adds what it collected to its loss measures its own scores alone.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.errors import RequestError
from axlearn_core.nn.summary import Summary, is_summary, maximum, mean_over_rows, mean_over_tokens, total

__all__ = [
    "Collector",
    "Report",
    "Summary",
    "add_layers",
    "add_loss",
    "add_reports",
    "add_summary",
    "collect",
    "held_out",
    "is_held_out",
    "is_summary",
    "map_plain",
    "maximum",
    "mean_over_rows",
    "mean_over_tokens",
    "sum_reports",
    "total",
    "values_of",
]  # fmt: skip

Values = dict[str, jax.Array]
Report = dict[str, Any]
"""Name -> float32 scalar or `Summary`."""


@attrs.define(eq=False)
class Collector:
    """What was added while it was in force: name -> float32 scalar, or `Summary`.

    Attributes:
        losses: what is added to the loss that is minimised.
        summaries: what is reported beside it.
        measures: whether losses are only reported.
    """

    losses: Values = attrs.field(factory=dict)
    summaries: Report = attrs.field(factory=dict)
    measures: bool = False


_in_force: contextvars.ContextVar[Collector | None] = contextvars.ContextVar("axlearn_collector", default=None)
_held_out: contextvars.ContextVar[bool] = contextvars.ContextVar("axlearn_held_out", default=False)


@contextlib.contextmanager
def held_out() -> Iterator[None]:
    """Within it, losses are those of held-out data: without any auxiliary term."""
    tokens = _held_out.set(True), _in_force.set(None)
    try:
        yield
    finally:
        _held_out.reset(tokens[0])
        _in_force.reset(tokens[1])


def is_held_out() -> bool:
    """Whether held-out data is measured: a model then leaves out what only regularises its training."""
    return _held_out.get()


@contextlib.contextmanager
def collect() -> Iterator[Collector]:
    """Puts a fresh collector in force."""
    collector = Collector(measures=is_held_out() and _in_force.get() is None)
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
        report: Report = collector.summaries if collector.measures else collector.losses
        report[name] = report[name] + value if name in report else value


def add_summary(name: str, value: jax.Array | Summary) -> None:
    """Reports a scalar, which is averaged, or a `Summary`. Nothing happens where nobody collects.

    Raises:
        RequestError: the name is taken, or the value is not a scalar.
    """
    collector = _in_force.get()
    if collector is not None:
        if name in collector.summaries:
            raise RequestError(f"two layers add the summary {name!r}; give each its own name")
        collector.summaries[name] = value if isinstance(value, Summary) else _scalar(name, value)


def add_layers(reports: Sequence[tuple[Values, Report]]) -> None:
    """Adds what the layers of a stack collected: (losses, summaries) of each, scalars or, from a scan, [repeats]."""
    kinds: Any = ((0, add_loss, jnp.sum), (1, add_summary, jnp.mean))
    for index, add, combine in kinds:
        for name in dict.fromkeys(name for report in reports for name in report[index]):
            values: list[Any] = [report[index][name] for report in reports if name in report[index]]
            joined = jax.tree.map(lambda *parts: jnp.concatenate([jnp.ravel(part) for part in parts]), *values)
            add(name, joined.reduced() if is_summary(joined) else combine(joined))


def values_of(report: Mapping[str, Any]) -> Values:
    """The scalars to log: name -> the value of each summary."""
    return {name: x.value if is_summary(x) else x for name, x in report.items()}


def add_reports(report: Any, other: Any) -> Any:
    """Trees of scalars and summaries, added; in a tree of zeros every summary is empty."""
    return jax.tree.map(lambda a, b: a.merged(b) if is_summary(a) else a + b, report, other, is_leaf=is_summary)


def sum_reports(reports: Any) -> Any:
    """`add_reports` along the leading axis of a tree [N]."""
    return jax.tree.map(lambda x: x.reduced() if is_summary(x) else jnp.sum(x, axis=0), reports, is_leaf=is_summary)


def map_plain(function: Callable[[jax.Array], jax.Array], report: Any) -> Any:
    """A tree of scalars and summaries with `function` of its plain scalars: a `Summary` has its weight with it."""
    return jax.tree.map(lambda x: x if is_summary(x) else function(x), report, is_leaf=is_summary)


def _scalar(name: str, value: jax.Array) -> jax.Array:
    if jnp.shape(value):
        raise RequestError(f"the loss or summary {name!r} has shape {jnp.shape(value)}; it has to be a scalar")
    return jnp.asarray(value, jnp.float32)
