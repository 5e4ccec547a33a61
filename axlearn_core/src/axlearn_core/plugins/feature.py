"""`Feature`: a named config modifier.

    @node
    class QKNorm(Feature):
        '''Normalize queries and keys (the command line prints this docstring).'''

        stage = "tune"
        eps: float = setting(default=1e-6, gt=0)             # option: `--with qk-norm:eps=1e-5`

        def apply(self, cfg):
            return patch(cfg, {"model.**.attention.qk_norm": RMSNorm.Config(eps=self.eps)})

A distribution registers its features in the `axlearn.features` entry-point group.
"""

from typing import Any, ClassVar, Literal, TypeVar

import attrs

from axlearn_core.config import Node, node
from axlearn_core.errors import Problem

Stage = Literal["replace", "wrap", "tune", "execute"]
STAGES: tuple[Stage, ...] = ("replace", "wrap", "tune", "execute")
Tree = TypeVar("Tree", bound=Node[Any])


def no_match_problem(feature: str, expected: str) -> Problem:
    """Return the problem to report if a feature finds no node to change.

    The functions of `axlearn_core.config.tree` that edit trees take it as an argument.

    Args:
        feature: Name of the feature.
        expected: Description of the nodes that the feature changes.
    """
    message, fix = f"{feature} finds nothing to set", f"remove the feature {feature}"
    return Problem(path="model", message=message, expected=expected, fix=fix)


@node
class Feature(Node[Any]):
    """Base class for features. The fields are the options that a user can set. A feature has no other state.

    Features are applied in the order of their stages, not in the order in which the user lists them. Within a stage, `before`
    and `after` define the order. Features without a defined order are applied in alphabetical order. The stages are:

    - `replace`: replace components (RoPE, MoE).
    - `wrap`: wrap components (LoRA, quantization).
    - `tune`: set values.
    - `execute`: change how the program runs (remat, pipeline parallelism). Such a feature may only change fields of the
      kinds `execution` and `microbatches`. If it changes any other field, an error message names the path.
    """

    stage: ClassVar[Stage] = "tune"
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of features that this feature requires."""
    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of features that cannot be combined with this feature."""
    bridge: ClassVar[str] = ""
    """Function, as `"module:attribute"`, that converts the parameters of a model without this feature. `axlearn convert` calls
    it. See `axlearn_plugins_finetune.conversion.param_transfer.Bridge`."""
    no_bridge: ClassVar[str] = ""
    """Reason why a bridge is impossible. `axlearn convert` prints it."""
    before: ClassVar[tuple[str, ...]] = ()
    """Names of features in the same stage that are applied after this feature. They need not be installed.

    Two features with a defined order may change the same path. The later feature sees the earlier feature's changes."""
    after: ClassVar[tuple[str, ...]] = ()
    """Names of features in the same stage that are applied before this feature. They need not be installed."""
    replaces: ClassVar[tuple[str, ...]] = ()
    """Patterns of config paths whose values this feature replaces or resets, even if another feature set them.

    `FeatureSuite` requires the declaration from a feature that drops the effect of another one. The decisions of a run list what
    was lost."""
    example: ClassVar[str] = ""
    """Options for `--with NAME:EXAMPLE` that work with most experiments. Set this if the feature has required options.

    Test suites use it when they try every installed feature."""
    example_needs: ClassVar[tuple[str, ...]] = ()
    """Names of features that the example requires, in addition to `needs`.

    Set this if the feature requires one of several features, such as any method with rollouts. Only test suites use it."""

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        base = {
            "stage", "needs", "excludes", "before", "after", "replaces", "example", "example_needs", "bridge", "no_bridge", "apply",
            "in_effect",
        }  # fmt: skip
        if clashes := base & {a.name for a in attrs.fields(cls)}:
            name = min(clashes)
            raise TypeError(f"{cls.__qualname__}.{name} is not an option: write `{name} = ...` without an annotation")
        if cls.stage not in STAGES:
            raise TypeError(f"{cls.__qualname__}.stage is {cls.stage!r}; it must be one of {', '.join(STAGES)}")
        names = {n: getattr(cls, n) for n in ("needs", "excludes", "before", "after", "example_needs")}
        for name, value in names.items():
            if not isinstance(value, tuple) or not all(isinstance(n, str) for n in value):
                raise TypeError(f"{cls.__qualname__}.{name} is {value!r}; it must be a tuple of feature names")
        if not isinstance(cls.replaces, tuple) or not all(isinstance(n, str) and n for n in cls.replaces):
            raise TypeError(
                f"{cls.__qualname__}.replaces is {cls.replaces!r}; it must be a tuple of config paths or patterns"
            )
        if both := {*cls.before} & {*cls.after}:
            raise TypeError(f"{cls.__qualname__} is both before and after {min(both)!r}")

    def apply(self, cfg: Tree) -> Tree:
        """Return the config with this feature. This must be a pure function of the tree and the options.

        Raises:
            ConfigError: If the config has no node that this feature can change, or has a value that it cannot change.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define apply()")

    def in_effect(self, cfg: Node[Any]) -> bool:
        """Return True if the config already has this feature. This is called only if `apply` changed nothing.

        If True, the request succeeds and reports that the feature changed nothing. If False, the request fails. The default is True
        because `apply` raises an error if there is nothing to change. Override this method if `apply` does not raise an error in
        that case.
        """
        return self.apply(cfg) == cfg
