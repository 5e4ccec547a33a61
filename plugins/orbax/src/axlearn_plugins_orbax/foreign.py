"""Steps that plain Orbax wrote. They have no manifest, so their files cannot be verified.

Does not import JAX or Orbax until a step is opened.
"""

from typing import TYPE_CHECKING

import attrs

from axlearn_core.checkpoint.manifest import MANIFEST, STATE, ArrayInfo, Checkpoints, Manifest
from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_plugins_orbax.file_names import COMMITTED, METADATA, TREE_METADATA

if TYPE_CHECKING:
    from axlearn_plugins_orbax.trees import OrbaxTrees


@attrs.frozen
class ForeignSteps:
    """The plain Orbax steps in a folder. See `axlearn_core.contracts.storage.ForeignCheckpoints`.

    Each step is a folder named by its number. The items in it may have any name.

    Attributes:
        place: The folder of checkpoints.
    """

    place: Checkpoints
    writer = "Orbax"

    def steps(self) -> list[int]:
        """Return the steps with Orbax's files that an `OrbaxCheckpointer` did not write."""
        names = self.place.storage.list_names(self.place.folder)
        return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n and self.has(int(n)))

    def has(self, step: int) -> bool:
        """Return True if plain Orbax wrote a step."""
        storage, folder = self.place.storage, f"{self.place.folder}{step}/"
        names = set(storage.list_names(folder))
        if MANIFEST in names or (STATE in names and METADATA in storage.list_names(f"{folder}{STATE}/")):
            return False
        if not isinstance(storage, LocalStorage) and COMMITTED not in names:
            return False  # Orbax is still saving it, or was interrupted
        return METADATA in names or any(
            TREE_METADATA in storage.list_names(f"{folder}{name}/") for name in sorted(names)
        )

    def open(self, step: int) -> "OrbaxTrees":
        """Open the trees of a step."""
        from axlearn_plugins_orbax.trees import OrbaxTrees

        return OrbaxTrees.open(locate(self.place, f"{self.place.folder}{step}"))

    def arrays(self, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return (shape, name of the dtype) of each array in a step, by dotted path."""
        return {p: (tuple(x.shape), str(x.dtype)) for p, x in self.open(step).arrays().items()}

    def describe(self, step: int) -> Manifest:
        """Return a manifest of the arrays in a step, without files."""
        return Manifest(step, {p: ArrayInfo(p, *info) for p, info in self.arrays(step).items()}, {}, {})


def locate(place: Checkpoints, path: str) -> str:
    """Convert a path in the storage of a checkpoints folder to a path or URI for Orbax."""
    if isinstance(place.storage, LocalStorage):
        return str(place.storage.root.absolute() / path)
    return f"{place.name.rstrip('/')}/{path.removeprefix(place.folder)}"
