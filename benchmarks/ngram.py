"""The baseline for the quickstart: byte 5-grams on the same training and held-out files.

    python benchmarks/ngram.py [--order 5] [--json]

An order-n model predicts each byte from the n - 1 bytes before it, with counts and interpolated Witten-Bell smoothing
(Witten & Bell, 1991): p_n(b | c) = (count(c b) + types(c) * p_{n-1}(b | c')) / (count(c) + types(c)). `types(c)` is the
number of different bytes after the context c, and c' is c without its first byte. p_0 is uniform over the 256 bytes.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np

from axlearn_plugins_transformer.text import StandardLibrary


def grams(files: list[bytes], order: int) -> np.ndarray:
    """Return each byte with the `order - 1` bytes before it as uint64, with zeros before the start of a file."""
    codes = []
    for raw in files:
        padded = np.frombuffer(b"\0" * (order - 1) + raw, np.uint8).astype(np.uint64)
        code = np.zeros(len(raw), np.uint64)
        for i in range(order):
            code = (code << np.uint64(8)) | padded[i : i + len(raw)]
        codes.append(code)
    return np.concatenate(codes)


def lookup(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return `values` of the `wanted` keys among the sorted `keys`, or 0 for missing keys."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[at] == queries, values[at], 0).astype(np.float64)


def nats_per_byte(train: list[bytes], held_out: list[bytes], order: int) -> float:
    """Return the mean of -log p over the bytes of `held_out`."""
    train_codes, codes = grams(train, order), grams(held_out, order)
    probability = np.full(len(codes), 1 / 256)
    for n in range(1, order + 1):
        mask = np.uint64((1 << (8 * n)) - 1)
        keys, counts = np.unique(train_codes & mask, return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        totals, types = np.add.reduceat(counts, first), np.diff(np.append(first, len(keys)))
        codes_masked = codes & mask
        count = lookup(keys, counts, codes_masked)
        total = lookup(contexts, totals, codes_masked >> np.uint64(8))
        kinds = lookup(contexts, types, codes_masked >> np.uint64(8))
        has_count = total > 0  # back off to the shorter context if this one never occurred
        mixed = (count + kinds * probability) / np.maximum(total + kinds, 1)
        probability = np.where(has_count, mixed, probability)
    return float(-np.log(probability).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", type=int, default=5, choices=range(1, 9), help="bytes per n-gram")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    start = time.perf_counter()
    source = StandardLibrary.Config().build()
    splits = {}
    for split in ("train", "validation"):
        splits[split] = [Path(f.path).read_bytes() for p in source.parts(split) for f in p.files]
    value = nats_per_byte(splits["train"], splits["validation"], args.order)
    facts = {
        "benchmark": "ngram",
        "order": args.order,
        "nats_per_byte": round(value, 4),
        "bits_per_byte": round(value / math.log(2), 4),
        "train_files": len(splits["train"]),
        "train_bytes": sum(map(len, splits["train"])),
        "validation_files": len(splits["validation"]),
        "validation_bytes": sum(map(len, splits["validation"])),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        print(
            f"{args.order}-gram byte counts: {value:.4f} nats per byte on {facts['validation_files']} held-out files "
            f"({facts['validation_bytes']:,} bytes), counted on {facts['train_files']} files "
            f"({facts['train_bytes']:,} bytes) in {facts['seconds']} s"
        )


if __name__ == "__main__":
    main()
