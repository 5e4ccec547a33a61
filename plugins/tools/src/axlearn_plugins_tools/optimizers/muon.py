"""The Muon optimizer."""

import math
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from axlearn_core.config import Node, node, setting
from axlearn_core.contracts.arrays import is_array
from axlearn_core.errors import RequestError
from axlearn_core.learn.optimizers import Axes, Growth, Optimizer, adam_width_scale, convert_learning_rate
from axlearn_core.learn.schedules import Cosine, Schedule
from axlearn_core.nn.axis_names import BATCH_AXES, matrix_dimensions


@node
class Muon(Node[Optimizer]):
    """Orthogonalized momentum for matrices (Jordan, 2024), and AdamW for all other parameters.

    The logical axes of a parameter determine the dimensions of its matrix. `layers` and `experts` are batches of
    matrices. A projection of attention, `[embed, heads, head_dim]`, is a matrix from `embed` to the other two axes. AdamW
    trains all parameters with a `vocab` axis, and all parameters with fewer than two axes per layer, such as norms and biases,
    with or without axis names. Updates are scaled to the size of AdamW's, `rms * sqrt(max(in, out))` (Liu et al., 2025), so
    both can use the same learning rate.

    Attributes:
        learning_rate: Value or schedule.
        momentum: Decay of the momentum.
        nesterov: Use Nesterov momentum.
        newton_schulz_steps: Number of Newton-Schulz iterations per update.
        rms: Root mean square of the updates, relative to the learning rate.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        b1: Decay of AdamW's first moment.
        b2: Decay of AdamW's second moment.
        eps: Added to denominators.
        embedding_rate: Factor applied to the learning rate and weight decay of tables whose first axis is `vocab`: embeddings,
            output layers that are tied to them, and learned positions.
    """

    learning_rate: float | Node[Schedule] = setting(default=Cosine(), ge=0)
    momentum: float = setting(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    newton_schulz_steps: int = setting(default=5, ge=1)
    rms: float = setting(default=0.2, gt=0)
    weight_decay: float = setting(default=0.1, ge=0)
    b1: float = setting(default=0.9, ge=0, lt=1)
    b2: float = setting(default=0.95, ge=0, lt=1)
    eps: float = setting(default=1e-8, gt=0)
    embedding_rate: float = setting(default=1.0, gt=0, hide_default=True)

    def build(self, *, max_steps: int, axes: Axes, mask: Any = None, **_: object) -> Optimizer:
        """Return the transformation for parameters with these logical axes."""
        rate = convert_learning_rate(self.learning_rate, max_steps)
        numbers = {path: None if names is None else matrix_axes(path, names) for path, names in axes.items()}
        labels = {path: "muon" if is_matrix else "adamw" for path, is_matrix in numbers.items()}
        if self.embedding_rate != 1:
            labels |= {path: "embedding" for path, names in axes.items() if names and names[0] == "vocab"}

        def select_axes(tree: Any) -> Any:
            return {k: v if isinstance(v, optax.MaskedNode) else numbers[k] for k, v in tree.items()}

        def scale(tree: Any) -> Any:
            # Do not use jax.tree.map: partition() replaces the parameters of other optimizers with masked nodes.
            masked = optax.MaskedNode
            return {k: v if isinstance(v, masked) else v * _rms_scale(v, numbers[k], self.rms) for k, v in tree.items()}

        matrices = optax.chain(
            scale_by_muon(
                ns_steps=self.newton_schulz_steps,
                beta=self.momentum,
                eps=self.eps,
                nesterov=self.nesterov,
                weight_dimension_numbers=select_axes,
            ),
            optax.stateless(lambda updates, _: scale(updates)),
            optax.add_decayed_weights(self.weight_decay, mask),
            optax.scale_by_learning_rate(rate),
        )
        adamw = optax.adamw(rate, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=mask)

        def label(tree: Any) -> Any:
            # Parameters of other optimizers appear as masked nodes without axes.
            for path, value in tree.items():
                if path in axes and axes[path] is None and is_array(value) and value.ndim > 1:
                    raise RequestError(_unnamed(path))
            return {path: labels.get(path, "adamw") for path in tree}

        transforms: dict[Any, Any] = {"muon": matrices, "adamw": adamw}
        if "embedding" in labels.values():
            transforms["embedding"] = optax.chain(adamw, optax.scale(self.embedding_rate))
        return optax.partition(transforms, label)

    def width_scale(self, axes: tuple[str | None, ...], growth: Growth) -> float:
        """Return the factor for the updates of a weight matrix; see `ScalesWithWidth`.

        The spectral norm of an orthogonalized update should be proportional to sqrt(out / in) (Yang et al., 2023, arXiv
        2310.17813). `_rms_scale` makes it proportional to sqrt(max(in, out)).
        """
        if matrix_axes("", axes) is None:
            return adam_width_scale(growth)
        ratio = growth.fan_out / growth.base_fan_out * growth.base_fan_in / growth.fan_in
        largest = max(growth.fan_in, growth.fan_out) / max(growth.base_fan_in, growth.base_fan_out)
        return (ratio / largest) ** 0.5


def matrix_axes(path: str, names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """Return the input and output dimensions of a parameter, from its logical axes.

    Returns None if the parameter is not a hidden matrix.

    Raises:
        RequestError: If the parameter has two or more dimensions per layer and none of them has a name.
    """
    if "vocab" in names:
        return None
    dims = [i for i, name in enumerate(names) if name not in BATCH_AXES]
    if len(dims) < 2:
        return None
    if not any(names[dim] for dim in dims):
        raise RequestError(_unnamed(path))
    sides = matrix_dimensions(names)
    return None if sides is None else MuonDimensionNumbers(*sides)


def _unnamed(path: str) -> str:
    return (
        f"Muon cannot tell which dimensions of the parameter {path!r} form a matrix: it has no logical axis names\n"
        '    fix: declare it as nnx.Param(value, out_sharding=("embed", "mlp")); if its layer wraps a module, name the axes '
        "in the layer's `axes`; or train it with AdamW"
    )


def _rms_scale(update: Any, numbers: Any, rms: float) -> float:
    return rms * max(math.prod(update.shape[dim] for dim in dims) for dims in numbers) ** 0.5
