"""Shrink a config until a laptop can train it, without losing what makes it special."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import attrs
import numpy as np

from axlearn_core.compose import Functional, ModelAndObjective
from axlearn_core.compose.program import find_layout_problem
from axlearn_core.config import Node, get, patch, walk
from axlearn_core.config.flat import leaves
from axlearn_core.config.tree import children
from axlearn_core.contracts.capabilities import DeclaresBatches, FitsModel, HasVocabulary
from axlearn_core.contracts.experiment import get_input_config
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_plugins_verify.prove.shorter_cycles import cycle_lengths, shorten_cycles
from axlearn_plugins_verify.prove.structure import Structure, describe_structure

SMALL, LARGE = 250_000, 2_000_000
"""Number of parameters above which each size is shrunk further by itself, and above which a model cannot be proven."""
UNKNOWN = 64
"""Largest value that a number of unknown meaning may keep. Larger numbers are sizes."""
PARTS = ("model.", "objective.", "input.", "learner.")

# The smallest sizes for which each kind of layer still functions, by field name. The numbers of heads, experts
# and rows are divisible by the mesh axes of a proof.
SIZES: Mapping[str, int] = {
    "accumulate_steps": 2,
    "batch_size": 8,
    "channels": 3,
    "conv_width": 4,
    "dim": 16,  # of embeddings per layer
    "head_dim": 8,
    "hidden_dim": 32,
    "image_size": 8,
    "interval": 8,  # of positions; Ministral 3 has one number for this and `original_length`
    "key_dim": 8,
    "kv_rank": 16,
    "loss_chunk": 4,
    "max_length": 16,
    "num_classes": 4,
    "num_experts": 4,
    "num_groups": 2,
    "num_heads": 4,
    "num_key_heads": 2,
    "num_kv_heads": 2,
    "num_tokens": 48,  # with an embedding per layer; some models have none for the last ones
    "original_length": 8,
    "page_size": 4,
    "patch_size": 4,
    "query_rank": 16,
    "rank": 4,
    "rope_head_dim": 4,
    "sequence_length": 16,
    "size": 5,  # of an attention window
    "state_dim": 16,
    "top_groups": 1,
    "top_k": 2,
    "value_dim": 8,
    "value_head_dim": 8,
    "vocab_size": 64,
    "warmup_steps": 1,
    "window": 5,
}
OPTIONAL = ("loss_chunk",)
"""Sizes that a small config must set, although the large one leaves the choice to the layer."""
SMALLEST_WIDTH, SMALLEST_COUNT = 32, 4
"""Smallest sizes of fields whose names are not known: widths, and numbers of layers, heads or experts."""
REFUSALS = (AxlearnError, ValueError, TypeError, ZeroDivisionError, AssertionError)
"""Errors raised by layers whose sizes do not fit together."""
MORE_ATTEMPTS = 6
"""Number of combinations of sizes to try after the first valid one, in search of one that loses fewer operations."""
INNER = 48
"""Hidden size inside the parts of a layer. It differs from the width, so that a product in the wrong order is an error."""
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
        meshes: Shapes of meshes that together cover each axis that the config can use.
        changes: Config paths of the sizes that changed, with the old and the new value.
        notes: Features of the original config that the small config or its meshes lack.
    """

    config: Any
    meshes: tuple[Mapping[str, int], ...]
    changes: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...] = ()


