"""The `lora` feature."""

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import Node, map, node, patch, setting
from axlearn_core.config.node import interface_fields
from axlearn_core.config.tree import children, join, with_children
from axlearn_core.contracts.experiment import get_loop_config, get_parameter_rules
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn import ParameterRule
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_finetune.conversion.target_patterns import matching_paths
from axlearn_plugins_finetune.lora.base_dtype import adapter_dtype, restore_base, store_base
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_finetune.lora.start import CONTINUES_WITHOUT, StartFromRun

Tree = TypeVar("Tree", bound=Node[Any])

ATTENTION = "model.**.attention.*"
"""Linear maps that get adapters by default."""
FROZEN = ParameterRule(pattern="!**.lora_*|objective.**", freeze=True)
"""Rule that freezes the model except the adapters. Frozen parameters have no optimizer state."""
FROZEN_WITH_OBJECTIVE = ParameterRule(pattern="!**.lora_*", freeze=True)
"""The rule of earlier versions, which also froze the parameters of the objective. Configs of their runs have it."""


@node
class Lora(Feature):
    """Low-rank adapters on linear maps of the model, with the rest of the model frozen (Hu et al., 2021).

    `target` is a config-path pattern or a list of them. Every matching linear map gets adapters. The default matches the maps
    of attention (`model.**.attention.*`) if the model has no adapters yet, and `model.**` matches all linear maps. Parameters of
    the objective, such as the head of a reward model, get no adapters and are trained. If layers
    alternate between several components (`alternate`), all of them match by the path of their slot. `rank` (16 for a new adapter)
    is the width of an adapter. Its update is multiplied by `alpha` (16) / rank. `base` is the directory of the run whose parameters
    a new run starts from. `adapters` is a directory written by `axlearn lora export`.

    `base_dtype` is the storage dtype of the frozen parameters. `bfloat16` needs half the memory, and does not change the results
    of a model that computes in bfloat16.

    Linear maps that already have adapters are not adapted twice; the given `rank` and `alpha` replace theirs.
    """

    stage = "wrap"
    bridge = "axlearn_plugins_finetune.lora.merge:bridge"

    rank: int | None = setting(default=None, ge=1)
    alpha: float | None = setting(default=None, gt=0)
    target: str | tuple[str, ...] | None = None
    base: str | None = None
    adapters: str | None = None
    base_dtype: Literal["float32", "bfloat16", "float16"] | None = None

    def validate(self) -> Iterable[Problem]:
        """Report directories without a run or without adapters."""
        for name, directory, file, description in (
            ("base", self.base, "config.yaml", "run"),
            ("adapters", self.adapters, "adapters.json", "exported adapters"),
        ):
            if directory is None or (name == "base" and "://" in directory):  # URIs are checked when the run starts
                continue
            if not (Path(directory).expanduser() / file).is_file():
                yield Problem(
                    path=name,
                    message=f"no {description} in that directory: it has no {file}",
                    got=directory,
                    fix=f"give a {description}" if name == "adapters" else f"give a run; {CONTINUES_WITHOUT}",
                )

    def apply(self, cfg: Tree) -> Tree:
        """Add adapters to the maps that match `target`, freeze everything else, and set a loop that loads `base`."""
        maps = {path: part for path, part in projections(cfg) if not path.startswith("objective.")}
        dtype = adapter_dtype(cfg)
        adapted = {path for path, part in maps.items() if isinstance(part, LoraLinear.Config)}
        if self.target is None and adapted:
            targets = adapted
        else:
            targets = matching_paths(cfg, self.target or ATTENTION, list(maps), subject="lora")
        result = _freeze_base(_place_adapters(cfg, "", targets, lambda part: self._adapt(part, dtype)))
        if self.base_dtype is not None:
            result = store_base(result, self.base_dtype)
        return result if self.base is None and self.adapters is None else self._start_from_adapters(result)

    def _adapt(self, part: Node[Any], dtype: str | None) -> Node[Any]:
        options: dict[str, Any] = {k: v for k, v in (("rank", self.rank), ("alpha", self.alpha)) if v is not None}
        if isinstance(part, LoraLinear.Config):
            return attrs.evolve(part, **options)
        return LoraLinear.Config(base=part, param_dtype=dtype, **options)

    def _start_from_adapters(self, cfg: Tree) -> Tree:
        options: dict[str, Any] = {
            k: v for k, v in (("run_dir", self.base), ("adapters", self.adapters)) if v is not None
        }
        loop = get_loop_config(cfg)
        if not isinstance(loop, Node):
            raise ConfigError(
                Problem(
                    path="loop", message="lora: the experiment has no loop that can load `base`", fix="remove `base`"
                )
            )
        if isinstance(loop, StartFromRun.Config):
            return patch(cfg, {"loop": attrs.evolve(loop, **options)})
        return patch(cfg, {"loop": StartFromRun.Config(loop=loop, **options)})


def without_adapters(cfg: Tree) -> Tree:
    """Return the config of the dense model. This undoes the `lora` feature."""

    def undo(part: Node[Any]) -> Node[Any]:
        if isinstance(part, LoraLinear.Config):
            return part.base
        return part.loop if isinstance(part, StartFromRun.Config) else part

    result = map(restore_base(cfg), undo)
    rules = get_parameter_rules(result) or ()
    others = _without_frozen(rules)
    return result if len(others) == len(rules) else patch(result, {"learner.rules": others})


def _without_frozen(rules: Iterable[Node[Any]]) -> tuple[Node[Any], ...]:
    return tuple(r for r in rules if r not in (FROZEN, FROZEN_WITH_OBJECTIVE))


def projections(tree: Any, path: str = "") -> Iterator[tuple[str, Node[Any]]]:
    """Yield the path and the node of every linear map, except maps inside a map with adapters."""
    if _is_projection(tree):
        yield path, tree
    if not isinstance(tree, LoraLinear.Config):
        for name, child in children(tree).items():
            yield from projections(child, join(path, name))


def _is_projection(part: Any) -> bool:
    """Return whether a node has the interface of the core's `Projection`."""
    if not isinstance(part, Node):
        return False
    parameters = set(interface_fields(type(part)))
    owner = type(part).owner
    if owner is not None and not {"input_dims", "output_dims"} <= parameters:
        parameters |= set(inspect.signature(owner.__init__).parameters)
    return {"input_dims", "output_dims"} <= parameters


def _place_adapters(value: Any, path: str, targets: set[str], adapt: Any) -> Any:
    if path in targets:
        return adapt(value)
    if isinstance(value, LoraLinear.Config):
        return value  # do not adapt its base again
    return with_children(
        value, {k: _place_adapters(v, join(path, k), targets, adapt) for k, v in children(value).items()}
    )


def _freeze_base(cfg: Tree) -> Tree:
    rules = get_parameter_rules(cfg)
    if rules is None:
        raise ConfigError(
            Problem(
                path="learner.rules",
                message="lora cannot freeze the base: the learner has no rules",
                fix="use a learner with rules, such as the core's Learner",
            )
        )
    return cfg if FROZEN in rules else patch(cfg, {"learner.rules": (*_without_frozen(rules), FROZEN)})
