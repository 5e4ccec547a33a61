"""Store the frozen base of adapters in a narrower dtype.

Layers round a parameter to their compute dtype before they use it. A frozen base never changes, so storing it in that dtype gives
the same results as float32 in half the memory. Layers that do not round (`FullPrecisionRole`) keep their dtype, and so do the
adapters.
"""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, find, get_fields, map, patch
from axlearn_core.config.roles import FullPrecisionRole
from axlearn_core.config.tree import children, with_children
from axlearn_core.contracts.experiment import get_model_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear

Tree = TypeVar("Tree", bound=Node[Any])

_KEEPS = (LoraLinear.Config, FullPrecisionRole)


def store_base(cfg: Tree, dtype: str) -> Tree:
    """Set the dtype in which the model stores its parameters, except those of adapters and of layers with `FullPrecisionRole`.

    Layers that set `param_dtype` themselves keep it.

    Raises:
        ConfigError: The model has no field `param_dtype`.
    """
    model = get_model_config(cfg)
    before = _param_dtype(model)
    if before is None:
        raise ConfigError(
            Problem(
                path="model.param_dtype",
                message="lora cannot set base_dtype: the model does not have this field",
                got=type(model).__qualname__,
                fix="remove base_dtype",
            )
        )
    if before == dtype:
        return cfg
    return patch(cfg, {"model": attrs.evolve(_keep_dtypes(model, before), param_dtype=dtype)})


def _param_dtype(part: object) -> str | None:
    """Return the dtype that a part of a config sets, or None if it inherits it or stores no parameters."""
    return get_fields(part).get("param_dtype") if isinstance(part, Node) else None


def _keep_dtypes(value: Any, inherited: str) -> Any:
    """Set the dtype that nodes inherit on the nodes that must keep it."""
    dtype = _param_dtype(value) or inherited
    value = with_children(value, {name: _keep_dtypes(child, dtype) for name, child in children(value).items()})
    return attrs.evolve(value, param_dtype=dtype) if isinstance(value, _KEEPS) else value


def adapter_dtype(cfg: Node[Any]) -> str | None:
    """Return the dtype that the adapters of a model set, or None if they inherit it."""
    dtypes = {adapters.param_dtype for adapters in find(cfg, LoraLinear).values()}
    return dtypes.pop() if len(dtypes) == 1 else None


def restore_base(cfg: Tree) -> Tree:
    """Undo `store_base`: store all parameters in the dtype of the adapters.

    Call it before the adapters are removed. A dense model is trained in this dtype, and its weights are the sums of the base and
    the adapters.
    """
    dtype = adapter_dtype(cfg)
    if dtype is None or _param_dtype(get_model_config(cfg)) in (None, dtype):
        return cfg

    def inherit(part: Node[Any]) -> Node[Any]:
        keeps = isinstance(part, _KEEPS) and _param_dtype(part) == dtype
        return attrs.evolve(part, param_dtype=None) if keeps else part

    return patch(map(cfg, inherit), {"model.param_dtype": dtype})
