"""Inputs of language models in tests, and their batches."""

import json

import numpy as np

from axlearn_plugins_transformer.text import ByteTokenizer, Files, LanguageModelInput


def config(corpus, **settings):
    source = Files.Config(
        paths=str(corpus / "*.jsonl"), validation_paths=str(corpus / "held.txt"), chunk_bytes=settings.pop("chunk", 200)
    )
    base = {
        "batch_size": 8,
        "sequence_length": 16,
        "source": source,
        "tokenizer": ByteTokenizer.Config(),
        "num_shards": 8,
    }
    return LanguageModelInput.Config(**{**base, **settings})


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def equal(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
        for a, b in zip(left, right, strict=True)
    )


def through_json(state):
    return json.loads(json.dumps(state))
