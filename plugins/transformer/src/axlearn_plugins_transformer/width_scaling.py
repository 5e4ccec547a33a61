"""Initializers, multipliers and learning rates that depend on the width as in muP.

Each of these nodes compares the width of the built model with a base width, and does nothing at the base width. See Yang et al.,
2022, arXiv 2203.03466, table 8.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from axlearn_core.config import REQUIRED, Node, factor_of, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn.learner import ParameterRule
from axlearn_core.learn.optimizers import Axes, Growth, Optimizer, width_scale
from axlearn_core.nn.axis_names import matrix_dimensions
from axlearn_core.nn.initializers import Initializer, Normal, VarianceScaling

SCALED_INITIALIZERS = (Normal, VarianceScaling)
"""Initializers that `WidthInitializer` can scale."""


@node
class WidthMultiplier(Node[float]):
    """A factor that is proportional to a power of the width.

    Attributes:
        base_width: Width at which the factor is `value`.
        value: Factor at the base width, or a node that builds it.
        exponent: Power of width / base_width.
    """

    base_width: int = setting(default=REQUIRED, ge=1)
    value: float | Node[float] = setting(default=1.0, gt=0)
    exponent: float = -1.0

    def build(self, *, width: int, **_: object) -> float:
        """Return the factor at a width."""
        return factor_of(self.value, width=width) * (width / self.base_width) ** self.exponent


@node
class HeadScale(Node[float]):
    """A factor for attention scores that is proportional to 1 / head_dim.

    Attributes:
        base_width: Width of the base model. It determines the base head size if the size of a head is relative to the width.
        base_head_dim: Size of a head in the base model, or None to derive it from the base width.
        value: Factor in the base model, a node that builds it, or None for base_head_dim ** -0.5.
    """

    base_width: int = setting(default=REQUIRED, ge=1)
    base_head_dim: int | None = setting(default=None, ge=1)
    value: float | Node[float] | None = setting(default=None, gt=0)

    def build(self, *, size: int, width: int, grows: bool, **_: object) -> float:
        """Return the factor.

        Args:
            size: Size of a query or key.
            width: Width of the model.
            grows: Whether the size of a head is relative to the width.
        """
        shrink = self.base_width / width if grows else 1.0
        if self.base_head_dim is not None:
            shrink = self.base_head_dim / size
        if self.value is None:
            return size**-0.5 * shrink**0.5
        return factor_of(self.value, size=size, width=width, grows=grows) * shrink


@node
class WidthInitializer(Node[Initializer]):
    """Scales the initial values of another initializer by the width, according to the logical axes of the parameter.

    The variance of a hidden matrix is proportional to 1 / fan_in. The variance of a router, or of another map to a fixed number of
    outputs, is proportional to 1 / fan_in ** 2. It is constant for embeddings, output heads and all other parameters.

    Attributes:
        base: Initializer at the base width: `normal-initializer` or `variance-scaling`. Others are used unchanged.
        base_width: Width of the base model.
    """

    base: Node[Initializer] = VarianceScaling()
    base_width: int = setting(default=REQUIRED, ge=1)

    def build(self, *, axes: Sequence[str | None] | None = None, **_: object) -> Initializer:
        """Return the initializer for a parameter with these logical axes. Without axes, it is `base`."""
        base: Any = self.base.build(axes=axes)

        def init(
            key: jax.Array, shape: Sequence[int], dtype: Any, *, in_axis: Sequence[int], out_axis: Sequence[int]
        ) -> jax.Array:
            value = base(key, shape, dtype, in_axis=in_axis, out_axis=out_axis)
            factor = 1.0 if axes is None else self._factor(axes, shape, in_axis, out_axis)
            return value if factor == 1 else (value * factor).astype(dtype)

        return init

    def _factor(
        self, axes: Sequence[str | None], shape: Sequence[int], in_axis: Sequence[int], out_axis: Sequence[int]
    ) -> float:
        base = self.base
        if "embed" not in axes or not isinstance(base, SCALED_INITIALIZERS):
            return 1.0
        ratio = shape[axes.index("embed")] / self.base_width
        target = ratio ** _init_exponent(axes)
        if not isinstance(base, VarianceScaling):
            return target

        def fan(sizes: Sequence[float]) -> float:
            fan_in, fan_out = _product(sizes, in_axis), _product(sizes, out_axis)
            return {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[base.mode]

        # The product of the sizes counts, so it does not matter which axis of a group grows.
        base_sizes: list[float] = list(shape)
        for dims in (in_axis, out_axis):
            if _grows([axes[i] for i in dims]):
                base_sizes[dims[0]] /= ratio
        return target * (fan(shape) / fan(base_sizes)) ** 0.5


def _init_exponent(axes: Sequence[str | None]) -> float:
    """Return the exponent of the width in the standard deviation of a parameter."""
    dims = matrix_dimensions(axes)
    if "vocab" in axes or dims is None or not _grows([axes[i] for i in dims[0]]):
        return 0.0
    outputs = [axes[i] for i in dims[1]]
    # A rank is usually relative to the head size.
    return -0.5 if _grows(outputs) or "rank" in outputs else -1.0


def _grows(names: Sequence[str | None]) -> bool:
    """Return whether the product of the sizes of these axes is proportional to the width."""
    return bool({"embed", "mlp"} & {*names}) or ("head_dim" in names and bool({"heads", "kv"} & {*names}))


def _product(sizes: Sequence[float], dims: Sequence[int]) -> float:
    result = 1.0
    for i in dims:
        result *= sizes[i]
    return result


@node
class WidthRule(ParameterRule):
    """Scales the learning rates of weight matrices by the width.

    Adam and Lion multiply the updates of hidden matrices and routers by base_width / width. Muon multiplies the updates that it
    orthogonalizes by (base_width / width) ** 0.5. Embeddings, output heads, norms, biases and matrices with a fixed number of
    inputs keep their learning rate. The factor also applies to the weight decay.

    Attributes:
        pattern: Parameters that the rule covers; see `ParameterRule`.
        base_width: Width at which the rule changes nothing.
        latents: Whether the ranks of latent attention `grow` with the width or are `fixed`.
    """

    pattern: str = "**"
    base_width: int = setting(default=REQUIRED, ge=1)
    latents: Literal["grow", "fixed"] = "grow"

    def scale_updates(
        self, params: Mapping[str, Any], axes: Axes, optimizers: Mapping[str, Node[Optimizer]]
    ) -> dict[str, float]:
        """Return the factor for the updates of each parameter, by path; see `ParameterRule.scale_updates`.

        Raises:
            ConfigError: If the width cannot be determined, if a matrix has no axis names, or if an optimizer has no rule.
        """
        width = _find_width(params, axes)
        if width == self.base_width:
            return dict.fromkeys(params, self.learning_rate_scale)
        factors = {}
        for path, value in params.items():
            names = axes.get(path) or (None,) * len(value.shape)
            growth = self._growth(path, value.shape, names, width)
            factor = 1.0 if growth is None else width_scale(optimizers[path], names, growth)
            if factor is None:
                raise no_rule(optimizers[path])
            factors[path] = factor * self.learning_rate_scale
        return factors

    def _growth(self, path: str, shape: Sequence[int], names: tuple[str | None, ...], width: int) -> Growth | None:
        """Return the sizes of a weight matrix, or None if the learning rate of the parameter is constant."""
        dims = matrix_dimensions(names)
        if dims is None or "vocab" in names:
            return None
        if not any(name for name in names if name != "layers"):
            raise ConfigError(
                Problem(
                    path=f"model ({path})",
                    message="mup cannot tell which dimensions are inputs: the parameter has no logical axis names",
                    fix='declare it as nnx.Param(value, out_sharding=("embed", "mlp")), or name the axes in `axes` of its layer',
                )
            )
        if not {"embed", "rank"} & {*names}:  # a bias of several heads
            return None
        ratio = width / self.base_width

        def sizes(side: tuple[int, ...]) -> tuple[float, float]:
            size, group = _product(shape, side), [names[i] for i in side]
            is_latent = side is dims[0] and "embed" in group and size != width
            grows = _grows(group) and not (is_latent and self.latents == "fixed")
            grows = grows or (group == ["rank"] and side is dims[1] and self.latents == "grow" and "embed" in names)
            return size, size / ratio if grows else size

        (fan_in, base_in), (fan_out, base_out) = sizes(dims[0]), sizes(dims[1])
        return Growth(fan_in=fan_in, fan_out=fan_out, base_fan_in=base_in, base_fan_out=base_out)


def _find_width(params: Mapping[str, Any], axes: Axes) -> int:
    """Return the width of a model: the size of the `embed` axis of its embeddings and output heads."""
    widths: dict[int, str] = {}
    for path, value in params.items():
        names = axes.get(path) or ()
        if "vocab" in names and "embed" in names:
            widths.setdefault(value.shape[names.index("embed")], path)
    if len(widths) == 1:
        return next(iter(widths))
    raise ConfigError(
        Problem(
            path="learner.rules",
            message="mup cannot tell the width of the model",
            got=", ".join(f"{path} has width {width}" for width, path in widths.items())
            or "no parameter with these axes",
            expected="parameters with the logical axes `vocab` and `embed`, all of one width",
            fix="leave the feature mup out",
        )
    )


def no_rule(optimizer: Node[Any]) -> ConfigError:
    """Return the error for an optimizer without a rule."""
    return ConfigError(
        Problem(
            path="learner.optimizer",
            message="mup does not define how its learning rate depends on the width",
            got=type(optimizer).__qualname__,
            expected="adamw, adam, lion, muon, or a node with the method `width_scale`",
            fix="choose one of these optimizers (--with optimizer:component=adamw), or leave the feature mup out",
        )
    )
