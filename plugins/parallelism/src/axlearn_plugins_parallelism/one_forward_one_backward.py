"""Loss and gradients of a pipelined model, each microbatch taken backward as soon as its loss is known (1F1B).

M microbatches of b rows, S positions, D width, P stages. Differentiating a loop over the stages takes all microbatches
forward first, and keeps something of each. Here the gradients are computed by one loop over ticks. At each of them

1. what comes before the stack (the embedding) is computed for the microbatch that enters the first stage;
2. every stage takes a microbatch forward and keeps its input, [b, S, D], in one of `slots`;
3. what comes after the stack (norm, output layer, loss) is computed and differentiated for the one that leaves the last stage;
4. every stage takes an earlier microbatch backward, and computes its layers again from the input that it kept;
5. what comes before the stack is differentiated for the microbatch that leaves the first stage.

Nothing that is kept grows with M. The layers run twice forward, as they do with rematerialisation: keeping activations
instead would take `slots` times what a stage leaves for one microbatch. 1, 3 and 5 run outside of the stages, under the same
mesh rules as without a pipeline.
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
from axlearn_plugins_parallelism.loss_parts import LossParts, Pruned
from axlearn_plugins_parallelism.pipelined_stack import AXIS, Chunks, check_rows, stage_rules
from axlearn_plugins_parallelism.schedule import OneForwardOneBackward, Schedule

Tree = Any


def interleave_gradients(loss: Loss) -> Loss:
    """`loss` with the same value and gradients; on stages these are computed by the 1F1B schedule.

    The loss runs one `PipelinedStack` with `schedule: 1f1b`, once. Its microbatches count by `summaries["weight"]`.

    Raises (when it is differentiated):
        ConfigError: it does not, or the rows cannot be split into the microbatches.
    """

    @jax.custom_vjp
    def staged(params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> Any:
        return loss(params, variables, batch, key)

    def forward(params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> Any:
        stages = placement()
        assert stages is not None
        return _Gradients.of(stages, LossParts.of(loss, params, variables, batch, key)).compute()

    def backward(grads: Tree, cotangents: Any) -> Any:
        scale = cotangents[0]
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), None, None, None

    staged.defvjp(forward, backward)

    def interleaved(params: Tree, variables: Tree, batch: Tree, key: jax.Array | None) -> Any:
        stages = placement()
        has_stages = stages is not None and stages.mesh.shape.get(AXIS, 1) > 1
        return (staged if has_stages else loss)(params, variables, batch, key)

    return interleaved


class _Flow(NamedTuple):
    """What passes between stages and ticks.

    Attributes:
        received: [P, ...] of (x, (losses, summaries)) from the stage before: what its layers return, and the sums of what all
            layers so far report.
        returned: [P, ...] of (d x, d losses) from the stage after.
        inputs: [P, slots + 1, ...] of (x, variables): what each stage begins its microbatches with. The last place is for
            what nobody needs.
        variables: of the layers, after the microbatches so far: [layers, ...].
    """

    received: Tree
    returned: Tree
    inputs: Tree
    variables: Tree


class _Sums(NamedTuple):
    """What is summed over the microbatches.

    Attributes:
        value: the loss.
        summaries: by name.
        outer: index of a parameter -> its float32 gradient by what comes before and after the stack.
        layers: float32 gradients of the arrays of the layers.
    """

    value: jax.Array
    summaries: dict[str, Any]
    outer: dict[int, jax.Array]
    layers: list[jax.Array]


@attrs.frozen(eq=False)
class _Gradients:
    """The loop, while it is traced.

    Attributes:
        arrays: of the layers; `trained` says which of them have gradients.
        first: [b, S, D] of the first microbatch before the stack.
        reports: shapes of (losses, summaries) of the layers of a stage.
        scales: [M], the share of each microbatch in the loss.
    """

    place: Placement
    parts: LossParts
    plan: OneForwardOneBackward
    chunk: Chunks
    contexts: Tree
    pre: Pruned
    first: jax.Array
    variables: Tree
    reports: Tree = None
    post: Any = None
    scales: Any = None

    @classmethod
    def of(cls, stages: Placement, parts: LossParts) -> "_Gradients":
        """Traces what the loop is made of."""
        plan = OneForwardOneBackward(stages.mesh.shape[AXIS], parts.count)
        layers, pre = parts.layers(parts.leaves), parts.pre()
        first = pre.call(parts.leaves, jnp.int32(0))
        check_rows(stages, first.shape[0])
        chunk = Chunks.of(layers, Schedule(plan.stages, plan.microbatches))
        gradients = cls(stages, parts, plan, chunk, parts.contexts(), pre, first, layers.all_variables())
        reports = gradients._report_shapes()
        weights = parts.weights(first, reports)
        total = jnp.sum(weights)
        scales = weights / jnp.where(total == 0, jnp.ones_like(total), total)
        return attrs.evolve(gradients, reports=reports, post=parts.post(first, reports), scales=(scales, total))

    def compute(self) -> Any:
        """((loss, (summaries, variables)), gradients)."""
        carry = self._begin()
        for ticks, work in zip(self.plan.phases, ((True, False), (True, True), (False, True)), strict=True):
            steps = jnp.arange(ticks.start, ticks.stop, dtype=jnp.int32)
            carry, _ = lax.scan(lambda carry, tick, work=work: (self._tick(carry, tick, *work), None), carry, steps)
        flow, sums = carry
        summaries = dict(sums.summaries)
        if "weight" in summaries:
            summaries["weight"] = self.scales[1].astype(summaries["weight"].dtype)
        variables = self.parts.variables_after(self.first, self.reports, flow.variables)
        return (sums.value, (summaries, variables)), self._gradients_of_parameters(sums)

    def _begin(self) -> tuple[_Flow, _Sums]:
        stages, slots = self.plan.stages, self.plan.slots

        def of_stages(x: Any, *more: int) -> jax.Array:
            ones = (1,) * (1 + len(more))
            return jnp.broadcast_to(x.reshape(*ones, *x.shape), (stages, *more, *x.shape))

        # A stage without work computes on a real microbatch, not on zeros: what is thrown away is finite.
        zeros = jax.tree.map(lambda v: jnp.zeros((stages, *v.shape), v.dtype), self.reports)
        x = of_stages(self.first)
        buffers = jax.tree.map(
            lambda v: jnp.broadcast_to(
                v.reshape(stages, 1, -1, *v.shape[1:]), (stages, slots + 1, v.shape[0] // stages, *v.shape[1:])
            ),
            self.variables,
        )
        flow = _Flow((x, zeros), (x, zeros[0]), (of_stages(self.first, slots + 1), buffers), self.variables)
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
            slopes = jax.tree.map(lambda v: v[last], flow.returned)  # nobody needs them
        if backward:
            flow, layers, leaving = self._backward(flow, slopes, sums.layers, tick)
            sums = self._differentiate_pre(sums._replace(layers=layers), leaving[0], tick)
        return flow, sums

    def _forward(self, flow: _Flow, entering: jax.Array, tick: jax.Array) -> tuple[_Flow, Tree]:
        """One forward tick of all stages: (what is under way, [P, ...] of what each sends)."""
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
            (y, written), own = stage(x, _row(contexts, index), round, index, variables)
            variables = jax.tree.map(lambda a, b: jnp.where(valid, a.astype(b.dtype), b), written, variables)
            output = (y.astype(x.dtype), add_reports(reported, own))
            sent = jax.tree.map(lambda v: lax.ppermute(v, AXIS, ring), output)
            return *_stacked((sent, inputs)), variables, _stacked(output)

        run = self._on_stages(device, split=4, whole=3)
        received, inputs, variables, output = run(
            self.chunk.leaves, flow.received, flow.inputs, flow.variables, entering, self.contexts, tick
        )
        return flow._replace(received=received, inputs=inputs, variables=variables), output

    def _backward(self, flow: _Flow, slopes: Tree, sums: list[jax.Array], tick: jax.Array) -> Any:
        """One backward tick of all stages: (what is under way, gradients of the layers, [P, b, S, D] of slopes by the input)."""
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
                whole = list(leaves)
                for place, array in zip(trained, arrays, strict=True):
                    whole[place] = array
                (y, _), (losses, _) = self.parts.stack.stage(self.chunk, whole)(x, context, round, index, variables)
                return y.astype(x.dtype), losses

            _, pull = jax.vjp(layers, [leaves[i] for i in trained], x)
            grads, dx = pull((dy, losses))
            sums = [s + jnp.where(valid, g, 0).astype(s.dtype) for s, g in zip(sums, grads, strict=True)]
            dx = jnp.where(valid, dx, 0)
            sent = jax.tree.map(lambda v: lax.ppermute(v, AXIS, ring), (dx, losses))
            return _stacked(sent), sums, _stacked(dx)

        run = self._on_stages(device, split=4, whole=3)
        returned, sums, dx = run(self.chunk.leaves, flow.returned, flow.inputs, sums, slopes, self.contexts, tick)
        return flow._replace(returned=returned), sums, dx

    def _differentiate_post(self, sums: _Sums, index: jax.Array, output: Tree) -> tuple[_Sums, Tree]:
        """Adds a microbatch's loss and gradients; (d x, d losses) of what leaves the last stage."""
        x, (losses, reported) = output
        reported = map_plain(lambda v: v / self.plan.stages, reported)
        call, read = self.post.of_read(self.parts.leaves, index)
        value, pull, summaries = jax.vjp(
            lambda read, x, losses: call(read, x, losses, reported), read, x, losses, has_aux=True
        )
        scale, mean = self.scales[0][index], 1 / self.plan.microbatches
        grads, dx, _ = pull(scale.astype(value.dtype))
        # Losses of layers count equally for each microbatch, as without a schedule.
        _, _, slopes = pull(jnp.ones_like(value))
        own = sum(
            (s * v for s, v in zip(jax.tree.leaves(slopes), jax.tree.leaves(losses), strict=True)), jnp.float32(0)
        )
        shares = {name: mean if name in losses or name in reported else scale for name in summaries}
        counted = {name: map_plain(lambda v, share=shares[name]: share * v, v) for name, v in summaries.items()}
        added = add_reports(sums.summaries, counted)
        sums = sums._replace(value=sums.value + scale * (value - own) + mean * own, summaries=added)
        return self._add(sums, self.post, grads), (dx, jax.tree.map(lambda v: v * mean, slopes))

    def _differentiate_pre(self, sums: _Sums, dx: jax.Array, tick: jax.Array) -> _Sums:
        valid, index, _ = self.plan.backward(tick, 0)
        call, read = self.pre.of_read(self.parts.leaves, index)
        _, pull = jax.vjp(call, read)
        (grads,) = pull(dx)
        return self._add(sums, self.pre, [jnp.where(valid, g, 0) for g in grads])

    def _add(self, sums: _Sums, pruned: Pruned, grads: Sequence[jax.Array]) -> _Sums:
        outer = dict(sums.outer)
        for index, grad in zip(pruned.reads, grads, strict=True):
            outer[index] = outer[index] + grad.astype(jnp.float32)
        return sums._replace(outer=outer)

    def _gradients_of_parameters(self, sums: _Sums) -> Tree:
        """The gradients, in the structure and dtypes of the parameters."""
        leaves, trained = self.parts.leaves, self._trained

        def arrays(leaves: Sequence[jax.Array]) -> list[jax.Array]:
            chunk = Chunks.of(self.parts.layers(leaves), Schedule(self.plan.stages, self.plan.microbatches))
            return [chunk.leaves[i] for i in trained]

        own, pull = jax.vjp(arrays, leaves)
        (of_layers,) = pull([g.astype(x.dtype) for g, x in zip(sums.layers, own, strict=True)])
        grads = [(g + sums.outer[i].astype(g.dtype)) if i in sums.outer else g for i, g in enumerate(of_layers)]
        return self.parts.tree.unflatten(grads)

    def _report_shapes(self) -> Tree:
        def device(leaves: Any, variables: Any, x: Any, contexts: Any) -> Any:
            stage = self.parts.stack.stage(self.chunk, leaves)
            zero = jnp.int32(0)
            return _stacked(stage(x, _row(contexts, zero), zero, zero, variables)[1])

        run = self._on_stages(device, split=2, whole=2)
        shapes = jax.eval_shape(run, self.chunk.leaves, self.variables, self.first, self.contexts)
        return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), shapes)

    def _on_stages(self, function: Any, *, split: int, whole: int) -> Any:
        """`function` on the devices of each stage: its first `split` arguments have a leading axis of stages."""
        rules = stage_rules(self.place)

        def run(*args: Any) -> Any:
            with logical_rules(jax.sharding.get_abstract_mesh(), rules):  # type: ignore[arg-type]
                return function(*args)

        specs = (PartitionSpec(AXIS),) * split + (PartitionSpec(),) * whole
        return jax.shard_map(
            run, mesh=self.place.mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), axis_names={AXIS}, check_vma=False
        )


def _local(tree: Tree) -> Tree:
    return jax.tree.map(lambda v: v[0], tree)


def _stacked(tree: Tree) -> Tree:
    return jax.tree.map(lambda v: v[None], tree)


def _row(tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, index, keepdims=False), tree)
