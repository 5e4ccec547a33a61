"""A stack of layers that is sharded over the `pipeline` mesh axis, with microbatches that pass from stage to stage.

Shapes: M microbatches of b rows each, S positions, D width, P stages, R rounds (chunks of layers per stage).

Every device of a stage runs the same program on its own chunk of layers. This is a `shard_map` over the `pipeline` axis only.
The compiler handles all other axes, so layers have the same sharding as without a pipeline. The gradients come from
differentiating the loop, so the backward pass runs the ticks in reverse.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from axlearn_core.config import REQUIRED, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn import randomness, summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import Placement, constrain, logical_rules, placement
from axlearn_plugins_parallelism.schedule import Schedule
from axlearn_plugins_parallelism.stack_call import stack_call
from axlearn_plugins_transformer.stack import Stack
from axlearn_plugins_transformer.stack_layers import KindVariables, Layers, write_variables

AXIS = "pipeline"
RESIDUAL = ("batch", "residual_sequence", "activation_embed")


class PipelinedStack(Stack):
    """A `Stack` that runs layers in stages over the `pipeline` mesh axis. Parameters and checkpoints are the same as `Stack`'s.

    The batch is split into microbatches on every mesh, even with a single stage. Values that depend on the grouping of rows,
    such as the experts' load-balance loss, therefore do not depend on the mesh. Losses and plain summaries of layers are means
    over the microbatches. With a cache (for decoding) it runs as a plain stack.
    """

    @node
    class Config(Stack.Config):
        """Config of the schedule.

        The schedule affects only execution, because each microbatch passes through the same layers.

        Attributes:
            microbatches: Number of microbatches per batch. Rows k, k + M, ... form microbatch k.
            schedule: `gpipe`, `interleaved` (each stage has `rounds` chunks of layers) or `1f1b`. With `1f1b`, a learner with
                `pipelined=True` runs the backward pass of each microbatch as soon as its loss is known. Functions without
                gradients, such as evaluation, run as with `gpipe`.
            rounds: Chunks of layers per stage, for the `interleaved` schedule.
        """

        computes_like = Stack.Config

        microbatches: int = setting(default=REQUIRED, kind="microbatches", ge=1)
        schedule: Literal["gpipe", "interleaved", "1f1b"] = setting(default="gpipe", kind="execution")
        rounds: int = setting(default=2, kind="execution", ge=2)

    cfg: Any

    def __init__(self, cfg: Config):
        super().__init__(cfg)

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Run the layers in order: [B, S, D] -> [B, S, D].

        Raises:
            ConfigError: The layers, rows or microbatches cannot be split for the schedule.
        """
        place, count = placement(), self.cfg.microbatches
        stages = place.mesh.shape[AXIS] if place is not None else 1
        if cache is not None or isinstance(layers, nnx.List):
            return super().__call__(layers, x, context, cache)
        if context.shared:
            raise _incompatible(
                "microbatches",
                "a pipeline does not pass on what the model shares with its layers",
                _names(context.shared),
            )
        if self.cfg.schedule == "1f1b" and (call := stack_call()) is not None:
            if context.layer_inputs:
                raise _incompatible(
                    "schedule", "1f1b does not differentiate inputs of layers", _names(context.layer_inputs)
                )
            return call.answer(self, layers, x, context), None
        if x.shape[0] % count:
            if place is None or stages == 1:  # for example a single row, to inspect its logits
                return super().__call__(layers, x, context)
            raise uneven_rows(count, x.shape[0])
        parts, rejoin = _microbatches((x, context), x.shape[0], count)
        stacked = Layers.from_module(layers)
        if place is None or stages == 1:
            y, reports, updates = _run_sequentially(super().run, stacked, parts, count)
        else:
            y, reports, updates = self._run_stages(place, stacked, parts)
        summaries.add_layers([reports])
        write_variables(layers, updates)
        return rejoin(y), None

    def _run_stages(self, place: Placement, layers: Layers, parts: Any) -> tuple[jax.Array, Any, KindVariables]:
        cfg, stages = self.cfg, place.mesh.shape[AXIS]
        plan = Schedule(stages, cfg.microbatches, cfg.rounds if cfg.schedule == "interleaved" else 1)
        chunk = LayerChunks.from_layers(layers, plan)
        if plan.rounds > 1 and plan.microbatches % stages:
            got = f"{plan.microbatches} microbatches for {stages} stages"
            raise _incompatible("microbatches", "an interleaved schedule needs a multiple of the number of stages", got)
        check_rows(place, parts[0].shape[1])
        rules = stage_rules(place)

        def run(leaves: Sequence[jax.Array], x: jax.Array, context: Any) -> Any:
            with logical_rules(jax.sharding.get_abstract_mesh(), rules):  # type: ignore[arg-type]
                return _ticks(plan, self.stage(chunk, leaves), chunk.variables(leaves), x[0], context)

        split, whole = PartitionSpec(AXIS), PartitionSpec()
        mapped = jax.shard_map(
            run, mesh=place.mesh, in_specs=(split, split, whole), out_specs=split, axis_names={AXIS}, check_vma=False
        )
        # One copy of the inputs per stage, so that their gradients are summed outside of the shard_map: XLA:CPU cannot compile a
        # bfloat16 sum over a manual axis if other axes are automatic.
        x, context = parts
        x = jnp.broadcast_to(x[None], (stages, *x.shape))
        y, reports, updates = mapped(chunk.leaves, x, context)
        # [P, M, ...]: the last stage has the outputs, and each stage has the reports of its own layers.
        losses, layer_summaries = summaries.map_plain(lambda v: v / plan.microbatches, reports)
        reports = losses, summaries.map_plain(lambda v: v / plan.rounds, layer_summaries)
        return y[-1], reports, jax.tree.map(chunk.rejoin, updates)

    def stage(self, chunk: "LayerChunks", leaves: Sequence[jax.Array]) -> Callable[..., Any]:
        """Return a function that runs this device's chunk of layers for one round.

        The function maps (x, context, round, microbatch, variables) -> ((y, variables), reports).
        """
        if chunk.rounds == 1:

            def stage(
                x: jax.Array, context: Context, round: jax.Array, index: jax.Array, variables: KindVariables
            ) -> Any:
                layers = chunk.layers(leaves, index).replace_variables(variables)
                y, updates = _run_chunk(functools.partial(Stack.run, self), layers, x, context, round)
                return y, _update_variables(variables, updates)

            return _with_reports(stage)
        # The layers of the round are sliced inside the rematerialized function. As inputs of the function, they would be saved for
        # each tick. Without `remat`, all tagged activations are saved.
        plain = Stack.Config(mode=self.cfg.mode).build()
        local = [leaf[0] for leaf in leaves]

        def run_round(
            x: jax.Array, context: Context, round: jax.Array, index: jax.Array, variables: KindVariables
        ) -> Any:
            def row(leaf: jax.Array) -> jax.Array:
                return lax.dynamic_index_in_dim(leaf, round, keepdims=False)

            values = jax.tree.map(row, variables)
            layers = chunk.layers([row(leaf) for leaf in local], index).replace_variables(values)
            y, updates = _run_chunk(plain.run, layers, x, context, round)
            put = lambda all, one: lax.dynamic_update_index_in_dim(all, one.astype(all.dtype), round, 0)  # noqa: E731
            return y, jax.tree.map(put, variables, _update_variables(values, updates))

        remat = (self.cfg.remat or _SaveTagged.Config()).build()
        wrapped = remat.wrap(_with_reports(run_round), in_loop=True)

        def run_and_check(*args: Any) -> Any:
            result = wrapped(*args)
            remat.check()
            return result

        return run_and_check


