"""The order in which versions older than `positions.ORDER` read data.

Runs that started with it keep it.

New runs do not use it. All shards shuffle the documents of a record in the same way, so with fewer records than shards, a
batch contains duplicate rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from axlearn_plugins_transformer.text.records import Document
from axlearn_plugins_transformer.text.sources import Part

PERIOD = 10_000  # steps of the mixing pattern over which the shards are distributed


def read(source: Any, seed: int, shuffle: bool, shard: int, num_shards: int) -> grain.MapDataset:
    """Return the elements of `source` in the order in which a shard reads them."""
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
    """Return the endless rows of one shard.

    Args:
        parts: The data.
        pack: Packs the records of a part into rows.
        seeds: Seed of each part.
        shuffle: Shuffle the records and their documents.
        shard: Index of the shard.
        num_shards: Number of shards of the run.
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
    """A mixture that starts `index` steps into its pattern.

    Each part starts at its beginning.
    """

    def __init__(self, mixed: grain.IterDataset, index: int):
        super().__init__(mixed)
        self.index = index

    def __iter__(self) -> Any:
        iterator = self._parent.__iter__()
        iterator.set_state({**iterator.get_state(), "index": self.index})
        return iterator
