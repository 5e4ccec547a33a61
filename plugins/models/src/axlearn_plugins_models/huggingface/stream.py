"""Stream weights from files to sharded parameters and back, one slice at a time.

Besides the parameters, at most two slices of `SLICE` bytes are in host memory: one as read, and one in the layout of the
parameter. With CPU devices, there are two slices per thread (see `THREADS`). A slice is a range of consecutive rows of a
tensor.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_core.compose.functions import array_function
from axlearn_plugins_models.huggingface.files import DTYPES, OutputTensor, StoredTensor
from axlearn_plugins_models.huggingface.host_arrays import HostArray, in_host_memory
from axlearn_plugins_models.huggingface.table import JOINED, Part, Tensor

SLICE = 32 * 2**20
THREADS = 2
Params = dict[str, Any]


def read(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], like: Mapping[str, Any]) -> Params:
    """Read the parameters of a model, in the dtypes and shardings of `like`.

    Args:
        tensors: Tensors from `table.layout`.
        stored: Tensors in the files, which have been checked.
        like: Path -> abstract array with its sharding. Other parameters are not read.

    Raises:
        CheckpointError: If a file has become shorter since it was checked.
    """
    needed = [t for t in tensors.values() if any(part.path in like for part in t.parts)]
    needed.sort(key=lambda t: (stored[t.name].file, stored[t.name].start))
    if all(in_host_memory(spec.sharding) for spec in like.values()):
        return _read_to_host(needed, stored, like)
    params: Params = {}
    for tensor in needed:
        for part, start, piece in _pieces(tensor, stored[tensor.name]):
            if part.path not in like:
                continue
            want = like[part.path]
            if part.path not in params and piece.shape == want.shape and piece.dtype == want.dtype:
                params[part.path] = _put_piece(piece, want.sharding)
                continue
            if part.path not in params:
                params[part.path] = _zeros(want.shape, want.dtype, want.sharding)
            spec = tuple(want.sharding.spec) if isinstance(want.sharding, NamedSharding) else ()
            placed = _put_piece(piece, _fitting_sharding(want.sharding, spec[len(part.index) :], piece.shape))
            params[part.path] = _put(params[part.path], placed, jnp.asarray(start, jnp.int32), want.sharding)
    return params


def _read_to_host(needed: Sequence[Tensor], stored: Mapping[str, StoredTensor], like: Mapping[str, Any]) -> Params:
    """Read into the memory that CPU devices compute with, a few tensors at a time, because allocating new pages is slow."""
    paths = {part.path for tensor in needed for part in tensor.parts if part.path in like}
    arrays = {path: HostArray(like[path]) for path in paths}

    def fill(tensor: Tensor) -> None:
        for part, start, piece in _pieces(tensor, stored[tensor.name]):
            if part.path in arrays:
                arrays[part.path].put(piece, start)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(fill, needed):
            pass
    return {path: array.finish() for path, array in arrays.items()}


def same(a: StoredTensor, b: StoredTensor) -> bool:
    """Return whether two stored tensors are bitwise equal."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(
        np.array_equal(a.rows(*rows).view(np.uint8), b.rows(*rows).view(np.uint8))
        for rows in _rows(a.shape, a.bytes, 1)
    )


def values(
    tensors: Mapping[str, Tensor], params: Mapping[str, Any], files: list[list[OutputTensor]]
) -> Iterator[np.ndarray]:
    """Yield the tensors of some files in their stored layout, one at a time; the inverse of `read`."""
    for name, code, shape in (output for file in files for output in file):
        tensor, pieces = tensors[name], []
        for part in tensor.parts:
            param = params[part.path]
            piece = param if not part.index else _row(param, jnp.asarray(part.index, jnp.int32))
            pieces.append(_to_theirs(part, np.asarray(piece)))
        names = [a for group in tensor.parts[0].axes.outer for a in group]
        value = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=names.index(JOINED))
        yield value.reshape(shape).astype(DTYPES[code], copy=False)


