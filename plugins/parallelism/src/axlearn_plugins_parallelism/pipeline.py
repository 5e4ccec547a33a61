"""The pipelined stack: layers split over the mesh axis `pipeline`, microbatches passing from stage to stage.

M microbatches of b rows each, S positions, D width, P stages, R rounds (chunks of layers per stage).

Every device of a stage runs the same program on its own chunk of the layers (a `shard_map` over the axis `pipeline`
alone; all other axes stay with the compiler, so that whatever is inside a layer is laid out as it is without a pipeline).
Derivatives come by differentiating the loop: the backward pass goes through the ticks in reverse.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from axlearn_core.config import REQUIRED, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import Placement, constrain, logical_rules, placement
from axlearn_plugins_parallelism.schedule import Schedule
from axlearn_plugins_transformer.stack import MixedLayers, Stack

AXIS = "pipeline"
RESIDUAL = ("batch", "residual_sequence", "activation_embed")


class PipelinedStack(Stack):
    """Runs layers in stages over the mesh axis `pipeline`, with parameters and checkpoints as `Stack` has them.

    The batch is taken in microbatches on every mesh, also where there is one stage: what depends on which rows are
    together, such as the load-balance loss of experts, is the same everywhere; losses and summaries of layers are means over
    the microbatches. With a cache (for decoding) it is a plain stack.
    """

    @node
    class Config(Stack.Config):
        """How the batch goes through the stages.

        Attributes:
            microbatches: how many the batch is taken in; rows k, k + M, ... are microbatch k.
            schedule: `gpipe`, or `interleaved` (each stage has `rounds` chunks of layers).
            rounds: chunks of layers per stage, where the schedule is `interleaved`.

        The order in which stages work is execution: each microbatch passes the same layers.
        """

        computes_like = Stack.Config

        microbatches: int = setting(default=REQUIRED, kind="microbatches", ge=1)
        schedule: Literal["gpipe", "interleaved"] = setting(default="gpipe", kind="execution")
        rounds: int = setting(default=2, kind="execution", ge=2)

    cfg: Any

    def __init__(self, cfg: Config):
        super().__init__(cfg)

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Runs them one after the other; [B, S, D] -> [B, S, D].

        Raises:
            ConfigError: layers, rows or microbatches that cannot be split so.
        """
        found, count = placement(), self.cfg.microbatches
        stages = found.mesh.shape[AXIS] if found is not None else 1
        if cache is not None or isinstance(layers, nnx.List):
            return super().__call__(layers, x, context, cache)
        if x.shape[0] % count:
            if found is None or stages == 1:  # one row, say, to look at its logits
                return super().__call__(layers, x, context)
            raise _refused("microbatches", "does not divide the rows of the batch", f"{count} for {x.shape[0]} rows")
        parts, rejoin = _microbatches((x, context), x.shape[0], count)
        run = super().__call__
        if found is None or stages == 1:
            y, reports = _one_after_the_other(lambda x, context: run(layers, x, context)[0], parts, count)
        else:
            y, reports = self._in_stages(found, layers, parts)
        summaries.add_layers([reports])
        return rejoin(y), None

    def _in_stages(self, found: Placement, layers: Any, parts: Any) -> tuple[jax.Array, Any]:
        cfg, stages = self.cfg, found.mesh.shape[AXIS]
        plan = Schedule(stages, cfg.microbatches, cfg.rounds if cfg.schedule == "interleaved" else 1)
        chunk = Chunks.of(layers, plan)
        if plan.rounds > 1 and plan.microbatches % stages:
            got = f"{plan.microbatches} microbatches for {stages} stages"
            raise _refused("microbatches", "an interleaved schedule takes as many as the stages, or a multiple", got)
        batch_axes = [a for a in found.rules.get("batch", ()) if a != AXIS]
        devices = 1
        for axis in batch_axes:
            devices *= found.mesh.shape[axis]
        rows = parts[0].shape[1]
        if rows % devices:
            got = f"{rows} rows per microbatch, and {devices} devices share the batch"
            raise _refused("microbatches", "a microbatch has no equal part for every device", got)
        rules = {name: tuple(a for a in axes if a != AXIS) for name, axes in found.rules.items()}

        def run(leaves: Sequence[jax.Array], x: jax.Array, context: Any) -> Any:
            # Inside, `pipeline` is an axis of the program itself, and of no array.
            with logical_rules(jax.sharding.get_abstract_mesh(), rules):  # type: ignore[arg-type]
                return _ticks(plan, self._stage(chunk, leaves), x[0], context)

        split, whole = PartitionSpec(AXIS), PartitionSpec()
        mapped = jax.shard_map(
            run, mesh=found.mesh, in_specs=(split, split, whole), out_specs=split, axis_names={AXIS}, check_vma=False
        )
        # One copy per stage, so that their gradients are summed outside: XLA:CPU cannot compile a sum of bfloat16 over a
        # manual axis beside automatic ones.
        x, context = parts
        x = jnp.broadcast_to(x[None], (stages, *x.shape))
        y, reports = mapped(chunk.leaves, x, context)
        # [P, M, ...]: the last stage has the outputs, and each stage the reports of its own layers.
        losses, found_summaries = jax.tree.map(lambda v: v / plan.microbatches, reports)
        return y[-1], (losses, jax.tree.map(lambda v: v / plan.rounds, found_summaries))

    def _stage(self, chunk: "Chunks", leaves: Sequence[jax.Array]) -> Callable[..., Any]:
        """(x, context, round) -> (y, reports): the chunk of layers of that round, on this device."""
        if chunk.rounds == 1:

            def stage(x: jax.Array, context: Context, _: jax.Array) -> Any:
                return Stack.__call__(self, chunk.layers(leaves), x, context)[0]

            return _reporting(stage)
        # The layers of the round are taken out inside the rematerialised function: as its inputs they would be kept for
        # each tick. Without `remat` all that has a tag is kept.
        plain = Stack.Config(mode=self.cfg.mode).build()
        local = [leaf[0] for leaf in leaves]

        def chosen(x: jax.Array, context: Context, round: jax.Array) -> Any:
            rows = [lax.dynamic_index_in_dim(leaf, round, keepdims=False) for leaf in local]
            return plain(chunk.layers(rows), x, context)[0]

        remat = (self.cfg.remat or _KeepTagged.Config()).build()
        wrapped = remat.wrap(_reporting(chosen), in_loop=True)

        def checked(*args: Any) -> Any:
            made = wrapped(*args)
            remat.check()
            return made

        return checked