def shrink(config: Any, devices: int = 8, deadline: float = math.inf) -> Shrunk:
    """Shrink the sizes of a `Trainer.Config`.

    Keeps the classes of all layers, two periods of alternating layers, features, dtypes, the operations of the loss, and at
    least two experts, heads and groups of heads. Long periods become one layer of each kind.

    Args:
        config: The config to shrink.
        devices: Number of devices for the meshes.
        deadline: Time at which to stop, on the clock of `time.monotonic`. The smallest config so far is returned.

    Raises:
        RequestError: If a size cannot be shrunk, if the input does not declare its batches, or if the deadline has passed before
            a config was small enough.
    """
    _check_input(config)
    structure = describe_structure(config)
    candidates = []
    for short in dict.fromkeys((shorten_cycles(config), shorten_cycles(config, irregular=True), config)):
        small, small_structure = _first_valid(short, structure, deadline)
        lost = len(structure.lost_operations(small_structure))
        candidates.append((small == short, lost, len(candidates), short, small, small_structure))
        if small != short and (not lost or time.monotonic() > deadline):
            break
    # Prefer a config that became smaller, then the fewest lost operations.
    *_, short, small, small_structure = min(candidates, key=lambda candidate: candidate[:3])
    if small_structure.parameters > SMALL:
        small, small_structure = _shrink_one_by_one(small, small_structure, deadline)
    lost = structure.lost_operations(small_structure)
    changes = _changes(config, short, small)
    meshes = tuple(_meshes(small, devices))
    notes = [f"the small config does not compute {', '.join(sorted(lost))}"] if lost else []
    if _has_pipeline(config) and not any("pipeline" in shape for shape in meshes):
        notes.append("no mesh with an axis `pipeline` divides the small config, so no pipeline is checked")
    return Shrunk(config=small, meshes=meshes, changes=changes, notes=tuple(notes))


def _changes(config: Any, short: Any, small: Any) -> dict[str, tuple[Any, Any]]:
    """Return the sizes that changed, with the old and the new value. `short` has the shorter cycles of the small config."""
    changed = {
        leaf.path: (leaf.value, get(small, leaf.path))
        for leaf in leaves(short)
        if (_is_size(leaf.value) or _is_unset(leaf)) and get(small, leaf.path) != leaf.value
    }
    old, new = dict(cycle_lengths(config)), dict(cycle_lengths(short))
    changed |= {path: (old[path], new[path]) for path in old.keys() & new.keys() if old[path] != new[path]}
    return changed


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unset(leaf: Any) -> bool:
    return leaf.value is None and leaf.path.rpartition(".")[2] in OPTIONAL


