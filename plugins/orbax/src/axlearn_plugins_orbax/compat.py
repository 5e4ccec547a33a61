"""All calls to Orbax. No other module imports Orbax, because the import takes most of a second.

This module uses version 1 of the API, which is under `experimental` in Orbax 0.12.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import orbax.checkpoint.experimental.v1 as ocp

from axlearn_plugins_orbax.file_names import TREE_METADATA

FILE_BYTES, CHUNK_BYTES = 64 * 2**20, 32 * 2**20
"""Sizes of files and array chunks in OCDBT. Files of this size can be hashed by several threads."""
FIRST_CHECK, LAST_CHECK = 0.25, 4.0
"""Shortest and longest interval between checks for failures of other processes, in seconds. It grows during a save."""
PLACEHOLDER: Any = ocp.PLACEHOLDER
"""Placeholder for a leaf that is not read."""

# Without OCDBT, Orbax warns at each save that there is nothing to merge.
logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())


@attrs.frozen
class ArrayFormat:
    """Storage format of arrays.

    Attributes:
        ocdbt: Store all arrays of a tree in one database. If False, store each array in a folder.
        zarr3: Use version 3 of the zarr format. If False, use version 2.
        compression: Compress with zstd.
        max_host_bytes: Limit on copies in host memory, in bytes. None copies everything at once.
        timeout_seconds: Time limit for a save. None uses Orbax's limit of 20 minutes.
    """

    ocdbt: bool = True
    zarr3: bool = True
    compression: bool = False
    max_host_bytes: int | None = None
    timeout_seconds: int | None = None

    def context(self) -> ocp.Context:
        """Return the Orbax context to save in this format."""
        context = ocp.Context()
        saving = context.array.saving
        saving.use_ocdbt, saving.use_zarr3, saving.use_compression = self.ocdbt, self.zarr3, self.compression
        if self.ocdbt and self.zarr3:
            saving.ocdbt_target_data_file_size = FILE_BYTES
            saving.storage_options.chunk_byte_size = CHUNK_BYTES
        context.memory.transfer_concurrent_bytes = self.max_host_bytes
        if self.timeout_seconds is not None:
            context.asynchronous.timeout_secs = self.timeout_seconds
        return context


@attrs.frozen
class SaveInProgress:
    """A save that is running in Orbax's threads.

    Attributes:
        response: Orbax's response object.
        timeout_seconds: Time limit of the save, for use in the error message.
    """

    response: Any
    timeout_seconds: int | None

    def finish(self, check: Callable[[], object] = lambda: None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            check: Called every few seconds. If it raises an error, the wait ends with that error, and Orbax's threads continue.

        Raises:
            TimeoutError: The save takes longer than its limit.
            Exception: Any other error from Orbax, TensorStore or `check`.
        """
        pause, previous = FIRST_CHECK, None
        while True:
            try:
                self.response.result(timeout=pause)
                return
            except TimeoutError as error:
                if error is previous:  # Orbax's own timeout, which raises the same error object again
                    limit = (
                        f"{self.timeout_seconds} s (checkpointer.timeout_seconds)"
                        if self.timeout_seconds
                        else "its limit"
                    )
                    raise TimeoutError(f"the save took longer than {limit}: {error}") from error
                previous = error
            check()
            pause = min(2 * pause, LAST_CHECK)


def start_save(path: str, trees: Mapping[str, Any], array_format: ArrayFormat) -> SaveInProgress:
    """Start writing trees of arrays as the items of one checkpoint.

    Args:
        path: Absolute path or URI of the checkpoint. It must not exist.
        trees: Pytrees by item name. The arrays may be donated after this returns.
        array_format: Storage format.
    """
    _find_emulator()
    with array_format.context():
        return SaveInProgress(ocp.save_checkpointables_async(path, dict(trees)), array_format.timeout_seconds)


def load_tree(path: str, item: str | None, tree: Any) -> Any:
    """Read the arrays of one item into the shardings of `tree`.

    Args:
        path: Path of the checkpoint.
        item: Name of the item, or None if the checkpoint is one tree without items.
        tree: Pytree with a `jax.ShapeDtypeStruct` for each array to read, and `PLACEHOLDER` for all others.
    """
    _find_emulator()
    return ocp.load(path, tree, checkpointable_name=item)