def _rows(shape: tuple[int, ...], size: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the first axis. Each has at most `SLICE` bytes and a multiple of `unit` rows."""
    if not shape:
        yield 0, 1
        return
    step = max(1, SLICE * shape[0] // max(size * unit, 1)) * unit
    for begin in range(0, shape[0], step):
        yield begin, min(begin + step, shape[0])


def _pieces(tensor: Tensor, stored: StoredTensor) -> Iterator[tuple[Part, tuple[int, ...], np.ndarray]]:
    """Yield (part, first index in the parameter, values in the parameter's layout) for the slices of a tensor."""
    outer = tensor.parts[0].axes.outer
    leading = outer[0] if outer else ()
    if leading[:1] != (JOINED,):
        rows = stored.shape[0] if stored.shape else 1
        yield from _slices(tensor, tensor.parts, stored, 0, rows, leading[0] if leading else "")
        return
    for part in tensor.parts:  # each has its own rows of the file
        unit = part.product(leading[1:])
        yield from _slices(tensor, (part,), stored, part.offset * unit, part.length * unit, part.axes.joined[0])


def _slices(
    tensor: Tensor, parts: Sequence[Part], stored: StoredTensor, base: int, rows: int, first: str
) -> Iterator[tuple[Part, tuple[int, ...], np.ndarray]]:
    """Yield the slices of `parts`, which have the rows from `base` on. `first` is the first single axis of the rows."""
    if not all(any(group[:1] == (first,) for group in part.axes.ours) for part in parts):
        first = ""  # its entries are not adjacent in a parameter
    unit = rows // parts[0].sizes[first] if first else rows
    size = stored.bytes * rows // max(1, stored.shape[0]) if stored.shape else stored.bytes
    for begin, end in _rows((rows,), size, unit):
        raw, low, count = stored.rows(base + begin, base + end), begin // unit, (end - begin) // unit
        for part in parts:
            start = (
                low * part.product(group[1:]) if first and group[:1] == (first,) else 0 for group in part.axes.ours
            )
            piece = raw if len(parts) == 1 else _cut(raw, tensor, part, first, count)
            yield part, (*part.index, *start), _to_ours(part, piece, first, count)


def _cut(raw: np.ndarray, tensor: Tensor, part: Part, first: str, count: int) -> np.ndarray:
    """Return the entries of a part along the joined axis of a slice."""
    names = [a for group in part.axes.outer for a in group]
    sizes = {**part.sizes, JOINED: tensor.length, **({first: count} if first else {})}
    before = (slice(None),) * names.index(JOINED)
    return raw.reshape([sizes[a] for a in names])[(*before, slice(part.offset, part.offset + part.length))]


def _to_ours(part: Part, piece: np.ndarray, first: str, count: int) -> np.ndarray:
    """Convert a piece of the file to the parameter's layout. If `first` is given, it has only `count` entries of that axis."""
    sizes = {**part.sizes, first: count} if first else part.sizes
    ours = [sizes[a] for group in part.axes.ours for a in group]
    flat = [0] * len(ours)
    for size, position in zip(ours, part.axes.order, strict=True):
        flat[position] = size
    value = piece.reshape(flat).transpose(part.axes.order)
    return value.reshape([math.prod(sizes[a] for a in group) for group in part.axes.ours])


def _to_theirs(part: Part, piece: np.ndarray) -> np.ndarray:
    """Convert `parameter[part.index]` to the layout of the file, with the joined axes as one axis."""
    value = piece.reshape([part.sizes[a] for group in part.axes.ours for a in group])
    value = value.transpose(sorted(range(value.ndim), key=part.axes.order.__getitem__))
    return value.reshape([part.length if a == JOINED else part.sizes[a] for group in part.axes.outer for a in group])


def _put_piece(piece: np.ndarray, sharding: Any) -> jax.Array:
    """Put a piece on the devices. Each process provides its own shards."""
    if jax.process_count() == 1:
        return jax.device_put(piece, sharding)
    return jax.make_array_from_callback(piece.shape, sharding, lambda index: piece[index])


def _fitting_sharding(sharding: Any, spec: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Return the sharding for a piece of a parameter. Axes that the mesh does not divide evenly are replicated."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts = []
    for size, axis in zip(shape, (*spec, *(None,) * len(shape)), strict=False):
        names = (axis,) if isinstance(axis, str) else tuple(axis or ())
        parts.append(axis if size % math.prod(sharding.mesh.shape[a] for a in names) == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*parts))


@array_function(static=(0, 1, 2))
def _zeros_in(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    return _zeros_in(tuple(shape), jnp.dtype(dtype), sharding)


@array_function(static=(3,), donate=(0,))
def _put(target: jax.Array, piece: jax.Array, start: jax.Array, sharding: Any) -> jax.Array:
    """Return `target` with `piece`, cast to its dtype, written at the index `start`."""
    piece, dtype = piece.astype(target.dtype), target.dtype
    if dtype.itemsize == 2:  # XLA for CPU would convert the whole array to float32 and back for the update
        piece, target = (lax.bitcast_convert_type(x, jnp.uint16) for x in (piece, target))
    piece = piece.reshape((1,) * (target.ndim - piece.ndim) + piece.shape)
    array = lax.dynamic_update_slice(target, piece, [start[i] for i in range(target.ndim)])
    array = lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array
    return lax.with_sharding_constraint(array, sharding)


@array_function()
def _row(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return `array[index]`."""
    count = index.shape[0]
    begin = [*(index[i] for i in range(count)), *(jnp.int32(0) for _ in array.shape[count:])]
    return lax.dynamic_slice(array, begin, (*(1,) * count, *array.shape[count:])).reshape(array.shape[count:])
