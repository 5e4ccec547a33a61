"""The order in which versions before `positions.ORDER` read data. Runs that began with it keep it.

It is not for new runs: all shards shuffle the documents of a record alike, so that with fewer records than shards the
rows of a batch are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from axlearn_plugins_transformer.text.records import Document
from axlearn_plugins_transformer.text.sources import Part

PERIOD = 10_000  # steps of a mixing pattern over which shards are spread


def read(source: Any, seed: int, shuffle: bool, shard: int, num_shards: int) -> grain.MapDataset:
    """The elements of `source` in the order in which a shard reads them."""
    records = grain.MapDataset.source(source)
    if shuffle:
        records = records.shuffle(seed=seed)
    return records.repeat()[shard::num_shards]


def training_rows(
    parts: Sequence[Part],
    pack: Callable[[Part, grain.MapDataset], grain.IterDataset],
    seeds: Sequence[int],
    shuffle: bool,
    shard: int,
    num_shards: int,
) -> grain.IterDataset:
    """The endless rows of one shard.

    Args:
        parts: the data.
        pack: makes rows of the records of a part.
        seeds: of the parts.
        shuffle: whether records and their documents are shuffled.
        shard: whose rows they are.
        num_shards: of the run.
    """
    streams = []
    for part, seed in zip(parts, seeds, strict=True):
        records = read(part.records, seed, shuffle, shard, num_shards)
        if shuffle:
            records = records.random_map(_shuffle, seed=seed)
        streams.append(pack(part, records))
    if len(streams) == 1:
        return streams[0]
    return StartAt(grain.IterDataset.mix(streams, [p.weight for p in parts]), shard * PERIOD // num_shards)


def _shuffle(documents: Sequence[Document], rng: np.random.Generator) -> Sequence[Document]:
    return [documents[i] for i in rng.permutation(len(documents))] if len(documents) > 1 else documents


class StartAt(grain.IterDataset):
    """A mixture that begins `index` steps into its pattern, each part at its own beginning."""

    def __init__(self, mixed: grain.IterDataset, index: int):
        super().__init__(mixed)
        self.index = index

    def __iter__(self) -> Any:
        iterator = self._parent.__iter__()
        iterator.set_state({**iterator.get_state(), "index": self.index})
        return iterator