def read_tree(path: str, item: str) -> Any:
    """Return the tree of one item as objects with `shape` and `dtype`, without reading arrays."""
    _find_emulator()
    return ocp.metadata(path, checkpointable_name=item).metadata


def read_trees(path: str) -> dict[str | None, Any]:
    """Return the trees of a checkpoint without reading arrays.

    Returns:
        Pytrees of objects with `shape` and `dtype` by item name, excluding items that are not trees of arrays. The name is None if
        the checkpoint is one tree without items.
    """
    _find_emulator()
    try:
        items = ocp.checkpointables_metadata(path).metadata
    except ocp.errors.InvalidLayoutError:
        return {None: ocp.metadata(path, checkpointable_name=None).metadata}
    root = open_path(path)
    if missing := [
        n for n, tree in items.items() if tree is None and (root / n / TREE_METADATA).exists()
    ]:  # Orbax logs why
        raise ValueError(f"the arrays of item {missing[0]} are missing or damaged")
    return {name: tree for name, tree in sorted(items.items()) if isinstance(tree, (Mapping, Sequence))}


def _find_emulator() -> None:
    """Point TensorStore to a Google Cloud Storage emulator, whose address it reads from a separate variable."""
    if (emulator := os.environ.get("STORAGE_EMULATOR_HOST")) is not None:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)


def open_path(path: str) -> Any:
    """Return a path object, with the methods of `pathlib.Path`, for a local path or a `gs://` URI."""
    return ocp.options.FileOptions().path_class(path if "://" in path else os.path.abspath(path))


def is_due(every_steps: int, step: int) -> bool:
    """Return True if Orbax's fixed-interval policy saves a step."""
    policies = ocp.training.save_decision_policies
    context = policies.DecisionContext(
        is_saving_in_progress=False,
        reached_preemption=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions().v0(),
    )
    return policies.FixedIntervalPolicy(every_steps).should_save(_describe(step, None), [], context=context)


@attrs.frozen
class BestSteps:
    """Orbax's `BestN` policy, applied only to checkpoints with a score.

    Orbax's `BestN` keeps every checkpoint while there are at most `count` of them, with or without a score.

    Attributes:
        count: Number of checkpoints to preserve.
    """

    count: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """See `ocp.training.preservation_policies.PreservationPolicy`. `metrics` is a tuple; larger is better."""
        scored = [c for c in checkpoints if c.metrics is not None]
        best = ocp.training.preservation_policies.BestN(get_metric_fn=lambda rank: rank, n=self.count)
        preserved = {
            c.step for c, keep in zip(scored, best.should_preserve(scored, context=context), strict=True) if keep
        }
        return [c.step in preserved for c in checkpoints]


def preserved_steps(
    steps: Sequence[int], ranks: Mapping[int, tuple[float, ...]], *, last: int, every: int | None, best: int
) -> set[int]:
    """Return the steps that any of Orbax's preservation policies keeps.

    Args:
        steps: Steps of all checkpoints.
        ranks: Ranks of the steps that have a metric. Larger is better.
        last: Number of most recent steps to keep.
        every: Keep the steps that are multiples of this number.
        best: Number of top-ranked steps to keep.
    """
    policies = ocp.training.preservation_policies
    selected: list[Any] = [policies.LatestN(last)]
    if every is not None:
        selected.append(policies.EveryNSteps(every))
    if best:
        selected.append(BestSteps(best))
    checkpoints = [_describe(step, ranks.get(step)) for step in sorted(steps)]
    preserved = policies.AnyPreservationPolicy(selected).should_preserve(
        checkpoints, context=policies.PreservationContext()
    )
    return {c.step for c, keep in zip(checkpoints, preserved, strict=True) if keep}


def _describe(step: int, metrics: Any) -> Any:
    return ocp.training.CheckpointMetadata(step=step, path=None, metadata=None, metrics=metrics)  # type: ignore[arg-type]
