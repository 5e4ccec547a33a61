"""Cut a loss at its pipelined stack into pure functions of the parameters.

They are the part before the stack, the layers of the stack, and the part after the stack.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from axlearn_core.contracts.parts import Loss
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_parallelism.pipelined_stack import PipelinedStack, uneven_rows
from axlearn_plugins_parallelism.stack_call import StackCall, StackOutput, cut_at_stack
from axlearn_plugins_transformer.stack_layers import KindVariables, Layers

Tree = Any


class PrunedFunction(NamedTuple):
    """A traced function without dead operations.

    Attributes:
        call: The function. Its first argument is the list of parameters.
        reads: Indices of the parameters that it reads.
    """

    call: Callable[..., Any]
    reads: list[int]

    def bind(self, leaves: Sequence[jax.Array], *args: Any) -> tuple[Callable[..., Any], list[jax.Array]]:
        """Return (function of the parameters that it reads, those parameters). Other parameters and `args` become constants."""

        def call(read: Sequence[jax.Array], *more: Any) -> Any:
            merged = list(leaves)
            for index, leaf in zip(self.reads, read, strict=True):
                merged[index] = leaf
            return self.call(merged, *args, *more)

        return call, [leaves[i] for i in self.reads]


def prune(function: Callable[..., Any], leaves: Sequence[jax.Array], *args: Any) -> PrunedFunction:
    """Trace `function(leaves, *args)` once, and remove dead operations."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(list(leaves), *args)
    jaxpr, tree = closed.jaxpr, jax.tree.structure(shapes)
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if any(v in needed for v in equation.outvars):
            equations.append(equation)
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(eqns=equations[::-1]), closed.consts))

    def call(leaves: Sequence[jax.Array], *args: Any) -> Any:
        return tree.unflatten(run(*jax.tree.leaves((list(leaves), *args))))

    return PrunedFunction(call, [i for i, v in enumerate(jaxpr.invars[: len(leaves)]) if v in needed])


