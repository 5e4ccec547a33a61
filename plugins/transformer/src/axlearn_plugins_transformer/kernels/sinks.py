"""Checks of attention sinks, which the ops `attention` and `paged_attention` share."""

from typing import Any

from axlearn_core.errors import RequestError


def check_sinks(op: Any) -> None:
    """Check that an op has no sinks or one per query head.

    Args:
        op: Op with `query`, [..., N, H], and `sinks`, [N] or None.

    Raises:
        RequestError: If the shape of the sinks is not [N].
    """
    heads = op.query.shape[-2]
    if op.sinks is not None and op.sinks.shape != (heads,):
        raise RequestError(
            f"{op.name}: the sinks do not fit the queries\n    got: sinks of shape {list(op.sinks.shape)}, queries of shape "
            f"{list(op.query.shape)}\n    expected: one sink per query head, [{heads}]\n    fix: make the sinks with the layer's "
            "`num_heads`"
        )