def _run_chunk(
    run: Callable[..., Any], layers: Layers, x: jax.Array, context: Context, round: jax.Array
) -> tuple[jax.Array, KindVariables]:
    """Run this device's chunk of layers for one round, with the chunk's part of the layers' inputs."""
    size = len(layers.kinds)
    first = (round * lax.axis_size(AXIS) + lax.axis_index(AXIS)) * size
    inputs = {k: lax.dynamic_slice_in_dim(v, first, size, axis=1) for k, v in context.layer_inputs.items()}
    context = dataclasses.replace(context, layer_inputs=inputs, shared={})
    y, _, updates = run(layers, x, context)
    if context.shared:
        raise _incompatible("layers", "layers of different stages cannot share values", _names(context.shared))
    return y, updates


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))


class _SaveTagged(Remat):
    """A remat policy that saves all tagged activations."""

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """Rematerialize `function`."""
        policy = jax.checkpoint_policies.save_any_names_but_these()
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)


def stage_rules(place: Placement) -> dict[str, tuple[str, ...]]:
    """Return the mesh rules inside a stage. They do not contain the `pipeline` axis, which is manual there."""
    return {name: tuple(a for a in axes if a != AXIS) for name, axes in place.rules.items()}


def check_rows(place: Placement, rows: int) -> None:
    """Raise `ConfigError` if the devices of a stage cannot split the rows of a microbatch evenly."""
    devices = math.prod(place.mesh.shape[a] for a in place.rules.get("batch", ()) if a != AXIS)
    if rows % devices:
        got = f"{rows} rows per microbatch for {devices} devices that share the batch"
        raise _incompatible("microbatches", "the devices of a stage cannot split a microbatch equally", got)