class _KeepTagged(Remat):
    """Keeps whatever has a tag."""

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """`function`, rematerialised."""
        policy = jax.checkpoint_policies.save_any_names_but_these()
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)


def _refused(field: str, message: str, got: str) -> ConfigError:
    fix = "change model.decoder.stack, mesh.shape.pipeline, or what is split"
    return ConfigError(Problem(path=f"model.**.stack.{field}", message=message, got=got, fix=fix))


class Chunks(NamedTuple):
    """Stacked layers cut into `stages * rounds` chunks of the same kinds of layers.

    Attributes:
        leaves: the parameters: [layers, ...] with one round; else [stages, rounds, layers of a chunk, ...].
        graphs: of each kind of layer, its structure and how many of the leaves are its own.
        kinds: of the layers of a chunk.
        rounds: chunks per stage.
    """

    leaves: list[jax.Array]
    graphs: list[tuple[Any, Any, int]]
    kinds: tuple[int, ...]
    rounds: int

    @classmethod
    def of(cls, layers: Any, plan: Schedule) -> "Chunks":
        """Cuts them; raises `ConfigError` where the chunks would differ."""
        mixed = isinstance(layers, MixedLayers)
        split = (
            [nnx.split(getattr(layers, str(k))) for k in range(max(layers.kinds) + 1)] if mixed else [nnx.split(layers)]
        )
        states = [jax.tree.flatten(state) for _, state in split]
        kinds = layers.kinds if mixed else (0,) * states[0][0][0].shape[0]
        count = plan.stages * plan.rounds
        if len(kinds) % count:
            got = f"{len(kinds)} layers for {plan.stages} stages" + (
                f" of {plan.rounds} chunks" if plan.rounds > 1 else ""
            )
            raise _refused("layers", "the layers cannot be split into equal parts", got)
        size = len(kinds) // count
        chunks = {tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)}
        if len(chunks) > 1:
            got = f"kinds {' '.join(map(str, kinds))} in parts of {size}"
            raise _refused("layers", "every part has to have the same kinds of layers, in the same order", got)
        leaves = [leaf for flat, _ in states for leaf in flat]
        if plan.rounds > 1:  # chunk r * P + s is stage s's
            leaves = [jnp.swapaxes(x.reshape(plan.rounds, plan.stages, -1, *x.shape[1:]), 0, 1) for x in leaves]
        graphs = [(graph, tree, len(flat)) for (graph, _), (flat, tree) in zip(split, states, strict=True)]
        return cls(leaves, graphs, chunks.pop(), plan.rounds)

    def layers(self, leaves: Iterable[jax.Array]) -> Any:
        """The layers of one chunk as a stack takes them."""
        rest = iter(leaves)
        made = [nnx.merge(graph, tree.unflatten([next(rest) for _ in range(n)])) for graph, tree, n in self.graphs]
        return made[0] if len(made) == 1 else MixedLayers(made, self.kinds)


