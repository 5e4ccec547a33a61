"""Checkpoints that plain Orbax wrote: readable, without a manifest that says whether their files are whole."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint.manifest import MANIFEST, STATE, ArrayInfo, Checkpoints, Manifest
from axlearn_core.errors import CheckpointError
from axlearn_core.learn.paths import flatten, path_of

METADATA, TREE_METADATA = "_CHECKPOINT_METADATA", "_METADATA"
"""Orbax's last file in a checkpoint, and its file beside the arrays of each tree."""


@attrs.frozen
class ForeignTree:
    """The trees of one checkpoint of Orbax.

    Attributes:
        path: of the checkpoint, absolute or a URI.
        items: item name -> pytree of objects with `shape` and `dtype`; the name is None if there are no items.
    """

    path: str
    items: Mapping[str | None, Any]

    @classmethod
    def open(cls, path: str) -> "ForeignTree":
        """Reads what a checkpoint holds, without its arrays.

        Raises:
            CheckpointError: Orbax cannot read it, or it has no arrays.
        """
        from axlearn_plugins_orbax import api

        try:
            items = api.read_trees(path)
        except Exception as error:  # Orbax raises errors of many kinds for what is no checkpoint
            raise CheckpointError(f"Orbax cannot read {path}: {str(error).splitlines()[0]}") from error
        if not items:
            raise CheckpointError(f"the Orbax checkpoint {path} has no tree of arrays")
        return cls(path, items)

    def arrays(self) -> dict[str, Any]:
        """Dotted path -> object with `shape` and `dtype`. With several items, a path begins with the item's name."""
        return {
            self._prefix(item) + path: leaf
            for item, tree in self.items.items()
            for path, leaf in flatten(tree).items()
            if _is_array(leaf)
        }

    def read(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads arrays by the paths of `arrays`, in the shardings of `like`."""
        from axlearn_plugins_orbax import api

        loaded: dict[str, jax.Array] = {}
        for item, tree in self.items.items():
            prefix = self._prefix(item)

            def choose(keys: Any, _: Any, prefix: str = prefix) -> Any:
                return like.get(prefix + path_of(keys), api.PLACEHOLDER)

            wanted = jax.tree_util.tree_map_with_path(choose, tree)
            paths = [p for p in flatten(tree) if prefix + p in like]
            if paths:
                arrays = flatten(api.load_tree(self.path, item, wanted))
                loaded |= {prefix + p: arrays[p] for p in paths}
        return loaded

    def _prefix(self, item: str | None) -> str:
        return f"{item}." if len(self.items) > 1 else ""


@attrs.frozen
class ForeignSteps:
    """The steps of plain Orbax among the checkpoints of a run.

    Attributes:
        place: where the checkpoints lie.
        locate: path in the storage -> path as Orbax takes it.
    """

    place: Checkpoints
    locate: Callable[[str], str]

    def steps(self) -> list[int]:
        """The steps that have Orbax's files and are not of an `OrbaxCheckpointer`."""
        paths = [f.path.removeprefix(self.place.folder) for f in self.place.storage.list(self.place.folder)]
        names = {p.partition("/")[0] for p in paths}
        return sorted(int(n) for n in names if n.isdecimal() and _is_foreign(n, paths))

    def has(self, step: int) -> bool:
        """Whether plain Orbax wrote a step."""
        folder = self.place.folder
        return _is_foreign(
            str(step), [f.path.removeprefix(folder) for f in self.place.storage.list(f"{folder}{step}/")]
        )

    def open(self, step: int) -> ForeignTree:
        """The trees of a step."""
        return ForeignTree.open(self.locate(f"{self.place.folder}{step}"))

    def describe(self, step: int) -> Manifest:
        """The arrays of a step as a manifest without files."""
        arrays = self.open(step).arrays()
        infos = {p: ArrayInfo(p, tuple(x.shape), str(x.dtype)) for p, x in arrays.items()}
        return Manifest(step, infos, {}, {})


def _is_foreign(name: str, paths: list[str]) -> bool:
    inside = {p.removeprefix(f"{name}/") for p in paths if p.startswith(f"{name}/")}
    if inside & {MANIFEST, f"{STATE}/{METADATA}"}:
        return False
    return METADATA in inside or any(p.partition("/")[2] == TREE_METADATA for p in inside)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
