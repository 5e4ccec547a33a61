"""A loss cut at the stack of layers that it runs: what comes before the stack, and what comes after it.

The loss is a function of its own that knows nothing of stages. Traced with `StackCall` in force, its stack records what it
was called with, and returns what it is given instead of running layers.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import attrs
import jax

from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_plugins_transformer.stacked import Layers, Written, write_variables


@attrs.frozen(eq=False)
class StackOutput:
    """What a stack returns, reports and writes.

    Attributes:
        x: [b, S, D].
        reports: (losses, summaries): name -> scalar, summed over the layers and averaged over them.
        written: the variables of all layers.
    """

    x: jax.Array
    reports: Any
    written: Written = attrs.field(factory=dict)


@attrs.define(eq=False)
class StackCall:
    """The calls of a stack within one trace of a loss.

    Attributes:
        output: what the stack returns; None returns its input.
        count: how often it was called.
        stack: the newest one that was.
        layers, x, context: what it was called with.
    """

    output: StackOutput | None = None
    count: int = 0
    stack: Any = None
    layers: Any = None
    x: Any = None
    context: Any = None

    def answer(self, stack: Any, layers: Any, x: jax.Array, context: Context) -> jax.Array:
        """Records the call of a stack; what it returns: [b, S, D]."""
        self.count += 1
        self.stack, self.layers, self.x, self.context = stack, Layers.of(layers), x, context
        if self.output is None:
            return x
        summaries.add_layers([self.output.reports])
        write_variables(layers, self.output.written)
        return self.output.x


_in_force: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar("axlearn_stack_call", default=None)


def stack_call() -> StackCall | None:
    """The one in force."""
    return _in_force.get()


@contextlib.contextmanager
def cut_at_stack(output: StackOutput | None = None) -> Iterator[StackCall]:
    """Within it, stacks that ask `stack_call` record their calls and return `output`."""
    call = StackCall(output)
    token = _in_force.set(call)
    try:
        yield call
    finally:
        _in_force.reset(token)
