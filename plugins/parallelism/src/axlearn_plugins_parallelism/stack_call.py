"""Cut a loss at its stack of layers into the parts before and after the stack.

The loss is an ordinary function that does not know about stages. While a `StackCall` is active, the stack records its arguments and
returns the given output instead of running layers.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import attrs
import jax

from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_plugins_transformer.stack_layers import KindVariables, Layers, write_variables


@attrs.frozen(eq=False)
class StackOutput:
    """The results of a stack.

    Attributes:
        x: Output, [b, S, D].
        reports: (losses, summaries). Each maps name -> scalar. Losses are summed over the layers, summaries are averaged.
        updates: Variables of all layers.
    """

    x: jax.Array
    reports: Any
    updates: KindVariables = attrs.field(factory=dict)


@attrs.define(eq=False)
class StackCall:
    """The stack calls in one trace of a loss.

    Attributes:
        output: Output that the stack returns. If None, the stack returns its input.
        count: Number of calls.
        stack: Stack of the latest call.
        layers, x, context: Arguments of the latest call.
    """

    output: StackOutput | None = None
    count: int = 0
    stack: Any = None
    layers: Any = None
    x: Any = None
    context: Any = None

    def answer(self, stack: Any, layers: Any, x: jax.Array, context: Context) -> jax.Array:
        """Record a stack call. Return the output, or the input if there is no output: [b, S, D]."""
        self.count += 1
        self.stack, self.layers, self.x, self.context = stack, Layers.from_module(layers), x, context
        if self.output is None:
            return x
        summaries.add_layers([self.output.reports])
        write_variables(layers, self.output.updates)
        return self.output.x


_active: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar("axlearn_stack_call", default=None)


def stack_call() -> StackCall | None:
    """Return the active `StackCall`, or None."""
    return _active.get()


@contextlib.contextmanager
def cut_at_stack(output: StackOutput | None = None) -> Iterator[StackCall]:
    """Activate a `StackCall`. Stacks that check `stack_call` record their calls and return `output`."""
    call = StackCall(output)
    token = _active.set(call)
    try:
        yield call
    finally:
        _active.reset(token)
