"""The features of this distribution that rewrite models and meshes."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, fields_of, get, node, patch, setting
from axlearn_core.config.tree import edit_nodes, set_fields
from axlearn_core.contracts.experiment import is_pipelined
from axlearn_core.contracts.mesh import DEFAULT_RULES
from axlearn_core.plugins.feature import Feature, nothing_to_set
from axlearn_plugins_moe.dispatch import DroplessDispatch
from axlearn_plugins_parallelism.learner_features import with_learner
from axlearn_plugins_parallelism.pipelined_stack import AXIS, PipelinedStack
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole
from axlearn_plugins_transformer.stack import Stack

Tree = TypeVar("Tree", bound=Node[Any])


def with_rules(cfg: Tree, rules: Mapping[str, tuple[str, ...]]) -> Tree:
    """`cfg` with mesh rules over those that it has."""
    old = get(cfg, "mesh.rules")
    new = {**old, **rules}
    return cfg if new == dict(old) else patch(cfg, {"mesh.rules": new})


@node
class Pipeline(Feature):
    """Pipeline parallelism: every stack of layers is split into stages over the mesh axis `pipeline`.

    `--with pipeline:microbatches=8 --set mesh.shape="{pipeline: 2, fsdp: -1}"` makes two stages of the layers, through
    which the batch goes in 8 microbatches. `schedule=interleaved` gives each stage `rounds` smaller chunks of layers,
    which takes less time to fill and to drain: (stages - 1) of (rounds * microbatches + stages - 1) ticks are idle; with
    the others, rounds is 1. `schedule=1f1b` takes each microbatch backward as soon as its loss is known, so that memory does
    not grow with their number; the layers are computed twice forward. Parameters, checkpoints, remat and scan stay what
    they are. On an experiment that has it already, the options are set anew.
    """

    stage = "execute"
    after = ("offload-optimizer",)  # both may put another learner in place
    example = "microbatches=2"

    microbatches: int = setting(default=REQUIRED, ge=1)
    schedule: Literal["gpipe", "interleaved", "1f1b"] = "gpipe"
    rounds: int = setting(default=2, ge=2)

    def apply(self, cfg: Tree) -> Tree:
        """Puts a `PipelinedStack` in the place of every `Stack`, and the layers on the axis `pipeline`."""
        options = {"microbatches": self.microbatches, "schedule": self.schedule, "rounds": self.rounds}

        def change(_: str, stack: Any) -> Any:
            if not _is_stack(stack):
                return None
            settings = {a.name for a in attrs.fields(Stack.Config)}
            return PipelinedStack.Config(**{k: v for k, v in fields_of(stack).items() if k in settings} | options)

        nothing = nothing_to_set("pipeline", "a stack of layers (`stack`, or a component that is one)")
        result = edit_nodes(cfg, change, nothing=nothing)
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
    """Context parallelism: attention over sequences that are split over the mesh axis `seq`.

    `--with context-parallel --set mesh.shape="{seq: 4, fsdp: -1}"` gives each of four devices a quarter of every row.
    `method` says how queries see the keys of other devices: `ring` passes keys and values around, so that no device ever
    holds all of them (Liu et al., 2023); `all-gather` gathers them; `all-to-all` gives each device all positions of some
    heads (Jacobs et al., 2023), which has to divide the heads, and runs the fastest kernel there is. With the first two,
    each device has an early and a late piece of the sequence, so that under a causal mask all have equal work. Where the
    sequence is not split, the best kernel is chosen, as without this feature. On an experiment that has it already, the
    method is set anew.
    """

    stage = "execute"

    method: Literal["ring", "all-gather", "all-to-all"] = "ring"

    def apply(self, cfg: Tree) -> Tree:
        """Sets `kernel` of every attention with the role `AttentionKernelRole`."""
        nothing = nothing_to_set("context-parallel", "an attention layer: a node with the role AttentionKernelRole")
        return set_fields(cfg, AttentionKernelRole, {"kernel": METHODS[self.method]}, nothing=nothing)


@node
class SequenceParallel(Feature):
    """Sequence sharding between blocks, for tensor parallelism (Korthikanti et al., 2022).

    Where each position is worked on by itself (norms, residual sums), activations are split over the axis `tensor` by
    position instead of being held whole by all its devices: their memory is divided by its size, and an all-reduce after
    each block becomes a reduce-scatter after it and an all-gather before the next. Without an axis `tensor` in the mesh it
    changes nothing at run time.
    """

    stage = "execute"

    def apply(self, cfg: Tree) -> Tree:
        """Adds `tensor` to the mesh rule of `residual_sequence`."""
        name = "residual_sequence"
        axes = get(cfg, "mesh.rules").get(name, DEFAULT_RULES[name])
        return cfg if "tensor" in axes else with_rules(cfg, {name: (*axes, "tensor")})


@node
class ExpertParallel(Feature):
    """How tokens come to experts that are split over the mesh axis `expert`.

    `exchange=all-to-all` (the default here) sends each token to the devices of its experts alone, `all-gather` gathers the
    tokens of all devices that share the experts, as experts do without this feature. No token is dropped by either. It is
    for the dropless dispatch; the one with capacities always sends.
    """

    stage = "execute"
    needs = ("moe",)

    exchange: Literal["all-gather", "all-to-all"] = "all-to-all"

    def apply(self, cfg: Tree) -> Tree:
        """Sets `exchange` of every dropless dispatch."""
        nothing = nothing_to_set("expert-parallel", "experts with the dropless dispatch")
        return set_fields(cfg, DroplessDispatch, {"exchange": self.exchange}, nothing=nothing)
