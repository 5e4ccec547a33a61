"""Convert between training states and the arrays of a checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint.barrier import name_processes, reduce_objects
from axlearn_core.checkpoint.manifest import ArrayInfo
from axlearn_core.contracts.arrays import is_array
from axlearn_core.errors import CheckpointError, WorkError, nearest
from axlearn_core.learn.paths import flatten, unflatten


def describe(state: object) -> dict[str, ArrayInfo]:
    """Return the shape and dtype of each leaf by dotted path. Leaves may be abstract.

    Raises:
        CheckpointError: If a leaf is not an array, or if JAX does not support its dtype.
    """
    return {path: _describe_leaf(path, leaf) for path, leaf in flatten(state).items()}


def collect_arrays(state: object) -> tuple[dict[str, ArrayInfo], dict[str, jax.Array]]:
    """Return the arrays to save.

    Returns:
        The shape and dtype of each leaf, and the arrays that are not empty, both by dotted path. Random keys are converted
        to their data.

    Raises:
        CheckpointError: If a leaf is not an array, if JAX does not support its dtype, or if two leaves have the same path.
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
        raise CheckpointError(
            f"{path}: cannot save {type(leaf).__name__} {dtype or repr(leaf)}, which is not a JAX array"
        )
    return ArrayInfo(path, tuple(leaf.shape), str(dtype))


def is_key(leaf: Any) -> bool:
    """Return True for a typed random key, concrete or abstract."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_impl(leaf: Any) -> Any:
    """Return the implementation of a random key."""
    impls = []  # `jax.random.key_impl` requires a key, so trace one with this shape
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return impls[0]


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype, and sharding of a leaf's stored array. By default, it is placed on the first device."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_arrays(like: object, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the stored arrays to read for some leaves of `like`, by path. Skip empty arrays."""
    flat = flatten(like)
    return {p: abstract_leaf(flat[p]) for p in names if np.prod(flat[p].shape)}


def rebuild_state(like: object, names: Iterable[str], loaded: Mapping[str, jax.Array]) -> Any:
    """Replace some leaves of `like`, given by path, with the arrays that were read."""
    flat = flatten(like)
    leaves = {p: flat[p] for p in names}
    empty = {p: jnp.zeros(x.shape, x.dtype) for p, x in leaves.items() if not np.prod(x.shape)}
    keys = {p: jax.random.wrap_key_data(loaded[p], impl=key_impl(x)) for p, x in leaves.items() if is_key(x)}
    return unflatten(like, {**empty, **loaded, **keys})


def check_same(
    step: int, expected: Mapping[str, ArrayInfo], stored_arrays: Mapping[str, ArrayInfo], *, unexpected: bool
) -> None:
    """Raise one `CheckpointError` that lists all arrays that are missing or unexpected, or have the wrong shape or dtype."""
    problems = []
    for path, info in expected.items():
        if path not in stored_arrays:
            close = nearest(path, stored_arrays, limit=1)
            problems.append(f"missing: {path} {info}" + (f" (nearest: {close[0]})" if close else ""))
        elif not _is_same(stored_arrays[path], info):
            problems.append(f"differs: {path}: the checkpoint has {stored_arrays[path]}, expected {info}")
    if unexpected:
        problems += [f"unexpected: {path} {info}" for path, info in stored_arrays.items() if path not in expected]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:20], *more])
        raise CheckpointError(
            f"the checkpoint of step {step} belongs to a different model or optimizer\n{listed}\n"
            "    fix: use the config that wrote it, or another run directory"
        )


def _is_same(stored_array: ArrayInfo, expected: ArrayInfo) -> bool:
    """Compare arrays. The dtype may differ if an earlier version stored the array under a different path."""
    return stored_array.shape == expected.shape and (
        stored_array.dtype == expected.dtype or stored_array.path != expected.path
    )


def agree(local_error: Exception | None, cause: BaseException | None, failure: str = "a checkpoint failed") -> None:
    """Raise an error on every process if any process has an error or does not respond in time.

    Args:
        local_error: Error of this process, or None.
        cause: Cause of `local_error`.
        failure: Error message on the other processes, which continues with `on process N`.
    """
    if jax.process_count() > 1:
        failed = reduce_objects(local_error is not None, _name_failed, "checkpoint")
        if local_error is None and failed:
            raise WorkError(f"{failure} on process {failed}; see its error")
    if local_error is not None:
        raise local_error from (cause if cause is not local_error else None)


def _name_failed(flags: Sequence[bool]) -> str:
    return name_processes([process for process, flag in enumerate(flags) if flag])