def _small_values(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the path and the small value of each size."""
    for leaf in leaves(config):
        name = leaf.path.rpartition(".")[2]
        if not leaf.path.startswith(PARTS) or not _is_size(leaf.value):
            continue
        if name == "num_layers":
            yield leaf.path, min(leaf.value, _needed_layers(get(config, leaf.path.rpartition(".")[0])))
        elif name in ("num_kv_heads", "num_key_heads"):
            yield leaf.path, _kv_heads(leaf.value, get(config, f"{leaf.path.rpartition('.')[0]}.num_heads"))
        elif name == "rank" and _children_of(config, leaf.path).get("key_dim") == leaf.value:
            yield leaf.path, min(leaf.value, SIZES["key_dim"])  # published configs have one number for both
        elif name == "hidden_dim" and _is_inner(config, leaf.path):
            yield leaf.path, min(leaf.value, INNER)
        elif name in SIZES:
            yield leaf.path, min(leaf.value, SIZES[name])
        elif leaf.value > UNKNOWN and leaf.kind == "mathematics" and leaf.path.startswith(("model.", "objective.")):
            yield leaf.path, UNKNOWN
    if config.max_steps > STEPS:
        yield "max_steps", STEPS


def _kv_heads(old: int, heads: Any) -> int:
    """Keep the grouping: one key head for all query heads, one per query head, or one per group."""
    return min(old, SIZES["num_heads"] if old == heads else SIZES["num_kv_heads"])


def _children_of(config: Any, path: str) -> Mapping[str, Any]:
    """Return the fields of the node that has a field."""
    node = get(config, path.rpartition(".")[0])
    return children(node) if isinstance(node, Node) else {}


def _is_inner(config: Any, path: str) -> bool:
    """Return whether a width belongs to a part of a layer, such as its feed-forward network."""
    node = get(config, path.rpartition(".")[0])
    return not any(inner.rpartition(".")[2] == "num_layers" for inner, _ in walk(node))


def _needed_layers(stack: Any) -> int:
    """Return how many layers cover every kind: the layers before the pattern, and two periods, so that they can be scanned."""
    needed = 2
    for _, node in walk(stack):
        names = children(node) if isinstance(node, Node) else {}
        if isinstance(names.get("children"), tuple) and isinstance(names.get("first"), tuple):
            needed = max(needed, len(names["first"]) + 2 * max(1, len(names["children"])))
    return needed


def _attempts(config: Any) -> Iterator[dict[str, int]]:
    """Yield combinations of sizes, smallest first."""
    values = dict(_small_values(config))
    yield dict(values)
    values |= {leaf.path: SIZES[leaf.path.rpartition(".")[2]] for leaf in leaves(config) if _is_unset(leaf)}
    yield dict(values)
    yield from _more_layers(config, values)
    options = {
        name: tuple(n for n in larger if any(p.rpartition(".")[2] == name for p in values))
        for name, larger in ALTERNATIVES.items()
    }
    raised = [_raised(config, values, {name: value}) for name, larger in options.items() for value in larger]
    yield from ({**values, **sizes} for sizes in raised)
    for scale in (2, 4, 8):  # a layer may need sizes with a certain ratio
        yield {path: _at_most(value * scale, get(config, path)) for path, value in values.items()}
    for more in _more_layers(config, values):  # the last layer may have to be of a certain kind
        yield from ({**more, **sizes} for sizes in raised)


def _more_layers(config: Any, values: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield combinations of sizes with more layers. They may be outside of the scan, which the loss can need."""
    layers = [path for path in values if path.endswith("num_layers")]
    for more in range(1, 5):
        yield {**values, **{path: min(values[path] + more, get(config, path)) for path in layers}}


def _at_most(value: int, old: int | None) -> int:
    return value if old is None else min(value, old)


def _raised(config: Any, values: Mapping[str, int], names: Mapping[str, int]) -> dict[str, int]:
    sizes = ((path, path.rpartition(".")[2]) for path in values)
    return {path: _at_most(names[name], get(config, path)) for path, name in sizes if name in names}


def _first_valid(config: Any, structure: Structure, deadline: float) -> tuple[Any, Structure]:
    """Return the smallest config that loses the fewest operations, and its structure.

    If none is valid, or if the deadline has passed before one was, return `config`.
    """
    best: tuple[Any, Structure] | None = None
    best_values: Mapping[str, int] = {}
    tried: list[Mapping[str, int]] = []
    more = 0

    def take(values: Mapping[str, int]) -> bool:
        """Try sizes that are not yet tried, and keep the best. Return True if they lose no operations."""
        nonlocal best, best_values, more
        if values in tried or time.monotonic() > deadline:
            return False
        tried.append(values)
        more += best is not None
        result = _patched(config, values, structure)
        if result is None:
            return False
        lost = structure.lost_operations(result[1])
        if best is None or len(lost) < len(structure.lost_operations(best[1])):
            best, best_values = result, values
        return not lost

    for values in _attempts(config):
        if more >= MORE_ATTEMPTS:
            break
        if take(values):
            return best or (config, structure)
    if best_values:
        any(map(take, _more_layers(config, best_values)))
    return best or (config, structure)


def _patched(config: Any, values: Mapping[str, int], structure: Structure) -> tuple[Any, Structure] | None:
    """Return the config with new sizes and its structure, or None if it is invalid or its layers or arrays change."""
    try:
        small = patch(config, dict(values))
        if isinstance(source := get_input_config(small), FitsModel):
            small = patch(small, {"input": source.fit_model(small.model)})
        smaller = describe_structure(small)
    except REFUSALS:
        return None
    return (small, smaller) if smaller.parts == structure.parts else None


def _shrink_one_by_one(config: Any, structure: Structure, deadline: float) -> tuple[Any, Structure]:
    """Shrink sizes that can be shrunk alone, the largest first, including fields whose names are not known.

    Stops when the model is small, or at the deadline.

    Raises:
        RequestError: If the model stays large.
    """
    small, refused, small_structure = config, [], structure
    sizes = dict(_small_values(config))
    for path, old in sorted(_module_sizes(config), key=lambda size: -size[1]):
        if small_structure.parameters <= SMALL or time.monotonic() > deadline:
            break
        least = sizes.get(path, 0) if path.rpartition(".")[2] in SIZES else 0
        if least == INNER:
            least = INNER // 2 - 1  # still another size than the width
        options = sorted({sizes.get(path, old), *(n for n in _halved(old) if n > least)})
        candidates = (_patched(small, {path: value}, structure) for value in options if value < old)
        candidate = next((c for c in candidates if c is not None and not structure.lost_operations(c[1])), None)
        if candidate is not None and candidate[1].parameters < small_structure.parameters:
            small, small_structure = candidate
        elif old > SMALLEST_COUNT:
            refused.append(path)
    if small_structure.parameters > LARGE and time.monotonic() > deadline:
        raise RequestError(
            "the time limit was reached before the config was small enough to prove\n"
            f"    got: {small_structure.parameters:,} parameters\n"
            f"    expected: a model that has the same layers with at most {LARGE:,} parameters\n"
            "    fix: allow more time with --minutes"
        )
    if small_structure.parameters > LARGE:
        path = refused[0] if refused else "model"
        raise RequestError(
            f"{path}: cannot be shrunk, so the config cannot be proven on this machine\n"
            f"    got: {f'{get(config, path)}, and ' if refused else ''}{small_structure.parameters:,} parameters\n"
            f"    expected: a model that has the same layers with at most {LARGE:,} parameters\n"
            f"    fix: set smaller sizes that go together with --set, such as --set {path}={sizes.get(path, 2)}"
        )
    return small, small_structure


def _module_sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the path and the value of each size of the model and the objective."""
    for leaf in leaves(config):
        value: Any = leaf.value
        if leaf.path.startswith(("model.", "objective.")) and _is_size(value):
            yield leaf.path, value


def _halved(value: int) -> Iterator[int]:
    """Yield half of a size, then a quarter, and so on. Halving keeps most of the factors that layers may need."""
    least = SMALLEST_WIDTH if value > UNKNOWN else SMALLEST_COUNT
    while value % 2 == 0 and value // 2 >= least:
        value //= 2
        yield value


def _has_pipeline(config: Any) -> bool:
    return any("pipeline" in axes for axes in config.mesh.rules.values()) or config.mesh.shape.get("pipeline", 1) > 1


def _meshes(config: Any, devices: int) -> Iterator[Mapping[str, int]]:
    """Yield mesh shapes that together use each axis once, as far as the axes divide the arrays."""
    trained = ModelAndObjective.from_config(config, Functional.from_config(config.model))
    groups: list[tuple[str, ...]] = [("data", "fsdp", "tensor"), ("expert", "seq", "tensor")]
    if _has_pipeline(config):
        groups.append(("pipeline", "fsdp"))
    yielded: set[frozenset[str]] = set()
    for group in groups:
        axes = _fitting_axes(config, trained, group, devices)
        if axes and frozenset(axes) not in yielded:
            yielded.add(frozenset(axes))
            yield dict.fromkeys(axes, 2)


def _fitting_axes(config: Any, trained: ModelAndObjective, axes: tuple[str, ...], devices: int) -> tuple[str, ...]:
    """Return the axes of a group that together divide the parameters and the batch.

    Args:
        config: The experiment.
        trained: Its model and objective, which do not depend on the mesh.
        axes: Axes of the group.
        devices: Maximum number of devices.
    """
    fitting: tuple[str, ...] = ()
    for axis in axes:
        shape = dict.fromkeys((*fitting, axis), 2)
        count = 2 ** len(shape)
        mesh: Mesh = attrs.evolve(config.mesh, shape=shape)
        if count <= devices and find_layout_problem(config, mesh, count, trained) is None:
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

    Rows of tokens contain several documents if the input declares `segment_ids`. A tenth of the tokens have no weight in the loss.
    Log-probabilities (`..._logprobs`) are those of random tokens, give or take 1, and a `temperature` is near 1.

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
            batch[name] = _values(rng, name, shape, _vocabulary(config)).astype(dtype)
    return {name: batch[name] for name in shapes}


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
    """Return random values for an array of numbers."""
    if name.endswith("_logprobs"):
        return np.minimum(rng.normal(-math.log(vocabulary), 1.0, shape), 0.0)
    return rng.uniform(0.5, 1.5, shape) if name == "temperature" else rng.normal(size=shape)


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
    """Return the tokens of each row, the tokens that follow them, and the row's documents."""
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