def uneven_rows(count: int, rows: int) -> ConfigError:
    """Return the error for a batch that cannot be split into `count` microbatches."""
    return _incompatible("microbatches", "does not divide the number of rows in the batch", f"{count} for {rows} rows")


def _incompatible(field: str, message: str, got: str) -> ConfigError:
    fix = "change model.decoder.stack, mesh.shape.pipeline, or the number of layers or rows"
    return ConfigError(Problem(path=f"model.**.stack.{field}", message=message, got=got, fix=fix))


class LayerChunks(NamedTuple):
    """Stacked layers split into `stages * rounds` chunks with the same kinds of layers.

    Attributes:
        leaves: Arrays, [layers, ...] with one round, else [stages, rounds, layers of a chunk, ...]. Random keys are stored as key
            data.
        graphs: For each kind of layer, the graph definition, the tree structure of its arrays, and its number of leaves.
        keys: Whether each leaf contains random key data.
        kinds: Kinds of the layers in a chunk.
        rounds: Chunks per stage.
    """

    leaves: list[jax.Array]
    graphs: list[tuple[Any, Any, int]]
    keys: list[bool]
    kinds: tuple[int, ...]
    rounds: int

    @classmethod
    def from_layers(cls, layers: Layers, plan: Schedule) -> "LayerChunks":
        """Split layers into chunks. Raise `ConfigError` if the chunks would differ."""
        states = [jax.tree.flatten(state) for state in layers.states]
        kinds, count = layers.kinds, plan.stages * plan.rounds
        if len(kinds) % count:
            got = f"{len(kinds)} layers for {plan.stages} stages" + (
                f" of {plan.rounds} chunks" if plan.rounds > 1 else ""
            )
            raise _incompatible("layers", "the layers cannot be split into equal chunks", got)
        size = len(kinds) // count
        chunks = {tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)}
        if len(chunks) > 1:
            got = f"kinds {' '.join(map(str, kinds))} in chunks of {size}"
            raise _incompatible("layers", "all chunks must have the same kinds of layers in the same order", got)
        leaves = [leaf for flat, _ in states for leaf in flat]
        keys = [randomness.is_key(leaf) for leaf in leaves]
        leaves = [jax.random.key_data(x) if is_key else x for x, is_key in zip(leaves, keys, strict=True)]
        if plan.rounds > 1:  # stage s has the chunks r * P + s
            leaves = [jnp.swapaxes(x.reshape(plan.rounds, plan.stages, -1, *x.shape[1:]), 0, 1) for x in leaves]
        graphs = [(graph, tree, len(flat)) for graph, (flat, tree) in zip(layers.graphs, states, strict=True)]
        return cls(leaves, graphs, keys, chunks.pop(), plan.rounds)

    def layers(self, leaves: Iterable[jax.Array], index: jax.Array | None = None) -> Layers:
        """Build the layers of a chunk, with the random streams for microbatch `index`."""
        arrays = iter(jax.random.wrap_key_data(x) if is_key else x for x, is_key in zip(leaves, self.keys, strict=True))
        states = [tree.unflatten([next(arrays) for _ in range(n)]) for _, tree, n in self.graphs]
        layers = Layers(self.kinds, tuple(graph for graph, *_ in self.graphs), tuple(states))
        return layers.fold_in(index) if any(self.keys) and index is not None else layers

    def variables(self, leaves: Sequence[jax.Array]) -> KindVariables:
        """Return the variables of this device's chunks: [layers of a chunk, ...], or [rounds, layers of a chunk, ...]."""
        return self.layers(leaves if self.rounds == 1 else [leaf[0] for leaf in leaves]).all_variables()

    def rejoin(self, variable: jax.Array) -> jax.Array:
        """Restore the order of layers: [P * layers of a chunk, ...] or [P * rounds, layers of a chunk, ...] -> [layers, ...]."""
        if self.rounds == 1:
            return variable
        chunks = variable.reshape(-1, self.rounds, *variable.shape[1:])
        return jnp.swapaxes(chunks, 0, 1).reshape(-1, *variable.shape[2:])


