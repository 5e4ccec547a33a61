"""The `precision` feature."""

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from axlearn_core.config import Node, get_options, node, patch
from axlearn_core.errors import Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import require_fields

Tree = TypeVar("Tree", bound=Node[Any])
DType = Literal["float32", "bfloat16", "float16", "float64"]


@node
class UsePrecision(Feature):
    """Sets the dtypes of the model. At least one must be given.

    `param_dtype` is the storage dtype of the parameters, `dtype` the compute dtype of the layers, and `output_dtype`
    the dtype of the logits that the model returns. Losses, norms and softmaxes are always computed in float32. The
    dtypes are set at the root of the model. Dtypes that are not given do not change, and neither do dtypes that a layer
    sets itself.
    """

    stage = "tune"
    example = "dtype=bfloat16"

    param_dtype: DType | None = None
    dtype: DType | None = None
    output_dtype: DType | None = None

    def validate(self) -> Iterable[Problem]:
        """Check that at least one dtype is given."""
        if not self._dtypes():
            yield Problem(
                path="dtype", message="no dtype is given", expected="at least one of param_dtype, dtype, output_dtype"
            )

    def apply(self, cfg: Tree) -> Tree:
        """Set the fields with the same names on `model`."""
        dtypes = self._dtypes()
        require_fields(cfg, "model", tuple(dtypes), feature="precision")
        return patch(cfg, {f"model.{name}": value for name, value in dtypes.items()})

    def _dtypes(self) -> dict[str, str]:
        return get_options(self, "param_dtype", "dtype", "output_dtype")
