"""The parameters in a checkpoint of plain Orbax as the weights of an experiment's model."""

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
    """See `axlearn_core.contracts.parts.Weights`.

    Attributes:
        trees: the checkpoint, with the one item that has the parameters.
        experiment: the root config that the model belongs to.
        layout: how the parameters are laid out.
        step: 0, as the checkpoint of an import begins with.
    """

    step = 0

    def __init__(self, path: str, experiment: Any, *, item: str | None = None, layout: str | None = None):
        """Compares the arrays of a checkpoint with those of a model.

        Args:
            path: of the checkpoint.
            experiment: a root config.
            item: the item with the parameters; None goes by the names of items.
            layout: one of `LAYOUTS`; None goes by the arrays.

        Raises:
            CheckpointError: Orbax cannot read it, or its arrays are not those of the model; lists every difference.
            RequestError: it is not clear which item has the parameters.
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
            {p: self._stored[of] for p, of in self._paths.items()},
            fix="give the experiment whose parameters these are, with its features and sizes, or another layout",
        )

    @cached_property
    def functional(self) -> Functional:
        """The model."""
        return Functional.of(self.config)

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
        """Paths of the arrays of the item that are not parameters."""
        return sorted(self._stored.keys() - self._paths.values())

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """See `Weights.specs`; in the dtypes of the model, not of the files."""
        return {**self.functional.abstract, **self.functional.variables}

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """See `Weights.read`. Says which dtypes change."""
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
            log_message(f"note: arrays of {old} become {new}, which the model has")
        return {path: loaded[self._paths[path]].astype(specs[path].dtype) for path in places}


def choose_item(trees: OrbaxTrees, item: str | None) -> OrbaxTrees:
    """The checkpoint with the one item that has the parameters.

    Raises:
        RequestError: several may be meant, or there is no item of this name.
    """
    names = list(trees.items)
    usual_names = [layout.item for layout in LAYOUTS.values()]
    candidates = (
        [item] if item is not None else names if len(names) == 1 else [n for n in usual_names if n in names][:1]
    )
    if not candidates or candidates[0] not in names:
        close = nearest(item or "", [str(n) for n in names], limit=1)
        raise RequestError(
            f"{trees.path}: {'which item has the parameters?' if item is None else f'there is no item {item!r}'}\n"
            f"    items: {', '.join(map(str, names))}\n    fix: give --item {close[0] if close else names[0]}"
        )
    return attrs.evolve(trees, items={candidates[0]: trees.items[candidates[0]]}, prefixed=False)
