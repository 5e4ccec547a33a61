"""Auxiliary losses and summaries. Any layer can add them, and the root of the model collects them.

    add_loss("load_balance", value)                          # deep inside a layer
    add_summary("logit_max", maximum(logits))
    with collect() as collector: ...                         # at the root: collector.losses, collector.summaries

Traced values cannot leave a scan or a rematerialized function through a side effect. A stack therefore collects inside each
layer and adds the results to the outer collector. Losses are summed over layers. A `Summary` defines how it is combined. A
plain scalar is averaged: over layers with equal weights, and over microbatches and batches weighted by their number of
targets.

Several modules of a layer may add the same name, each in its own `module_scope`. The name then reports the combination of
their values, and each module's own value is reported below its path: `expert_load_max`, `feed_forward.expert_load_max`,
`feed_forward.shared.expert_load_max`.

During evaluation on held-out data (`held_out`), auxiliary losses are reported as summaries instead. A model that
adds the collected losses to its loss then evaluates with its own loss alone.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

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
    "get_scalars",
    "held_out",
    "is_held_out",
    "is_summary",
    "map_plain",
    "maximum",
    "mean_over_rows",
    "mean_over_tokens",
    "module_scope",
    "sum_reports",
    "total",
]  # fmt: skip

Values = dict[str, jax.Array]
Report = dict[str, Any]
"""Float32 scalars and `Summary` objects by name."""


@attrs.define(eq=False)
class Collector:
    """Collects losses and summaries while it is active.

    Attributes:
        losses: Float32 scalars by name, to add to the training loss.
        summaries: Float32 scalars and `Summary` objects by name.
        measures: If True, report losses as summaries.
        root: Module that contains the modules that report, or None.
        added: For each name that `add_summary` got, the module of the scope and the value of each call.
    """

    losses: Values = attrs.field(factory=dict)
    summaries: Report = attrs.field(factory=dict)
    measures: bool = False
    root: Any = None
    added: dict[str, list[tuple[Any, Any]]] = attrs.field(factory=dict)


_active: contextvars.ContextVar[Collector | None] = contextvars.ContextVar("axlearn_collector", default=None)
_scope: contextvars.ContextVar[Any] = contextvars.ContextVar("axlearn_module_scope", default=None)
_held_out: contextvars.ContextVar[bool] = contextvars.ContextVar("axlearn_held_out", default=False)


@contextlib.contextmanager
def held_out() -> Iterator[None]:
    """Evaluate on held-out data inside this context, without auxiliary loss terms."""
    tokens = _held_out.set(True), _active.set(None)
    try:
        yield
    finally:
        _held_out.reset(tokens[0])
        _active.reset(tokens[1])


def is_held_out() -> bool:
    """Return True during evaluation on held-out data. Models then omit regularization."""
    return _held_out.get()


@contextlib.contextmanager
def collect(root: Any = None) -> Iterator[Collector]:
    """Activate a new collector.

    Args:
        root: Module that contains the modules that report. Paths are relative to it. None if there are no paths.
    """
    collector = Collector(measures=is_held_out() and _active.get() is None, root=root)
    tokens = _active.set(collector), _scope.set(None)
    try:
        yield collector
    finally:
        _active.reset(tokens[0])
        _scope.reset(tokens[1])


@contextlib.contextmanager
def module_scope(module: Any) -> Iterator[None]:
    """Let the summaries that are added inside this context belong to a module, so that others may add the same names."""
    token = _scope.set(module)
    try:
        yield
    finally:
        _scope.reset(token)


def add_loss(name: str, value: jax.Array) -> None:
    """Add a scalar to the training loss. Values with the same name are summed. No-op without an active collector."""
    collector = _active.get()
    if collector is not None:
        value = _scalar(name, value)
        report: Report = collector.summaries if collector.measures else collector.losses
        report[name] = report[name] + value if name in report else value


def add_summary(name: str, value: jax.Array | Summary) -> None:
    """Report a `Summary`, or a scalar that is averaged. No-op without an active collector.

    If several modules add the same name, each in its `module_scope`, it reports the combination of their values, as over layers.
    Each value is also reported below the path of its module.

    Raises:
        RequestError: If one module or code without a scope adds a name again, the values cannot be combined, or a value is
            not a scalar.
    """
    collector = _active.get()
    if collector is None:
        return
    value = value if isinstance(value, Summary) else _scalar(name, value)
    added = collector.added.setdefault(name, [])
    added.append((_scope.get(), value))
    if len(added) == 1 and name not in collector.summaries:
        collector.summaries[name] = value
        return
    for module, part in added if len(added) == 2 else added[-1:]:
        path = _find_path(collector.root, module)
        if not path or f"{path}.{name}" in collector.summaries:
            raise RequestError(
                f"two layers add the summary {name!r}; give each a different name\n"
                "    fix: use different names, or add it inside `with module_scope(self)` in each of two modules"
            )
        collector.summaries[f"{path}.{name}"] = part
    parts = [part for _, part in added]
    if len({jax.tree.structure(part) for part in parts}) > 1:
        raise RequestError(
            f"the summary {name!r} has different kinds in two layers; give each a different name\n"
            f"    got: {' and '.join(sorted({str(p) if is_summary(p) else 'a plain scalar' for p in parts}))}"
        )
    collector.summaries[name] = _combine(parts, jnp.mean)


def _find_path(root: Any, module: Any) -> str:
    """Return the path of a module below the root, or an empty string if it is not below it."""
    if root is None or module is None:
        return ""
    return next((".".join(map(str, path)) for path, part in nnx.iter_modules(root) if part is module), "")


def _combine(values: Sequence[Any], combine: Callable[[jax.Array], jax.Array]) -> Any:
    """Combine summaries, or scalars with a function. Each value is a scalar or an array."""
    joined = jax.tree.map(lambda *parts: jnp.concatenate([jnp.ravel(part) for part in parts]), *values)
    return joined.reduced() if is_summary(joined) else combine(joined)


def add_layers(reports: Sequence[tuple[Values, Report]]) -> None:
    """Add the (losses, summaries) of each layer of a stack. Values are scalars, or arrays [repeats] from a scan."""
    kinds: Any = ((0, add_loss, jnp.sum), (1, add_summary, jnp.mean))
    for index, add, combine in kinds:
        for name in dict.fromkeys(name for report in reports for name in report[index]):
            values: list[Any] = [report[index][name] for report in reports if name in report[index]]
            add(name, _combine(values, combine))


def get_scalars(report: Mapping[str, Any]) -> Values:
    """Return the scalars to log by name."""
    return {name: x.value if is_summary(x) else x for name, x in report.items()}


def add_reports(report: Any, other: Any) -> Any:
    """Add two trees of scalars and summaries. In a tree of zeros, every summary is empty."""
    return jax.tree.map(lambda a, b: a.merged(b) if is_summary(a) else a + b, report, other, is_leaf=is_summary)


def sum_reports(reports: Any) -> Any:
    """Apply `add_reports` along the leading axis [N] of a tree."""
    return jax.tree.map(lambda x: x.reduced() if is_summary(x) else jnp.sum(x, axis=0), reports, is_leaf=is_summary)


def map_plain(function: Callable[[jax.Array], jax.Array], report: Any) -> Any:
    """Apply `function` to the plain scalars of a tree. Keep each `Summary`, which includes its weight."""
    return jax.tree.map(lambda x: x if is_summary(x) else function(x), report, is_leaf=is_summary)


def _scalar(name: str, value: jax.Array) -> jax.Array:
    if jnp.shape(value):
        raise RequestError(f"the loss or summary {name!r} has shape {jnp.shape(value)}; it must be a scalar")
    return jnp.asarray(value, jnp.float32)
