"""Shrink a config until a laptop can train it, without losing what makes it special."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from flax import nnx

from axlearn_core.compose.program import check_program, find_layout_problem
from axlearn_core.config import Node, get, patch, walk
from axlearn_core.config.flat import leaves
from axlearn_core.config.tree import children
from axlearn_core.contracts.capabilities import DeclaresBatches, HasVocabulary
from axlearn_core.contracts.experiment import get_input_config
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import AxlearnError, RequestError

LARGE = 2_000_000
"""Number of parameters from which a model is not small enough."""
UNKNOWN = 64
"""Largest value of a number whose meaning is unknown. Larger ones are sizes."""
PARTS = ("model.", "objective.", "input.", "learner.")

# The smallest sizes for which each kind of layer still does its work, by the name of the field. The numbers of heads, experts
# and rows are divisible by the mesh axes of a proof.
SIZES: Mapping[str, int] = {
    "accumulate_steps": 2,
    "batch_size": 8,
    "channels": 3,
    "conv_width": 4,
    "head_dim": 8,
    "hidden_dim": 32,
    "image_size": 8,
    "kv_rank": 16,
    "max_length": 16,
    "num_classes": 4,
    "num_experts": 4,
    "num_groups": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "original_length": 8,
    "patch_size": 4,
    "query_rank": 16,
    "rank": 4,
    "rope_head_dim": 4,
    "sequence_length": 16,
    "size": 5,  # of an attention window
    "top_groups": 1,
    "top_k": 2,
    "value_head_dim": 8,
    "vocab_size": 64,
    "warmup_steps": 1,
    "window": 5,
}
STEPS = 8
"""Value of `max_steps`."""
ALTERNATIVES: Mapping[str, tuple[int, ...]] = {
    "hidden_dim": (64, 128, 256),
    "head_dim": (16, 32, 64, 128),
    "num_heads": (8, 2),
    "num_kv_heads": (4, 1),
    "num_experts": (8, 16),
    "sequence_length": (32, 64, 128),
    "max_length": (32, 64, 128),
    "batch_size": (16, 32),
    "vocab_size": (128, 256, 512),
    "image_size": (16, 32),
}
"""Sizes to try if the smallest ones do not fit together."""


@attrs.frozen(kw_only=True)
class Shrunk:
    """A small config.

    Attributes:
        config: The config.
        meshes: Shapes of meshes that together have each axis that the config can use.
        changes: Config paths of the sizes that changed, with the old and the new value.
    """

    config: Any
    meshes: tuple[Mapping[str, int], ...]
    changes: Mapping[str, tuple[Any, Any]]


def shrink(config: Any, devices: int = 8) -> Shrunk:
    """Shrink the sizes of a `Trainer.Config`.

    Keeps the classes of all layers, one period of alternating layers, features, dtypes, and at least two experts, heads and
    groups of heads.

    Args:
        config: The config to shrink.
        devices: Number of devices for the meshes.

    Raises:
        RequestError: If a size cannot be shrunk, or if the input does not declare its batches.
    """
    _check_input(config)
    values = dict(_small_values(config))
    small = _first_valid(config, _attempts(config, values), _structure(config))
    changes = {
        leaf.path: (leaf.value, get(small, leaf.path))
        for leaf in leaves(config)
        if _is_size(leaf.value) and get(small, leaf.path) != leaf.value
    }
    return Shrunk(config=small, meshes=tuple(_meshes(small, devices)), changes=changes)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small_values(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the path and the small value of each size."""
    for leaf in leaves(config):
        name = leaf.path.rpartition(".")[2]
        if not leaf.path.startswith(PARTS) or not _is_size(leaf.value):
            continue
        if name == "num_layers":
            yield leaf.path, min(leaf.value, _needed_layers(get(config, leaf.path.rpartition(".")[0])))
        elif name == "num_kv_heads":
            yield leaf.path, _kv_heads(leaf.value, get(config, f"{leaf.path.rpartition('.')[0]}.num_heads"))
        elif name == "hidden_dim" and _is_inner(config, leaf.path):
            yield leaf.path, min(leaf.value, 2 * SIZES[name])
        elif name in SIZES:
            yield leaf.path, min(leaf.value, SIZES[name])
        elif leaf.value > UNKNOWN and leaf.kind == "mathematics" and leaf.path.startswith(("model.", "objective.")):
            yield leaf.path, UNKNOWN
    if config.max_steps > STEPS:
        yield "max_steps", STEPS