def _reporting(stage: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(y, (losses, summaries)) of a function that adds them to the collector in force."""

    def run(*args: Any) -> Any:
        with summaries.collect() as found:
            y = stage(*args)
        return y, (found.losses, found.summaries)

    return run


def _microbatches(tree: Any, rows: int, count: int) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Each array [B, ...] as [M, b, ...], and the way back; those with one row for all stay as they are, M times."""

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] != rows:
            return jnp.broadcast_to(x[None], (count, *x.shape))
        made = jnp.swapaxes(x.reshape(rows // count, count, *x.shape[1:]), 0, 1)
        return _laid_out(made)

    def rejoin(y: jax.Array) -> jax.Array:
        return constrain(jnp.swapaxes(y, 0, 1).reshape(rows, *y.shape[2:]), *RESIDUAL)

    return jax.tree.map(split, tree), rejoin


def _laid_out(x: jax.Array) -> jax.Array:
    return constrain(x, *(None, *RESIDUAL)[: x.ndim])


def _one_after_the_other(run: Callable[..., jax.Array], parts: Any, count: int) -> tuple[jax.Array, Any]:
    """All microbatches through all layers; what is reported is [M] of each name."""

    def body(_: None, part: Any) -> Any:
        return None, _reporting(run)(*part)

    _, (y, (losses, reported)) = lax.scan(body, None, parts)
    return y, (jax.tree.map(lambda v: v / count, losses), reported)


def _ticks(plan: Schedule, stage: Callable[..., Any], x: jax.Array, context: Any) -> Any:
    """What one device does: a chunk of layers per tick, on what the stage before it sent.

    Returns:
        [1, M, b, S, D] (of the last stage the outputs), and [1] sums over the ticks of what was reported.
    """
    me = lax.axis_index(AXIS)
    ring = [(i, (i + 1) % plan.stages) for i in range(plan.stages)]

    def tick(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> Any:
        received, outputs = carry
        valid, index, round = plan.work(now, me)
        mine, told = jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, index, keepdims=False), (x, context))
        y, reports = stage(jnp.where((me == 0) & (round == 0), mine, received), told, round)
        y = y.astype(x.dtype)
        last = valid & (me == plan.stages - 1) & (round == plan.rounds - 1)
        place = jnp.where(last, index, plan.microbatches)  # behind the outputs is room for what nobody needs
        outputs = lax.dynamic_update_index_in_dim(outputs, y, place, 0)
        reports = jax.tree.map(lambda v: jnp.where(valid, v, 0), reports)
        return (lax.ppermute(y, AXIS, ring), outputs), reports

    # Before the first microbatch arrives a stage computes on a real one, not on zeros: nothing that is thrown away can be
    # infinite, here or in a derivative.
    outputs = jnp.zeros((plan.microbatches + 1, *x.shape[1:]), x.dtype)
    (_, outputs), reports = lax.scan(tick, (x[0], outputs), jnp.arange(plan.ticks))
    return outputs[None, :-1], jax.tree.map(lambda v: jnp.sum(v, axis=0)[None], reports)
