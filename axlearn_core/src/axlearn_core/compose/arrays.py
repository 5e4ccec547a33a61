"""Compiles functions of arrays that belong to no experiment: conversions of weights, pieces of checkpoints."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def array_function(*, static: Sequence[int] = (), donate: Sequence[int] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a pure function of arrays to be compiled for the devices of its arguments.

    What a model computes is not among these: an experiment declares it as a `Function`, which its program compiles
    under its mesh, rules and kernels.

    Args:
        static: positions of the arguments that are not arrays; hashable.
        donate: positions of the arguments whose buffers the result takes over.
    """
    return lambda call: jax.jit(call, static_argnums=tuple(static), donate_argnums=tuple(donate))
