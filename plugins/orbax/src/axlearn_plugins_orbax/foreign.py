"""Steps that plain Orbax wrote, beside those of a run or alone. They have no manifest that says whether their files are whole.

Imports neither JAX nor Orbax before a step is opened.
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
    """The steps of plain Orbax in a folder; see `axlearn_core.contracts.storage.ForeignCheckpoints`.

    Steps are folders that are named by their number. The names of the items in them do not matter.

    Attributes:
        place: the folder.
    """

    place: Checkpoints
    writer = "Orbax"

    def steps(self) -> list[int]:
        """The steps that have Orbax's files and are not of an `OrbaxCheckpointer`."""
        files: dict[str, set[str]] = {}
        for file in self.place.storage.list(self.place.folder):
            name, _, path = file.path.removeprefix(self.place.folder).partition("/")
            files.setdefault(name, set()).add(path)
        return sorted(int(n) for n in files if n.isdecimal() and str(int(n)) == n and self._is_foreign(files[n]))

    def has(self, step: int) -> bool:
        """Whether plain Orbax wrote a step."""
        folder = f"{self.place.folder}{step}/"
        return self._is_foreign({f.path.removeprefix(folder) for f in self.place.storage.list(folder)})

    def open(self, step: int) -> "OrbaxTrees":
        """The trees of a step."""
        from axlearn_plugins_orbax.trees import OrbaxTrees

        return OrbaxTrees.open(locate(self.place, f"{self.place.folder}{step}"))

    def arrays(self, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Dotted path -> (shape, name of the dtype) of each array in a step."""
        return {p: (tuple(x.shape), str(x.dtype)) for p, x in self.open(step).arrays().items()}

    def describe(self, step: int) -> Manifest:
        """The arrays of a step as a manifest without files."""
        return Manifest(step, {p: ArrayInfo(p, *of) for p, of in self.arrays(step).items()}, {}, {})

    def _is_foreign(self, files: set[str]) -> bool:
        if files & {MANIFEST, f"{STATE}/{METADATA}"}:
            return False
        if not isinstance(self.place.storage, LocalStorage) and COMMITTED not in files:
            return False  # a save of Orbax that is under way, or was cut off
        return METADATA in files or any(f.partition("/")[2] == TREE_METADATA for f in files)


def locate(place: Checkpoints, path: str) -> str:
    """A path in the storage of a folder of checkpoints, as Orbax takes it."""
    if isinstance(place.storage, LocalStorage):
        return str(place.storage.root.absolute() / path)
    return f"{place.name.rstrip('/')}/{path.removeprefix(place.folder)}"
