"""The arrays of a training state, as a checkpoint describes, stores and compares them."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint.barrier import gather_objects
from axlearn_core.checkpoint.manifest import ArrayInfo
from axlearn_core.contracts.arrays import is_array
from axlearn_core.errors import CheckpointError, WorkError, nearest
from axlearn_core.learn.paths import flatten, unflatten


def describe(state: object) -> dict[str, ArrayInfo]:
    """The shape and dtype of each leaf, which may be abstract, by dotted path.

    Raises:
        CheckpointError: a leaf is not an array that JAX holds as it is.
    """
    return {path: _describe_leaf(path, leaf) for path, leaf in flatten(state).items()}


def collect_arrays(state: object) -> tuple[dict[str, ArrayInfo], dict[str, jax.Array]]:
    """What to save of a state.

    Returns:
        The shape and dtype of each leaf, and the arrays of those that have elements, both by dotted path. Random keys become
        their data.

    Raises:
        CheckpointError: a leaf is not an array that JAX holds as it is, or two have the same path.
    """
    flat = flatten(state)
    if len(flat) != len(jax.tree.leaves(state)):
        raise CheckpointError("two leaves of the state have the same dotted path")
    described = {path: _describe_leaf(path, leaf) for path, leaf in flat.items()}
    values = {p: jax.random.key_data(x) if is_key(x) else jnp.asarray(x) for p, x in flat.items()}
    return described, {p: x for p, x in values.items() if x.size}


def _describe_leaf(path: str, leaf: Any) -> ArrayInfo:
    dtype = leaf.dtype if is_array(leaf) else None
    if dtype is None or not (is_key(leaf) or jax.dtypes.canonicalize_dtype(dtype) == dtype):
        raise CheckpointError(f"{path}: a checkpoint holds JAX arrays, not {type(leaf).__name__} {dtype or repr(leaf)}")
    return ArrayInfo(path, tuple(leaf.shape), str(dtype))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key (or stands for one)."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_impl(leaf: Any) -> Any:
    """The implementation of a random key."""
    impls = []  # `key_impl` takes keys, and a traced one where there is only a shape
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return impls[0]


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of what is stored for a leaf: keys as their data, by default on the first device."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_arrays(like: object, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """What is to be read for the leaves of `like` with these paths: all but those without elements."""
    flat = flatten(like)
    return {p: abstract_leaf(flat[p]) for p in names if np.prod(flat[p].shape)}


def rebuild_state(like: object, names: Iterable[str], loaded: Mapping[str, jax.Array]) -> Any:
    """`like` with the arrays that were read in the place of the leaves with these paths."""
    flat = flatten(like)
    leaves = {p: flat[p] for p in names}
    empty = {p: jnp.zeros(x.shape, x.dtype) for p, x in leaves.items() if not np.prod(x.shape)}
    keys = {p: jax.random.wrap_key_data(loaded[p], impl=key_impl(x)) for p, x in leaves.items() if is_key(x)}
    return unflatten(like, {**empty, **loaded, **keys})


def check_same(
    step: int, expected: Mapping[str, ArrayInfo], stored_arrays: Mapping[str, ArrayInfo], *, unexpected: bool
) -> None:
    """Raises `CheckpointError` with every array that is missing, unexpected or of another shape or dtype."""
    problems = []
    for path, info in expected.items():
        if path not in stored_arrays:
            close = nearest(path, stored_arrays, limit=1)
            problems.append(f"missing: {path} {info}" + (f" (nearest there: {close[0]})" if close else ""))
        elif not _is_same(stored_arrays[path], info):
            problems.append(f"differs: {path}: the checkpoint has {stored_arrays[path]}, expected {info}")
    if unexpected:
        problems += [f"unexpected: {path} {info}" for path, info in stored_arrays.items() if path not in expected]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:20], *more])
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model or optimizer\n{listed}\n"
            "    fix: use the config that it was written with, or another run directory"
        )


def _is_same(stored_array: ArrayInfo, expected: ArrayInfo) -> bool:
    """An array that an earlier version stored under another path may have another dtype."""
    return stored_array.shape == expected.shape and (
        stored_array.dtype == expected.dtype or stored_array.path != expected.path
    )


def agree(local_error: Exception | None, cause: BaseException | None, failure: str = "a checkpoint failed") -> None:
    """Raises on every process if any process has an error, so that none goes on alone.

    If a process is missing for too long, that is the error.

    Args:
        local_error: of this process.
        cause: of `local_error`.
        failure: what the other processes report, before `on process N`.
    """
    if jax.process_count() > 1:
        flags = gather_objects(local_error is not None, "checkpoint")
        if local_error is None and any(flags):
            failed = ", ".join(str(i) for i, flag in enumerate(flags) if flag)
            raise WorkError(f"{failure} on process {failed}; see its error")
    if local_error is not None:
        raise local_error from (cause if cause is not local_error else None)
