"""`Feature`: a config modifier that is found by name.

    @node
    class QKNorm(Feature):
        '''Normalises queries and keys (the command line prints this docstring).'''

        stage = "tune"
        eps: float = setting(default=1e-6, gt=0)             # an option: `--with qk-norm:eps=1e-5`

        def apply(self, cfg):
            return patch(cfg, {"model.**.attention.qk_norm": RMSNorm.Config(eps=self.eps)})

It is registered under the entry-point group `axlearn.features` of its distribution.
"""

from typing import Any, ClassVar, Literal, TypeVar

import attrs

from axlearn_core.config import Node, node
from axlearn_core.errors import Problem

Stage = Literal["replace", "wrap", "tune", "execute"]
STAGES: tuple[Stage, ...] = ("replace", "wrap", "tune", "execute")
Tree = TypeVar("Tree", bound=Node[Any])


def nothing_to_set(feature: str, expected: str) -> Problem:
    """The problem of a feature that finds no node to change, for the edits of `axlearn_core.config.tree`.

    Args:
        feature: its name.
        expected: what it looks for.
    """
    message, fix = f"{feature} finds nothing to set", f"leave the feature {feature} out"
    return Problem(path="model", message=message, expected=expected, fix=fix)


@node
class Feature(Node[Any]):
    """The base of all features. Its fields are the options that a user may give; it needs no other state.

    Features are applied by stage, however the user wrote them; within a stage as `before` and `after` say, and by name where
    they say nothing:

    - `replace` puts other components in place (RoPE, MoE);
    - `wrap` puts something around what is there (LoRA, quantization);
    - `tune` sets values;
    - `execute` says how it runs (remat, pipeline parallelism). It may change fields of the kinds `execution` and
      `microbatches` alone; another one is an error that names the path.
    """

    stage: ClassVar[Stage] = "tune"
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of features that must be asked for together with this one."""
    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of features that cannot be used together with this one."""
    bridge: ClassVar[str] = ""
    """`"module:attribute"` of a function that makes this feature's parameters from those of a model without it, which
    `axlearn convert` takes; see `axlearn_plugins_finetune.conversion.carry.Bridge`."""
    no_bridge: ClassVar[str] = ""
    """Why no bridge is possible, for the error of `axlearn convert`."""
    before: ClassVar[tuple[str, ...]] = ()
    """Names of features of this stage that are applied after this one, where they are asked for; they need not be
    installed. Two features with a stated order may change the same path: the later one finds what the earlier one made."""
    after: ClassVar[tuple[str, ...]] = ()
    """Names of features of this stage that are applied before this one; as `before`."""
    example: ClassVar[str] = ""
    """Option text that makes sense on most experiments, for a feature with options that have to be given: what follows
    the name in `--with NAME:EXAMPLE`. The suites that try every installed feature use it."""

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        own = {"stage", "needs", "excludes", "before", "after", "example", "bridge", "no_bridge", "apply", "in_effect"}
        if clashes := own & {a.name for a in attrs.fields(cls)}:
            name = min(clashes)
            raise TypeError(f"{cls.__qualname__}.{name} is not an option: write `{name} = ...` without an annotation")
        if cls.stage not in STAGES:
            raise TypeError(f"{cls.__qualname__}.stage is {cls.stage!r}; it has to be one of {', '.join(STAGES)}")
        names = {"needs": cls.needs, "excludes": cls.excludes, "before": cls.before, "after": cls.after}
        for name, value in names.items():
            if not isinstance(value, tuple) or not all(isinstance(n, str) for n in value):
                raise TypeError(f"{cls.__qualname__}.{name} is {value!r}; it has to be a tuple of names of features")
        if both := {*cls.before} & {*cls.after}:
            raise TypeError(f"{cls.__qualname__} comes both before and after {min(both)!r}")

    def apply(self, cfg: Tree) -> Tree:
        """The config with this feature in it; a pure function of the tree and the options.

        Raises:
            ConfigError: the config has nothing that this feature could change, or already has what it cannot change.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define apply()")

    def in_effect(self, cfg: Node[Any]) -> bool:
        """Whether the feature is already in effect. Called only where `apply` changed nothing.

        By default it is, since `apply` refuses a config in which there is nothing to change; a request that asks for it then says
        that it changed nothing. A feature whose `apply` cannot tell the two apart says here which one it is: False makes the
        request an error.
        """
        return self.apply(cfg) == cfg
