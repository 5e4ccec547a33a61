"""Loss and gradients of a pipelined model with the 1F1B schedule (one forward, one backward).

Shapes: M microbatches of b rows, S positions, D width, P stages. Differentiating a loop over the stages would run all forward
passes first, and save activations for every microbatch. Here, one loop over ticks computes the gradients. Each tick

1. runs the part before the stack (the embedding) for the microbatch that enters the first stage,
2. runs a forward pass on every stage, and saves the stage's input, [b, S, D], in one of `slots`,
3. runs and differentiates the part after the stack (norm, output layer, loss) for the microbatch that leaves the last stage,
4. runs the backward pass of an earlier microbatch on every stage, and recomputes the layers from the saved input,
5. differentiates the part before the stack for the microbatch that leaves the first stage.

Memory does not grow with M. The forward pass of the layers runs twice, as with rematerialization. Saving the activations
instead would need memory for the activations of `slots` microbatches. Steps 1, 3 and 5 run outside of the stages, under the
same mesh rules as without a pipeline.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from axlearn_core.contracts.parts import Loss
from axlearn_core.nn.sharding import Placement, logical_rules, placement
from axlearn_core.nn.summaries import add_reports, map_plain
from axlearn_plugins_parallelism.loss_parts import LossParts, PrunedFunction
from axlearn_plugins_parallelism.pipelined_stack import AXIS, LayerChunks, check_rows, stage_rules
from axlearn_plugins_parallelism.schedule import OneForwardOneBackward, Schedule

Tree = Any


def interleave_gradients(loss: Loss) -> Loss:
    """Return the same loss, with gradients that are computed on stages with the 1F1B schedule.

    The loss must run one `PipelinedStack` with `schedule: 1f1b` exactly once. `summaries["weight"]` weights its microbatches.

    Raises (when the loss is differentiated):
        ConfigError: The loss does not run one such stack, or the rows cannot be split into microbatches.
    """

    @jax.custom_vjp
    def pipelined_loss(params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> Any:
        return loss(params, variables, batch, key)

    def forward(params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> Any:
        stages = placement()
        assert stages is not None
        return _Gradients.from_parts(stages, LossParts.from_loss(loss, params, variables, batch, key)).compute()

    def backward(grads: Tree, cotangents: Any) -> Any:
        scale = cotangents[0]
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), None, None, None

    pipelined_loss.defvjp(forward, backward)

    def choose_loss(params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> Any:
        stages = placement()
        has_stages = stages is not None and stages.mesh.shape.get(AXIS, 1) > 1
        return (pipelined_loss if has_stages else loss)(params, variables, batch, key)

    return choose_loss


class _Flow(NamedTuple):
    """The values that are passed between stages and carried from tick to tick.

    Attributes:
        forward_inputs: (x, (losses, summaries)) from the previous stage, [P, ...]: the output of its layers, and the summed
            reports of all layers so far.
        backward_inputs: (dx, dlosses) from the next stage, [P, ...].
        inputs: (x, variables) with which each stage starts its microbatches, [P, slots + 1, ...]. The last slot is for discarded
            values.
        variables: Variables of the layers after the microbatches so far, [layers, ...].
    """

    forward_inputs: Tree
    backward_inputs: Tree
    inputs: Tree
    variables: Tree


class _Sums(NamedTuple):
    """Sums over the microbatches.

    Attributes:
        value: Loss.
        summaries: Name -> summary.
        outer: Index of a parameter -> its float32 gradient from the parts before and after the stack.
        layers: Float32 gradients of the layers' arrays.
    """

    value: jax.Array
    summaries: dict[str, Any]
    outer: dict[int, jax.Array]
    layers: list[jax.Array]


@attrs.frozen(eq=False)
class _Gradients:
    """Traces the loop over ticks that computes the gradients.

    Attributes:
        place: Mesh and mesh rules.
        parts: The loss, cut at its stack.
        plan: The schedule.
        chunk: The layers, split into stages.
        contexts: Context of the layers for each microbatch, [M, ...].
        pre: The part before the stack.
        first: Input of the stack for the first microbatch, [b, S, D].
        variables: Initial variables of the layers.
        reports: Shapes of (losses, summaries) of a stage's layers.
        post: The part after the stack.
        scales: Relative weight of each microbatch in the loss, [M], and the sum of the weights.
    """

    place: Placement
    parts: LossParts
    plan: OneForwardOneBackward
    chunk: LayerChunks
    contexts: Tree
    pre: PrunedFunction
    first: jax.Array
    variables: Tree
    reports: Tree = None
    post: Any = None
    scales: Any = None

    @classmethod
    def from_parts(cls, stages: Placement, parts: LossParts) -> "_Gradients":
        """Trace the parts of the loop."""
        plan = OneForwardOneBackward(stages.mesh.shape[AXIS], parts.count)
        layers, pre = parts.layers(parts.leaves), parts.pre()
        first = pre.call(parts.leaves, jnp.int32(0))
        check_rows(stages, first.shape[0])
        chunk = LayerChunks.from_layers(layers, Schedule(plan.stages, plan.microbatches))
        gradients = cls(stages, parts, plan, chunk, parts.contexts(), pre, first, layers.all_variables())
        reports = gradients._report_shapes()
        weights = parts.weights(first, reports)
        total = jnp.sum(weights)
        scales = weights / jnp.where(total == 0, jnp.ones_like(total), total)
        return attrs.evolve(gradients, reports=reports, post=parts.post(first, reports), scales=(scales, total))

    def compute(self) -> Any:
        """Return ((loss, (summaries, variables)), gradients)."""
        carry = self._begin()
        for ticks, work in zip(self.plan.phases, ((True, False), (True, True), (False, True)), strict=True):
            steps = jnp.arange(ticks.start, ticks.stop, dtype=jnp.int32)
            carry, _ = lax.scan(lambda carry, tick, work=work: (self._tick(carry, tick, *work), None), carry, steps)
        flow, sums = carry
        summaries = dict(sums.summaries)
        if "weight" in summaries:
            summaries["weight"] = self.scales[1].astype(summaries["weight"].dtype)
        variables = self.parts.variables_after(self.first, self.reports, flow.variables)
        return (sums.value, (summaries, variables)), self._parameter_gradients(sums)

    def _begin(self) -> tuple[_Flow, _Sums]:
        stages, slots = self.plan.stages, self.plan.slots

        def repeat(x: Any, *more: int) -> jax.Array:
            ones = (1,) * (1 + len(more))
            return jnp.broadcast_to(x.reshape(*ones, *x.shape), (stages, *more, *x.shape))

        # Idle stages compute on a real microbatch instead of zeros, so that discarded values are finite.
        zeros = jax.tree.map(lambda v: jnp.zeros((stages, *v.shape), v.dtype), self.reports)
        x = repeat(self.first)
        buffers = jax.tree.map(
            lambda v: jnp.broadcast_to(
                v.reshape(stages, 1, -1, *v.shape[1:]), (stages, slots + 1, v.shape[0] // stages, *v.shape[1:])
            ),
            self.variables,
        )
        flow = _Flow((x, zeros), (x, zeros[0]), (repeat(self.first, slots + 1), buffers), self.variables)
        index = jnp.int32(0)
        value, summaries = jax.eval_shape(self.post.call, self.parts.leaves, index, self.first, *self.reports)
        reads = sorted({*self.pre.reads, *self.post.reads})
        outer = {i: jnp.zeros(self.parts.leaves[i].shape, jnp.float32) for i in reads}
        layers = [jnp.zeros(self.chunk.leaves[i].shape, jnp.float32) for i in self._trained]
        scalar = lambda v: jnp.zeros(v.shape, jnp.float32)  # noqa: E731
        return flow, _Sums(scalar(value), jax.tree.map(scalar, dict(summaries)), outer, layers)

    @property
    def _trained(self) -> list[int]:
        return [i for i, leaf in enumerate(self.chunk.leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def _tick(self, carry: tuple[_Flow, _Sums], tick: jax.Array, forward: bool, backward: bool) -> tuple[_Flow, _Sums]:
        flow, sums = carry
        last, output = self.plan.stages - 1, None
        if forward:
            entering = self.pre.call(self.parts.leaves, self.plan.forward(tick, 0).microbatch)
            flow, output = self._forward(flow, entering, tick)
        if forward and backward:
            index = self.plan.forward(tick, last).microbatch
            sums, slopes = self._differentiate_post(sums, index, jax.tree.map(lambda v: v[last], output))
        else:
            slopes = jax.tree.map(lambda v: v[last], flow.backward_inputs)  # discarded
        if backward:
            flow, layers, leaving = self._backward(flow, slopes, sums.layers, tick)
            sums = self._differentiate_pre(sums._replace(layers=layers), leaving[0], tick)
        return flow, sums

    def _forward(self, flow: _Flow, entering: jax.Array, tick: jax.Array) -> tuple[_Flow, Tree]:
        """Run one forward tick on all stages. Return (new flow, outputs of the stages [P, ...])."""
        plan = self.plan
        ring = [(i, (i + 1) % plan.stages) for i in range(plan.stages)]

        def device(
            leaves: Any, received: Any, inputs: Any, variables: Any, entering: Any, contexts: Any, tick: Any
        ) -> Any:
            me = lax.axis_index(AXIS)
            valid, index, round = plan.forward(tick, me)
            (x, reported), inputs = _local((received, inputs))
            x = jnp.where(me == 0, entering, x)
            reported = jax.tree.map(lambda v: jnp.where(me == 0, 0, v), reported)
            place = jnp.where(valid, index % plan.slots, plan.slots)
            inputs = jax.tree.map(
                lambda all, one: lax.dynamic_update_index_in_dim(all, one, place, 0), inputs, (x, variables)
            )
            stage = self.parts.stack.stage(self.chunk, leaves)
            (y, updates), reports = stage(x, _row(contexts, index), round, index, variables)
            variables = jax.tree.map(lambda a, b: jnp.where(valid, a.astype(b.dtype), b), updates, variables)
            output = (y.astype(x.dtype), add_reports(reported, reports))
            sent = jax.tree.map(lambda v: lax.ppermute(v, AXIS, ring), output)
            return *_add_leading_axis((sent, inputs)), variables, _add_leading_axis(output)

        run = self._map_stages(device, split=4, replicated=3)
        received, inputs, variables, output = run(
            self.chunk.leaves, flow.forward_inputs, flow.inputs, flow.variables, entering, self.contexts, tick
        )
        return flow._replace(forward_inputs=received, inputs=inputs, variables=variables), output

    def _backward(self, flow: _Flow, slopes: Tree, sums: list[jax.Array], tick: jax.Array) -> Any:
        """Run one backward tick on all stages. Return (new flow, gradients of the layers, input gradients [P, b, S, D])."""
        plan, trained = self.plan, self._trained
        ring = [(i, (i - 1) % plan.stages) for i in range(plan.stages)]

        def device(leaves: Any, returned: Any, inputs: Any, sums: Any, slopes: Any, contexts: Any, tick: Any) -> Any:
            me = lax.axis_index(AXIS)
            valid, index, round = plan.backward(tick, me)
            returned, inputs = _local((returned, inputs))
            dy, losses = jax.tree.map(lambda a, b: jnp.where(me == plan.stages - 1, a, b), slopes, returned)
            x, variables = _row(inputs, index % plan.slots)
            context = _row(contexts, index)

            def layers(arrays: Sequence[jax.Array], x: jax.Array) -> Any:
                merged = list(leaves)
                for place, array in zip(trained, arrays, strict=True):
                    merged[place] = array
                (y, _), (losses, _) = self.parts.stack.stage(self.chunk, merged)(x, context, round, index, variables)
                return y.astype(x.dtype), losses

            _, pull = jax.vjp(layers, [leaves[i] for i in trained], x)
            grads, dx = pull((dy, losses))
            sums = [s + jnp.where(valid, g, 0).astype(s.dtype) for s, g in zip(sums, grads, strict=True)]
            dx = jnp.where(valid, dx, 0)
            sent = jax.tree.map(lambda v: lax.ppermute(v, AXIS, ring), (dx, losses))
            return _add_leading_axis(sent), sums, _add_leading_axis(dx)

        run = self._map_stages(device, split=4, replicated=3)
        returned, sums, dx = run(
            self.chunk.leaves, flow.backward_inputs, flow.inputs, sums, slopes, self.contexts, tick
        )
        return flow._replace(backward_inputs=returned), sums, dx

    def _differentiate_post(self, sums: _Sums, index: jax.Array, output: Tree) -> tuple[_Sums, Tree]:
        """Add a microbatch's loss and gradients. Return (new sums, (dx, dlosses) of the last stage's output)."""
        x, (losses, reported) = output
        reported = map_plain(lambda v: v / self.plan.stages, reported)
        call, read = self.post.bind(self.parts.leaves, index)
        value, pull, summaries = jax.vjp(
            lambda read, x, losses: call(read, x, losses, reported), read, x, losses, has_aux=True
        )
        scale, mean = self.scales[0][index], 1 / self.plan.microbatches
        grads, dx, _ = pull(scale.astype(value.dtype))
        # As without a schedule, the layers' losses have the same weight in each microbatch.
        _, _, slopes = pull(jnp.ones_like(value))
        layer_loss = sum(
            (s * v for s, v in zip(jax.tree.leaves(slopes), jax.tree.leaves(losses), strict=True)), jnp.float32(0)
        )
        shares = {name: mean if name in losses or name in reported else scale for name in summaries}
        counted = {name: map_plain(lambda v, share=shares[name]: share * v, v) for name, v in summaries.items()}
        added = add_reports(sums.summaries, counted)
        sums = sums._replace(value=sums.value + scale * (value - layer_loss) + mean * layer_loss, summaries=added)
        return self._add(sums, self.post, grads), (dx, jax.tree.map(lambda v: v * mean, slopes))

    def _differentiate_pre(self, sums: _Sums, dx: jax.Array, tick: jax.Array) -> _Sums:
        valid, index, _ = self.plan.backward(tick, 0)
        call, read = self.pre.bind(self.parts.leaves, index)
        _, pull = jax.vjp(call, read)
        (grads,) = pull(dx)
        return self._add(sums, self.pre, [jnp.where(valid, g, 0) for g in grads])

    def _add(self, sums: _Sums, pruned: PrunedFunction, grads: Sequence[jax.Array]) -> _Sums:
        outer = dict(sums.outer)
        for index, grad in zip(pruned.reads, grads, strict=True):
            outer[index] = outer[index] + grad.astype(jnp.float32)
        return sums._replace(outer=outer)

    def _parameter_gradients(self, sums: _Sums) -> Tree:
        """Return the gradients in the structure and dtypes of the parameters."""
        leaves, trained = self.parts.leaves, self._trained

        def arrays(leaves: Sequence[jax.Array]) -> list[jax.Array]:
            chunk = LayerChunks.from_layers(
                self.parts.layers(leaves), Schedule(self.plan.stages, self.plan.microbatches)
            )
            return [chunk.leaves[i] for i in trained]

        trained_arrays, pull = jax.vjp(arrays, leaves)
        (layer_grads,) = pull([g.astype(x.dtype) for g, x in zip(sums.layers, trained_arrays, strict=True)])
        grads = [(g + sums.outer[i].astype(g.dtype)) if i in sums.outer else g for i, g in enumerate(layer_grads)]
        return self.parts.tree.unflatten(grads)

    def _report_shapes(self) -> Tree:
        def device(leaves: Any, variables: Any, x: Any, contexts: Any) -> Any:
            stage = self.parts.stack.stage(self.chunk, leaves)
            zero = jnp.int32(0)
            return _add_leading_axis(stage(x, _row(contexts, zero), zero, zero, variables)[1])

        run = self._map_stages(device, split=2, replicated=2)
        shapes = jax.eval_shape(run, self.chunk.leaves, self.variables, self.first, self.contexts)
        return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), shapes)

    def _map_stages(self, function: Any, *, split: int, replicated: int) -> Any:
        """Map `function` over the stages. Its first `split` arguments have a leading axis of stages."""
        rules = stage_rules(self.place)

        def run(*args: Any) -> Any:
            with logical_rules(jax.sharding.get_abstract_mesh(), rules):  # type: ignore[arg-type]
                return function(*args)

        specs = (PartitionSpec(AXIS),) * split + (PartitionSpec(),) * replicated
        return jax.shard_map(
            run, mesh=self.place.mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), axis_names={AXIS}, check_vma=False
        )


def _local(tree: Tree) -> Tree:
    return jax.tree.map(lambda v: v[0], tree)


def _add_leading_axis(tree: Tree) -> Tree:
    return jax.tree.map(lambda v: v[None], tree)


def _row(tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, index, keepdims=False), tree)