def _update_variables(variables: KindVariables, updates: KindVariables) -> KindVariables:
    return {kind: {**values, **updates.get(kind, {})} for kind, values in variables.items()}


def _with_reports(stage: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Wrap a stage so that it returns (y, (losses, summaries)) instead of adding the reports to the active collector."""

    def run(*args: Any) -> Any:
        with summaries.collect() as collector:
            y = stage(*args)
        return y, (collector.losses, collector.summaries)

    return run


def _microbatches(tree: Any, rows: int, count: int) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Split arrays [B, ...] into [M, b, ...]. An array with a single row, shared by all rows, is repeated M times.

    Returns:
        The split tree, and a function that joins an output again.
    """

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] != rows:
            return jnp.broadcast_to(x[None], (count, *x.shape))
        parts = jnp.swapaxes(x.reshape(rows // count, count, *x.shape[1:]), 0, 1)
        return _constrain_residual(parts)

    def rejoin(y: jax.Array) -> jax.Array:
        return constrain(jnp.swapaxes(y, 0, 1).reshape(rows, *y.shape[2:]), *RESIDUAL)

    return jax.tree.map(split, tree), rejoin


def _constrain_residual(x: jax.Array) -> jax.Array:
    axes = (None, *RESIDUAL) if x.ndim <= 4 else (None, "batch", *(None,) * (x.ndim - 2))
    return constrain(x, *axes[: x.ndim])


def _run_sequentially(
    run: Callable[..., Any], layers: Layers, parts: Any, count: int
) -> tuple[jax.Array, Any, KindVariables]:
    """Run all microbatches through all layers. Reports have the shape [M] for each name."""
    draws = any(randomness.is_key(leaf) for state in layers.states for leaf in jax.tree.leaves(state))

    def microbatch(variables: KindVariables, index: jax.Array | None, x: jax.Array, context: Context) -> Any:
        updated = (
            layers.replace_variables(variables) if index is None else layers.replace_variables(variables).fold_in(index)
        )
        y, _, updates = run(updated, x, context)
        return y, _update_variables(variables, updates)

    def body(variables: KindVariables, numbered: Any) -> Any:
        part, index = numbered
        (y, variables), reports = _with_reports(microbatch)(variables, index, *part)
        return variables, (y, reports)

    indices = jnp.arange(count, dtype=jnp.uint32) if draws else None
    variables, (y, (losses, reported)) = lax.scan(body, layers.all_variables(), (parts, indices))
    return y, (jax.tree.map(lambda v: v / count, losses), reported), variables


def _ticks(plan: Schedule, stage: Callable[..., Any], variables: KindVariables, x: jax.Array, context: Any) -> Any:
    """Run the ticks of one device. Each tick runs a chunk of layers on the output of the previous stage.

    Returns:
        [1, M, b, S, D] (the outputs, on the last stage), [1] sums of the reports over the ticks, and the variables of this
        device's layers after all microbatches.
    """
    me = lax.axis_index(AXIS)
    ring = [(i, (i + 1) % plan.stages) for i in range(plan.stages)]

    def tick(carry: tuple[jax.Array, jax.Array, KindVariables], now: jax.Array) -> Any:
        received, outputs, variables = carry
        valid, index, round = plan.work(now, me)
        first_input, row_context = jax.tree.map(
            lambda v: lax.dynamic_index_in_dim(v, index, keepdims=False), (x, context)
        )
        (y, new), reports = stage(
            jnp.where((me == 0) & (round == 0), first_input, received), row_context, round, index, variables
        )
        variables = jax.tree.map(lambda a, b: jnp.where(valid, a.astype(b.dtype), b), new, variables)
        y = y.astype(x.dtype)
        last = valid & (me == plan.stages - 1) & (round == plan.rounds - 1)
        place = jnp.where(last, index, plan.microbatches)  # the slot after the outputs is for discarded values
        outputs = lax.dynamic_update_index_in_dim(outputs, y, place, 0)
        reports = jax.tree.map(lambda v: jnp.where(valid, v, 0), reports)
        return (lax.ppermute(y, AXIS, ring), outputs, variables), reports

    # Idle stages compute on a real microbatch instead of zeros, so that discarded values and their gradients are finite.
    outputs = jnp.zeros((plan.microbatches + 1, *x.shape[1:]), x.dtype)
    (_, outputs, final_variables), reports = lax.scan(tick, (x[0], outputs, variables), jnp.arange(plan.ticks))
    return outputs[None, :-1], jax.tree.map(lambda v: v[None], summaries.sum_reports(reports)), final_variables
