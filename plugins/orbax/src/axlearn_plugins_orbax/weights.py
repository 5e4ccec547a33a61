"""The parameters of a plain Orbax checkpoint as the weights of an experiment's model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jax
from jax.sharding import Sharding, SingleDeviceSharding

from axlearn_core.compose import Functional
from axlearn_core.config import Node
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import RequestError, nearest
from axlearn_core.run.notices import log_message
from axlearn_core.run.weights import check_tensors, select_tensors
from axlearn_plugins_orbax.layouts import LAYOUTS, TreeLayout, find_layout
from axlearn_plugins_orbax.trees import OrbaxTrees


class OrbaxWeights:
    """Weights in an Orbax checkpoint. See `axlearn_core.contracts.parts.Weights`.

    Attributes:
        trees: The checkpoint, restricted to the item with the parameters.
        experiment: Root config of the experiment with the model.
        layout: Layout of the parameters.
        step: Always 0, the step of an imported run.
    """

    step = 0

    def __init__(self, path: str, experiment: Any, *, item: str | None = None, layout: str | None = None):
        """Open a checkpoint and compare its arrays with those of the model.

        Args:
            path: Path of the checkpoint.
            experiment: Root config of the experiment.
            item: Item with the parameters, or None to detect it.
            layout: One of `LAYOUTS`, or None to detect it.

        Raises:
            CheckpointError: Orbax cannot read the checkpoint, or its arrays do not match the model. The error lists every
                difference.
            RequestError: The item with the parameters cannot be detected, or does not exist.
        """
        self.experiment = experiment
        self.trees = choose_item(OrbaxTrees.open(path), item)
        (name,) = self.trees.items
        self._stored = self.trees.arrays()
        self.layout: TreeLayout = LAYOUTS[layout] if layout else find_layout(name, self._stored)
        self._paths = self.layout.params(self._stored)
        check_tensors(
            f"{path} (item {name}, layout {self.layout.name})",
            self.specs(),
            {p: self._stored[stored] for p, stored in self._paths.items()},
            fix="specify the experiment that produced these parameters, with its features and sizes, or another layout",
        )

    @cached_property
    def functional(self) -> Functional:
        """The model."""
        return Functional.from_config(self.config)

    @property
    def config(self) -> Node[Any]:
        """The config of the model."""
        return self.experiment.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the experiment's input."""
        node = getattr(getattr(self.experiment, "input", None), "tokenizer", None)
        return None if node is None else node.build()

    @property
    def ignored(self) -> Sequence[str]:
        """Paths of the arrays in the item that are not parameters."""
        return sorted(self._stored.keys() - self._paths.values())

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """See `Weights.specs`. The dtypes come from the model, not from the files."""
        return {**self.functional.abstract, **self.functional.variables}

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """See `Weights.read`. Log the dtypes that change."""
        specs, default = self.specs(), SingleDeviceSharding(jax.local_devices()[0])
        places = select_tensors(pattern, shardings, specs, self.trees.path)
        stored = {path: self._stored[self._paths[path]] for path in places}
        like = {
            self._paths[path]: jax.ShapeDtypeStruct(stored[path].shape, stored[path].dtype, sharding=place or default)
            for path, place in places.items()
        }
        loaded = self.trees.read(like)
        changes = {(str(stored[p].dtype), str(specs[p].dtype)) for p in places if stored[p].dtype != specs[p].dtype}
        for old, new in sorted(changes):
            log_message(f"note: converting {old} arrays to {new}, the model's dtype")
        return {path: loaded[self._paths[path]].astype(specs[path].dtype) for path in places}


def choose_item(trees: OrbaxTrees, item: str | None) -> OrbaxTrees:
    """Return the checkpoint restricted to the item with the parameters.

    Raises:
        RequestError: Several items may have the parameters, or there is no item of this name.
    """
    names = list(trees.items)
    usual_names = [layout.item for layout in LAYOUTS.values()]
    candidates = (
        [item] if item is not None else names if len(names) == 1 else [n for n in usual_names if n in names][:1]
    )
    if not candidates or candidates[0] not in names:
        close = nearest(item or "", [str(n) for n in names], limit=1)
        raise RequestError(
            f"{trees.path}: {'cannot tell which item has the parameters' if item is None else f'item {item!r} does not exist'}\n"
            f"    items: {', '.join(map(str, names))}\n    fix: set --item {close[0] if close else names[0]}"
        )
    return attrs.evolve(trees, items={candidates[0]: trees.items[candidates[0]]}, prefixed=False)
