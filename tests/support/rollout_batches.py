"""Random training batches of rollouts, as `policy-gradient` reads them."""

import numpy as np


def random_batch(seed=0, rows=8, length=16, vocabulary=64, temperature=0.8, packed=False):
    """Return a batch whose trained targets have gaps, as the results of tools leave them.

    Each row has a prompt, an answer and padding. If `packed` is set, it has two such sequences.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (rows, length + 1), dtype=np.int32)
    weights, segment_ids = np.zeros((rows, length), np.float32), np.zeros((rows, length), np.int32)
    positions, rewards = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
    advantages = np.zeros((rows, length), np.float32)
    spans = [(0, length // 2), (length // 2, length)] if packed else [(0, length)]
    for row in range(rows):
        for number, (begin, end) in enumerate(spans, 1):
            stop = int(rng.integers(begin + 4, end + 1))
            start = int(rng.integers(begin, stop - 3))
            segment_ids[row, begin:stop], positions[row, begin:stop] = number, np.arange(stop - begin)
            weights[row, start:stop] = 1
            if stop - start > 4:
                weights[row, start + 2] = 0
            drawn = begin + np.flatnonzero(weights[row, begin:stop])
            advantages[row, drawn], rewards[row, drawn[-1]] = rng.standard_normal(), rng.standard_normal()
    logprobs = -np.abs(4 + 0.5 * rng.standard_normal((rows, length)))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights,
        "segment_ids": segment_ids,
        "positions": positions,
        "advantages": advantages,
        "rollout_logprobs": (logprobs * weights).astype(np.float32),
        "rewards": rewards,
        "temperature": np.full(rows, temperature, np.float32),
    }


def sequences_of(batch):
    """Return (row, positions of the trained targets) of each sequence with trained targets."""
    sequences = []
    for row, ids in enumerate(batch["segment_ids"]):
        for number in np.unique(ids[ids > 0]):
            where = np.flatnonzero((ids == number) & (batch["weights"][row] > 0))
            if len(where):
                sequences.append((row, where))
    return sequences
