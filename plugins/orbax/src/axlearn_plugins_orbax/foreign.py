"""Steps that plain Orbax wrote beside those of a run: readable, without a manifest that says whether their files are whole."""

from collections.abc import Callable

import attrs

from axlearn_core.checkpoint.manifest import MANIFEST, STATE, ArrayInfo, Checkpoints, Manifest
from axlearn_plugins_orbax.trees import METADATA, TREE_METADATA, OrbaxTrees


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

    def open(self, step: int) -> OrbaxTrees:
        """The trees of a step."""
        return OrbaxTrees.open(self.locate(f"{self.place.folder}{step}"))

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
