"""Small runs on documents of a few letters, one of which can be bad."""

import contextlib
import hashlib
import json
import random

import jax
import jax.numpy as jnp

from axlearn_plugins_transformer.embedding import Embedding
from support import api_runs

WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
BAD = "\N{LATIN SMALL LETTER THORN}"
"""A letter that only the bad document contains."""
SETTINGS = {
    "model.decoder.num_layers": 2,
    "model.decoder.stack.mode": "scan",
    "input.packing": "first-fit",
    "input.sequence_length": 32,
    "checkpointer.every_steps": 2,
    "checkpointer.keep_last": None,
    "trackers": [{"type": "jsonl"}],
    "keep_compiled_step": False,
}


def write_corpus(folder, *, bad=None, letter=BAD, count=150):
    """Write `count` documents as JSONL. Document number `bad` contains a letter."""
    draw = random.Random(0)
    documents = [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(count)]
    if bad is not None:
        documents[bad] = f"a document with {letter} inside"
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return file


def train(run, corpus, *features, steps, **settings):
    """Train on a corpus, on the eight devices of this process."""
    source = {"type": "files", "paths": str(corpus)}
    return api_runs.train(run, *features, steps=steps, **SETTINGS | {"input.source": source} | settings)


def bad_steps(run):
    """Return the steps whose loss is not finite."""
    return [line["step"] for line in api_runs.lines(run) if "loss" in line.get("nonfinite", {})]


def contents(run):
    """Return the hash and the time of change of each file in a run."""
    files = [p for p in run.rglob("*") if p.is_file()]
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


@contextlib.contextmanager
def planted_token(ids, value):
    """Add a value to the embeddings of tokens."""
    original = Embedding.__call__

    def call(self, tokens):
        bad = jnp.isin(tokens, jnp.asarray(ids))[..., None]
        return original(self, tokens) + jnp.where(bad, value, 0.0).astype(self.precision.compute)

    with _replaced(Embedding, call):
        yield


@contextlib.contextmanager
def steep_token(ids, factor):
    """Multiply the gradients of the embeddings of tokens by a factor."""
    original = Embedding.__call__

    def call(self, tokens):
        rows = original(self, tokens)
        extra = jnp.where(jnp.isin(tokens, jnp.asarray(ids))[..., None], (factor - 1) * rows, 0)
        return rows + extra - jax.lax.stop_gradient(extra)

    with _replaced(Embedding, call):
        yield


@contextlib.contextmanager
def scaled_input(layer, factor):
    """Multiply the input of a kind of layer by a factor."""
    original = layer.__call__

    def call(self, x, *args):
        return original(self, x * jnp.asarray(factor, x.dtype), *args)

    with _replaced(layer, call):
        yield


@contextlib.contextmanager
def _replaced(layer, call):
    original, layer.__call__ = layer.__call__, call
    try:
        yield
    finally:
        layer.__call__ = original