@attrs.frozen(eq=False)
class LossParts:
    """A loss on microbatches of b rows, cut at its stack.

    Attributes:
        loss: The loss.
        variables: Variables of the model.
        key: Random key for the step, or None.
        stack: The stack.
        leaves: List of parameters.
        tree: Tree structure of the parameters.
        batch: Batch, with each array as [M, b, ...].
    """

    loss: Loss
    variables: Tree
    key: jax.Array | None
    stack: PipelinedStack
    leaves: list[jax.Array]
    tree: Any
    batch: Tree

    @classmethod
    def from_loss(cls, loss: Loss, params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> "LossParts":
        """Cut a loss.

        Raises:
            ConfigError: The loss does not run one pipelined stack exactly once, the rows cannot be split evenly into the
                microbatches, or layers outside of the stack change variables.
        """
        calls: list[StackCall] = []

        def stack_input(params: Tree, variables: Tree, batch: Tree) -> Any:
            with cut_at_stack() as call:
                loss(params, variables, batch, key)
            calls.append(call)
            return call.x

        shape = jax.eval_shape(stack_input, params, variables, batch)
        stack = _only_stack(calls[-1])
        rows, count = shape.shape[0], stack.cfg.microbatches
        if rows % count:
            raise uneven_rows(count, rows)

        def split(x: jax.Array) -> jax.Array:
            if x.shape[0] != rows:  # a single row is shared by all rows
                return jnp.broadcast_to(x[None], (count, *x.shape))
            parts = jnp.swapaxes(x.reshape(rows // count, count, *x.shape[1:]), 0, 1)
            return constrain(parts, None, "batch", *[None] * (parts.ndim - 2))

        leaves, tree = jax.tree.flatten(params)
        parts = cls(loss, variables, key, stack, leaves, tree, jax.tree.map(split, batch))
        parts._check_variables()
        return parts

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return self.stack.cfg.microbatches

    def trace(self, leaves: Sequence[jax.Array], index: Any = 0, output: StackOutput | None = None) -> Any:
        """Trace the loss of a microbatch with a stack that returns `output`.

        Returns:
            (stack call, loss, summaries, variables).
        """
        part = jax.tree.map(lambda v: jax.lax.dynamic_index_in_dim(v, index, keepdims=False), self.batch)
        # Layers fold the index into their own keys. Random numbers outside of the stack need the index in the key.
        key = None if self.key is None else jax.random.fold_in(self.key, jnp.uint32(index))
        with cut_at_stack(output) as call:
            value, (summaries, variables) = self.loss(self.tree.unflatten(leaves), self.variables, part, key)
        return call, value, dict(summaries), variables

    def layers(self, leaves: Sequence[jax.Array]) -> Layers:
        """Return the layers of the stack, with the random streams of the step."""
        part = jax.tree.map(lambda v: v[0], self.batch)
        with cut_at_stack() as call:
            self.loss(self.tree.unflatten(leaves), self.variables, part, self.key)
        return call.layers

    def pre(self) -> PrunedFunction:
        """Return the part before the stack: (parameters, index) -> input of the stack, [b, S, D]."""
        return prune(lambda leaves, index: self.trace(leaves, index)[0].x, self.leaves, jnp.int32(0))

    def contexts(self) -> Tree:
        """Return the context of the layers for each microbatch, [M, ...] per array.

        Raises:
            ConfigError: The context contains floating-point arrays, which may have gradients.
        """
        context = prune(lambda leaves, index: self.trace(leaves, index)[0].context, self.leaves, jnp.int32(0))
        stacked = jax.lax.map(lambda index: context.call(self.leaves, index), jnp.arange(self.count, dtype=jnp.int32))
        if any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(stacked)):
            raise _cannot_cut("the layers' context has floating-point arrays, which may have gradients")
        return stacked

    def post(self, x: Any, reports: Any) -> PrunedFunction:
        """Return the part after the stack.

        It maps (parameters, index, output of the stack, its losses, its summaries) -> (loss, summaries of the loss).

        Args:
            x: Shape of the output.
            reports: Shapes of (losses, summaries) of the layers.
        """

        def post(leaves: Sequence[jax.Array], index: Any, x: jax.Array, losses: Tree, reported: Tree) -> Any:
            _, value, summaries, _ = self.trace(leaves, index, StackOutput(x, (losses, reported)))
            return value, summaries

        return prune(post, self.leaves, jnp.int32(0), x, *reports)

    def weights(self, x: Any, reports: Any) -> jax.Array:
        """Return the weight of each microbatch, float32 [M]. The arguments are the same as for `post`."""

        def weight(leaves: Sequence[jax.Array], index: Any) -> jax.Array:
            summaries = self.trace(leaves, index, _zero_output(x, reports))[2]
            return jnp.asarray(summaries.get("weight", 1.0), jnp.float32)

        pruned = prune(weight, self.leaves, jnp.int32(0))
        return jax.lax.map(lambda index: pruned.call(self.leaves, index), jnp.arange(self.count, dtype=jnp.int32))

    def variables_after(self, x: Any, reports: Any, updates: KindVariables) -> Tree:
        """Return the variables of the model after its layers wrote `updates`."""

        def after(leaves: Sequence[jax.Array], updates: KindVariables) -> Tree:
            return self.trace(leaves, 0, _zero_output(x, reports, updates))[3]

        return prune(after, self.leaves, updates).call(self.leaves, updates)

    def _check_variables(self) -> None:
        def after(variables: Tree) -> Tree:
            parts = attrs.evolve(self, variables=variables)
            return parts.trace(self.leaves)[3]

        closed, shapes = jax.make_jaxpr(after, return_shape=True)(self.variables)
        inputs = dict(zip(_paths(self.variables), closed.jaxpr.invars, strict=True))
        after_call = dict(zip(_paths(shapes), closed.jaxpr.outvars, strict=True))
        changed = [path for path, variable in after_call.items() if inputs.get(path) is not variable]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise _cannot_cut("layers outside of the stack change variables", f"{', '.join(changed[:3])}{more}")


def _zero_output(x: Any, reports: Any, updates: KindVariables | None = None) -> StackOutput:
    """Return zeros with these shapes, for results that do not depend on the stack's output."""
    x, reports = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), (x, reports))
    return StackOutput(x, reports, updates or {})


def _paths(tree: Tree) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


def _only_stack(call: StackCall) -> PipelinedStack:
    if call.count != 1:
        got = "no run of a stack" if not call.count else f"{call.count} runs of a stack"
        raise _cannot_cut("the loss must run one pipelined stack with `schedule: 1f1b` exactly once", got)
    return call.stack


def _cannot_cut(message: str, got: str | None = None) -> ConfigError:
    return ConfigError(
        Problem(
            path="learner.pipelined",
            message=f"1F1B cannot cut this loss: {message}",
            got=got,
            fix="pipeline:schedule=gpipe",
        )
    )