def _kv_heads(old: int, heads: Any) -> int:
    """Keep one key head for all, one for each query head, or groups."""
    return min(old, SIZES["num_heads"] if old == heads else SIZES["num_kv_heads"])


def _is_inner(config: Any, path: str) -> bool:
    """Return whether a width belongs to a part of a layer, such as its feed-forward network."""
    node = path.rpartition(".")[0]
    return not any(name == "num_layers" for name in children(get(config, node)))


def _needed_layers(stack: Any) -> int:
    """Return how many layers show each kind: the layers before the pattern, and one period of it."""
    needed = 2
    for _, node in walk(stack):
        names = children(node) if isinstance(node, Node) else {}
        if isinstance(names.get("children"), tuple) and isinstance(names.get("first"), tuple):
            needed = max(needed, len(names["first"]) + max(1, len(names["children"])))
    return needed


def _attempts(config: Any, values: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield combinations of sizes, smallest first."""
    yield dict(values)
    layers = [path for path in values if path.endswith("num_layers")]
    for more in range(1, 5):
        yield {**values, **{path: min(values[path] + more, get(config, path)) for path in layers}}
    options = {
        name: tuple(n for n in larger if any(p.rpartition(".")[2] == name for p in values))
        for name, larger in ALTERNATIVES.items()
    }
    for name, larger in options.items():
        for value in larger:
            yield {**values, **_raised(config, values, {name: value})}
    for scale in (2, 4, 8):  # a layer may need sizes with a certain ratio
        yield {path: min(value * scale, get(config, path)) for path, value in values.items()}


def _raised(config: Any, values: Mapping[str, int], names: Mapping[str, int]) -> dict[str, int]:
    sizes = ((path, path.rpartition(".")[2]) for path in values)
    return {path: min(names[name], get(config, path)) for path, name in sizes if name in names}


def _first_valid(config: Any, attempts: Iterable[Mapping[str, int]], structure: Any) -> Any:
    problem: Exception | None = None
    for values in attempts:
        try:
            small = patch(config, dict(values))
            if _structure(small) == structure:
                return small
        except (AxlearnError, ValueError, TypeError, ZeroDivisionError, AssertionError) as error:
            problem = problem or error
    return _shrink_one_by_one(config, next(iter(attempts), None) or dict(_small_values(config)), structure, problem)


def _shrink_one_by_one(config: Any, values: Mapping[str, int], structure: Any, problem: Exception | None) -> Any:
    """Shrink each size that can be shrunk alone, and raise `RequestError` if the model stays large."""
    small, refused = config, []
    for path, value in values.items():
        try:
            candidate = patch(small, {path: value})
            if _structure(candidate) == structure:
                small = candidate
                continue
        except (AxlearnError, ValueError, TypeError, ZeroDivisionError, AssertionError) as error:
            problem = error
        refused.append(path)
    trained = check_program(_with_one_device(small))
    parameters = sum(spec.size for spec in trained.abstract.values())
    if parameters > LARGE:
        path = refused[0] if refused else "model"
        raise RequestError(
            f"{path}: cannot be shrunk, so the config cannot be proven on this machine\n"
            f"    got: {get(config, path) if refused else parameters}\n"
            f"    expected: a model of at most {LARGE:,} parameters with {path}={values.get(path, '...')}\n"
            f"    cause: {str(problem).splitlines()[0] if problem else 'its layers change with its size'}\n"
            f"    fix: set smaller sizes that go together with --set, such as --set {path}={values.get(path, 2)}"
        )
    return small


def _with_one_device(config: Any) -> Any:
    return attrs.evolve(config, mesh=attrs.evolve(config.mesh, shape={"fsdp": 1}))


def _structure(config: Any) -> Any:
    """Return the classes of the modules, and the names and dtypes of the arrays, without the numbers of layers."""
    trained = check_program(_with_one_device(config))
    parts = [trained.model.describe()] + ([] if trained.objective is None else [trained.objective.describe()])
    modules = {
        (number, _without_indices(".".join(map(str, path))), type(module).__qualname__)
        for number, part in enumerate(parts)
        for path, module in nnx.iter_modules(part)
    }
    arrays = {
        (_without_indices(path), str(spec.dtype), len(spec.shape))
        for path, spec in {**trained.abstract, **trained.variables}.items()
    }
    return modules, arrays


def _without_indices(path: str) -> str:
    return re.sub(r"\b\d+\b", "#", path)


def _meshes(config: Any, devices: int) -> Iterator[Mapping[str, int]]:
    """Yield shapes of meshes that have each axis once, as far as they divide the arrays."""
    groups: list[tuple[str, ...]] = [("data", "fsdp", "tensor"), ("expert", "seq", "tensor")]
    if any("pipeline" in axes for axes in config.mesh.rules.values()) or config.mesh.shape.get("pipeline", 1) > 1:
        groups.append(("pipeline", "fsdp"))
    yielded: set[frozenset[str]] = set()
    for group in groups:
        axes = _fitting_axes(config, group, devices)
        if axes and frozenset(axes) not in yielded:
            yielded.add(frozenset(axes))
            yield dict.fromkeys(axes, 2)


def _fitting_axes(config: Any, axes: tuple[str, ...], devices: int) -> tuple[str, ...]:
    """Return the axes of a group that together divide the parameters and the batch."""
    fitting: tuple[str, ...] = ()
    for axis in axes:
        shape = dict.fromkeys((*fitting, axis), 2)
        count = 2 ** len(shape)
        mesh: Mesh = attrs.evolve(config.mesh, shape=shape)
        if count <= devices and find_layout_problem(attrs.evolve(config, mesh=mesh), mesh, count) is None:
            fitting = (*fitting, axis)
    return fitting


def _check_input(config: Any) -> None:
    source = get_input_config(config)
    if not isinstance(source, DeclaresBatches) or not source.batch_shapes():
        raise RequestError(
            "input: does not declare its batches, so no small ones can be made\n"
            f"    got: {type(source).__qualname__}\n"
            "    expected: an input whose config has `batch_shapes`, with all sizes set\n"
            "    fix: add `batch_shapes` to the input's config (see axlearn_core.contracts.capabilities.DeclaresBatches)"
        )


def synthetic_batch(config: Any, seed: int) -> dict[str, np.ndarray]:
    """Return a random batch in the shapes that the input of a config declares.

    Rows of tokens contain several documents if the input declares `segment_ids`. A tenth of the tokens has no weight in the loss.

    Raises:
        ConfigError: If the input does not declare its batches.
    """
    source = get_input_config(config)
    shapes: Mapping[str, Any] = source.batch_shapes() if isinstance(source, DeclaresBatches) else {}
    rng = np.random.default_rng(seed)
    batch: dict[str, np.ndarray] = {}
    for prefix in sorted({_prefix(name) for name in shapes if _suffix(name)}):
        batch.update(_rows(rng, prefix, shapes, _vocabulary(config)))
    classes = next((value for path, value in walk(config.model) if path.rpartition(".")[2] == "num_classes"), 2)
    for name, (shape, dtype) in shapes.items():
        if name not in batch and np.issubdtype(np.dtype(dtype), np.integer):
            batch[name] = rng.integers(0, classes, shape).astype(dtype)
        elif name not in batch:
            batch[name] = rng.normal(size=shape).astype(dtype)
    return {name: batch[name] for name in shapes}


ROWS = ("tokens", "targets", "segment_ids", "positions", "weights")


def _suffix(name: str) -> str:
    return next((suffix for suffix in ROWS if name == suffix or name.endswith(f"_{suffix}")), "")


def _prefix(name: str) -> str:
    return name.removesuffix(_suffix(name))


def _vocabulary(config: Any) -> int:
    if isinstance(config.model, HasVocabulary):
        return config.model.vocab_size
    return next((value for path, value in walk(config.model) if path.rpartition(".")[2] == "vocab_size"), 2)


def _rows(rng: np.random.Generator, prefix: str, shapes: Mapping[str, Any], vocabulary: int) -> dict[str, np.ndarray]:
    """Return tokens, what follows them, and the documents of each row."""
    names = {suffix: f"{prefix}{suffix}" for suffix in ROWS if f"{prefix}{suffix}" in shapes}
    shape, _ = shapes[next(iter(names.values()))]
    if len(shape) < 2:
        values = rng.uniform(0.5, 1.5, shape)
        return {name: values.astype(shapes[name][1]) for name in names.values()}
    tokens = rng.integers(0, vocabulary, (*shape[:-1], shape[-1] + 1))
    starts = rng.random(shape) < 3 / shape[-1]
    starts[..., 0] = True
    segments = np.cumsum(starts, axis=-1)
    places = np.arange(shape[-1])
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=-1)
    values = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "segment_ids": segments,
        "positions": positions,
        "weights": rng.random(shape) < 0.9,
    }
    return {name: values[suffix].astype(shapes[name][1]) for suffix, name in names.items()}
