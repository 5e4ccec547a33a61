"""Trees of arrays in an Orbax checkpoint, by dotted path."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import jax

from axlearn_core.errors import CheckpointError
from axlearn_core.learn.paths import flatten, format_key_path


@attrs.frozen
class OrbaxTrees:
    """The trees of arrays in one Orbax checkpoint.

    Attributes:
        path: Absolute path or URI of the checkpoint.
        items: Pytrees of objects with `shape` and `dtype`, by item name. The name is None if there are no items.
        prefixed: True if dotted paths start with the name of the item.
    """

    path: str
    items: Mapping[str | None, Any]
    prefixed: bool = False

    @classmethod
    def open(cls, path: str, items: Collection[str] | None = None) -> "OrbaxTrees":
        """Open a checkpoint without reading its arrays.

        Args:
            path: Absolute path or URI of the checkpoint.
            items: Items to open, with unprefixed paths. None opens all items and prefixes their paths if there are several.

        Raises:
            CheckpointError: Orbax cannot read the checkpoint, or it has no arrays.
        """
        from axlearn_plugins_orbax import compat

        try:
            trees: dict[str | None, Any] = (
                compat.read_trees(path) if items is None else {item: compat.read_tree(path, item) for item in items}
            )
        except Exception as error:  # Orbax raises many error types if a directory is not a checkpoint
            raise _unreadable(path, error) from error
        if not trees:
            raise CheckpointError(f"the Orbax checkpoint {path} has no tree of arrays")
        return cls(path, trees, prefixed=items is None and len(trees) > 1)

    def arrays(self) -> dict[str, Any]:
        """Return an object with `shape` and `dtype` for each array, by dotted path."""
        return {
            self._prefix(item) + path: leaf
            for item, tree in self.items.items()
            for path, leaf in flatten(tree).items()
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        }

    def read(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read arrays, named by their paths in `arrays`, into the shardings of `like`.

        Raises:
            CheckpointError: Orbax cannot read the files.
        """
        from axlearn_plugins_orbax import compat

        loaded: dict[str, jax.Array] = {}
        for item, tree in self.items.items():
            prefix = self._prefix(item)

            def choose(keys: Any, _: Any, prefix: str = prefix) -> Any:
                return like.get(prefix + format_key_path(keys), compat.PLACEHOLDER)

            paths = [p for p in flatten(tree) if prefix + p in like]
            if paths:
                try:
                    arrays = flatten(compat.load_tree(self.path, item, jax.tree_util.tree_map_with_path(choose, tree)))
                except Exception as error:  # including errors from TensorStore
                    raise _unreadable(self.path, error) from error
                loaded |= {prefix + p: arrays[p] for p in paths}
        return loaded

    def _prefix(self, item: str | None) -> str:
        return f"{item}." if self.prefixed else ""


def _unreadable(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"Orbax cannot read {path}: {(str(error) or type(error).__name__).splitlines()[0]}")
