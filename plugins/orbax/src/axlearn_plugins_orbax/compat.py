"""Everything that this plugin calls of Orbax. No other module imports it, since the import takes most of a second.

The API is version 1, which Orbax 0.12 has under `experimental`.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import orbax.checkpoint.experimental.v1 as ocp

from axlearn_plugins_orbax.file_names import TREE_METADATA

FILE_BYTES, CHUNK_BYTES = 64 * 2**20, 32 * 2**20
"""Sizes of files and of chunks of arrays in OCDBT: several threads can hash files of this size."""
FIRST_CHECK, LAST_CHECK = 0.25, 4.0
"""Seconds between two looks at whether another process failed, which grow during a save."""
PLACEHOLDER: Any = ocp.PLACEHOLDER
"""Stands for a leaf that is not to be read."""

# A tree without OCDBT has nothing to merge, which Orbax warns of at each save.
logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())


@attrs.frozen
class ArrayFormat:
    """How Orbax stores arrays.

    Attributes:
        ocdbt: keeps all arrays of a tree in one database. Otherwise each array has a folder.
        zarr3: writes version 3 of the zarr format, otherwise version 2.
        compression: compresses with zstd.
        max_host_bytes: limit on copies in host memory; None copies everything at once.
        timeout_seconds: limit on a save; None takes Orbax's, which is 20 minutes.
    """

    ocdbt: bool = True
    zarr3: bool = True
    compression: bool = False
    max_host_bytes: int | None = None
    timeout_seconds: int | None = None

    def context(self) -> ocp.Context:
        """Options of Orbax for saving in this format."""
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
    """A save that Orbax's threads are busy with.

    Attributes:
        response: of Orbax.
        timeout_seconds: limit on the save, for the error.
    """

    response: Any
    timeout_seconds: int | None

    def finish(self, check: Callable[[], object] = lambda: None) -> None:
        """Waits until the checkpoint is complete.

        Args:
            check: called every few seconds meanwhile. If it raises, the wait ends with its error; Orbax's threads go on.

        Raises:
            TimeoutError: the save takes longer than its limit.
            Exception: whatever else went wrong in Orbax, in TensorStore or in `check`.
        """
        pause, previous = FIRST_CHECK, None
        while True:
            try:
                self.response.result(timeout=pause)
                return
            except TimeoutError as error:
                if error is previous:  # Orbax's own, which it raises again
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
    """Starts to write trees of arrays, each as an item of one checkpoint.

    Args:
        path: of the checkpoint, absolute or a URI; it must not exist.
        trees: item name -> pytree. The arrays may be donated once this returns.
        array_format: how to store them.
    """
    _find_emulator()
    with array_format.context():
        return SaveInProgress(ocp.save_checkpointables_async(path, dict(trees)), array_format.timeout_seconds)


def load_tree(path: str, item: str | None, tree: Any) -> Any:
    """Reads the arrays of one item, in the shardings of `tree`.

    Args:
        path: of the checkpoint.
        item: the item's name; None if the checkpoint is one tree without items.
        tree: has a `jax.ShapeDtypeStruct` for each array to read, and `PLACEHOLDER` for all others.
    """
    _find_emulator()
    return ocp.load(path, tree, checkpointable_name=item)


def read_tree(path: str, item: str) -> Any:
    """Describes the tree of one item without reading arrays: objects with `shape` and `dtype`."""
    _find_emulator()
    return ocp.metadata(path, checkpointable_name=item).metadata


def read_trees(path: str) -> dict[str | None, Any]:
    """Describes the trees of a checkpoint without reading arrays.

    Returns:
        Item name -> pytree of objects with `shape` and `dtype`. Items that are not trees of arrays are left out. The name
        is None if the checkpoint is one tree without items.
    """
    _find_emulator()
    try:
        items = ocp.checkpointables_metadata(path).metadata
    except ocp.errors.InvalidLayoutError:
        return {None: ocp.metadata(path, checkpointable_name=None).metadata}
    root = open_path(path)
    if lost := [
        n for n, tree in items.items() if tree is None and (root / n / TREE_METADATA).exists()
    ]:  # Orbax logs why
        raise ValueError(f"the arrays of item {lost[0]} are missing or damaged")
    return {name: tree for name, tree in sorted(items.items()) if isinstance(tree, (Mapping, Sequence))}


def _find_emulator() -> None:
    """Points TensorStore to an emulator of Google's store. It has a variable of its own for that."""
    if (emulator := os.environ.get("STORAGE_EMULATOR_HOST")) is not None:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)


def open_path(path: str) -> Any:
    """A local path, absolute, or a URI of Google's store; with the methods of `pathlib.Path`."""
    return ocp.options.FileOptions().path_class(path if "://" in path else os.path.abspath(path))


def is_due(every_steps: int, step: int) -> bool:
    """Whether Orbax's policy of fixed intervals saves a step."""
    policies = ocp.training.save_decision_policies
    context = policies.DecisionContext(
        is_saving_in_progress=False,
        reached_preemption=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions().v0(),
    )
    return policies.FixedIntervalPolicy(every_steps).should_save(_describe(step, None), [], context=context)


@attrs.frozen
class BestSteps:
    """Orbax's `BestN` over those checkpoints alone that have a score.

    `BestN` keeps every checkpoint while there are at most `count` of them, whether they have a score or not.

    Attributes:
        count: how many to preserve.
    """

    count: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """See `ocp.training.preservation_policies.PreservationPolicy`. `metrics` is a tuple that grows with the quality."""
        scored = [c for c in checkpoints if c.metrics is not None]
        best = ocp.training.preservation_policies.BestN(get_metric_fn=lambda rank: rank, n=self.count)
        preserved = {
            c.step for c, keep in zip(scored, best.should_preserve(scored, context=context), strict=True) if keep
        }
        return [c.step in preserved for c in checkpoints]


def preserved_steps(
    steps: Sequence[int], ranks: Mapping[int, tuple[float, ...]], *, last: int, every: int | None, best: int
) -> set[int]:
    """The steps that any of Orbax's preservation policies keeps.

    Args:
        steps: of all checkpoints.
        ranks: of the steps that have a metric; larger is better.
        last: how many of the newest to keep.
        every: keep the steps that this divides.
        best: how many of those with the largest rank to keep.
    """
    policies = ocp.training.preservation_policies
    chosen: list[Any] = [policies.LatestN(last)]
    if every is not None:
        chosen.append(policies.EveryNSteps(every))
    if best:
        chosen.append(BestSteps(best))
    checkpoints = [_describe(step, ranks.get(step)) for step in sorted(steps)]
    preserved = policies.AnyPreservationPolicy(chosen).should_preserve(
        checkpoints, context=policies.PreservationContext()
    )
    return {c.step for c, keep in zip(checkpoints, preserved, strict=True) if keep}


def _describe(step: int, metrics: Any) -> Any:
    return ocp.training.CheckpointMetadata(step=step, path=None, metadata=None, metrics=metrics)  # type: ignore[arg-type]
