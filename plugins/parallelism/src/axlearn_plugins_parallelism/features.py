"""Features that rewrite models and meshes."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, get, get_fields, node, patch, setting
from axlearn_core.config.tree import edit_nodes, set_fields
from axlearn_core.contracts.experiment import is_pipelined
from axlearn_core.contracts.mesh import DEFAULT_RULES
from axlearn_core.plugins.feature import Feature, no_match_problem
from axlearn_plugins_moe.dispatch import DroplessDispatch
from axlearn_plugins_parallelism.learner_features import with_learner
from axlearn_plugins_parallelism.pipelined_stack import AXIS, PipelinedStack
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole
from axlearn_plugins_transformer.stack import Stack

Tree = TypeVar("Tree", bound=Node[Any])


def with_rules(cfg: Tree, rules: Mapping[str, tuple[str, ...]]) -> Tree:
    """Return `cfg` with additional mesh rules, which override existing rules."""
    old = get(cfg, "mesh.rules")
    new = {**old, **rules}
    return cfg if new == dict(old) else patch(cfg, {"mesh.rules": new})


@node
class Pipeline(Feature):
    """Pipeline parallelism: split every stack of layers into stages over the `pipeline` mesh axis.

    `--with pipeline:microbatches=8 --set mesh.shape="{pipeline: 2, fsdp: -1}"` splits the layers into two stages and the batch
    into 8 microbatches. `schedule=interleaved` gives each stage `rounds` smaller chunks of layers, which fills and drains the
    pipeline faster: (stages - 1) of (rounds * microbatches + stages - 1) ticks are idle. Other schedules have one round.
    `schedule=1f1b` runs the backward pass of each microbatch as soon as its loss is known. Its memory does not grow with the
    number of microbatches, but the forward pass of the layers runs twice. Parameters, checkpoints, remat and scan do not change.
    If the experiment already has the feature, the options are replaced.
    """

    stage = "execute"
    after = ("offload-optimizer",)  # both features may replace the learner
    example = "microbatches=2"

    microbatches: int = setting(default=REQUIRED, ge=1)
    schedule: Literal["gpipe", "interleaved", "1f1b"] = "gpipe"
    rounds: int = setting(default=2, ge=2)

    def apply(self, cfg: Tree) -> Tree:
        """Replace every `Stack` with a `PipelinedStack`, and shard the layers over the `pipeline` axis."""
        options = {"microbatches": self.microbatches, "schedule": self.schedule, "rounds": self.rounds}

        def change(_: str, stack: Any) -> Any:
            if not _is_stack(stack):
                return None
            settings = {a.name for a in attrs.fields(Stack.Config)}
            return PipelinedStack.Config(**{k: v for k, v in get_fields(stack).items() if k in settings} | options)

        no_match = no_match_problem("pipeline", "a stack of layers (`stack`, or a component that is one)")
        result = edit_nodes(cfg, change, no_match=no_match)
        pipelined = self.schedule == "1f1b"
        if pipelined or is_pipelined(result):
            result = with_learner(result, "pipeline:schedule=1f1b", pipelined=pipelined)
        layers = get(result, "mesh.rules").get("layers", DEFAULT_RULES["layers"])
        return result if AXIS in layers else with_rules(result, {"layers": (AXIS, *layers)})


def _is_stack(part: Any) -> bool:
    return type(part) in (Stack.Config, PipelinedStack.Config)


METHODS = {"ring": "ring", "all-gather": "context-all-gather", "all-to-all": "context-all-to-all"}


@node
class ContextParallel(Feature):
    """Context parallelism: attention over sequences that are sharded over the `seq` mesh axis.

    `--with context-parallel --set mesh.shape="{seq: 4, fsdp: -1}"` shards every row over four devices. `method`
    sets how queries reach the keys of other devices. `ring` passes keys and values around, so no device ever stores all of them
    (Liu et al., 2023). `all-gather` gathers them. `all-to-all` assigns each device all positions of some heads (Jacobs et al.,
    2023) and then runs the supported kernel with the highest priority; the number of heads must be a multiple of the number of
    devices. With `ring` and `all-gather`, each device has an early and a late piece of the sequence, which balances the work
    under a causal mask. If the sequence is not sharded, the best kernel is chosen as if the feature were not used. If the
    experiment already has the feature or another kernel, the kernel is replaced.
    """

    stage = "execute"
    replaces = ("model.**.kernel",)

    method: Literal["ring", "all-gather", "all-to-all"] = "ring"

    def apply(self, cfg: Tree) -> Tree:
        """Set `kernel` on every attention layer with the `AttentionKernelRole` role."""
        no_match = no_match_problem("context-parallel", "an attention layer: a node with the role AttentionKernelRole")
        return set_fields(cfg, AttentionKernelRole, {"kernel": METHODS[self.method]}, no_match=no_match)


@node
class SequenceParallel(Feature):
    """Sequence sharding between blocks, for tensor parallelism (Korthikanti et al., 2022).

    Norms and residual sums work on each position separately. Their activations are sharded by position over the `tensor` axis
    instead of being replicated, which divides their memory by the size of the axis. The all-reduce after each block becomes a
    reduce-scatter after the block and an all-gather before the next block. Without a `tensor` axis in the mesh, the feature has no
    effect at run time.
    """

    stage = "execute"

    def apply(self, cfg: Tree) -> Tree:
        """Add `tensor` to the mesh rule for `residual_sequence`."""
        name = "residual_sequence"
        axes = get(cfg, "mesh.rules").get(name, DEFAULT_RULES[name])
        return cfg if "tensor" in axes else with_rules(cfg, {name: (*axes, "tensor")})


@node
class ExpertParallel(Feature):
    """Exchange of tokens between experts that are sharded over the `expert` mesh axis.

    `exchange=all-to-all` (the default) sends each token only to the devices of its experts. `exchange=all-gather` gathers the
    tokens of all devices that share the experts, as without this feature. Neither option drops tokens. The feature applies to
    the dropless dispatch. The capacity dispatch always uses an all-to-all.
    """

    stage = "execute"
    needs = ("moe",)

    exchange: Literal["all-gather", "all-to-all"] = "all-to-all"

    def apply(self, cfg: Tree) -> Tree:
        """Set `exchange` on every dropless dispatch."""
        no_match = no_match_problem("expert-parallel", "experts with the dropless dispatch")
        return set_fields(cfg, DroplessDispatch, {"exchange": self.exchange}, no_match=no_match)
