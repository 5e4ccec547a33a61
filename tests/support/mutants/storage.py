"""Wrong checkpointers, storages, weights, trackers and tokenizers."""

import json
from pathlib import Path

import jax
import numpy as np

from axlearn_core.checkpoint import LocalStorage, ShardedCheckpointer
from axlearn_core.compose import Functional
from axlearn_core.config import Configurable, node
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from axlearn_testing import CheckpointerSuite, StorageSuite, TokenizerSuite, TrackerSuite, WeightsSuite
from axlearn_testing.train import Line, TrainerSuite
from support.mutants.harness import mutants, suite


class Checkpointer(ShardedCheckpointer):
    @node
    class Config(ShardedCheckpointer.Config):
        wrong: str = ""

    def __init__(self, cfg: Config, *, directory: Path):
        super().__init__(cfg, directory=directory)
        self.wrong = cfg.wrong

    def save(self, step, state, *, extra, metrics):
        if self.wrong == "extra":
            extra = {}
        if self.wrong == "files":
            self.files = {}
        if self.wrong == "late":
            self.late = (step, state, extra, metrics)
            return True
        return super().save(step, state, extra=extra, metrics=metrics)

    def wait(self):
        if late := getattr(self, "late", None):
            step, state, extra, metrics = late
            self.late = None
            super().save(step, state, extra=extra, metrics=metrics)
        super().wait()

    def steps(self):
        return super().steps()[:: -1 if self.wrong == "order" else 1]

    def restore(self, step, like):
        if self.wrong == "sharding":
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        return super().restore(step, like)


def _checkpointer(wrong=""):
    return suite(CheckpointerSuite, Checkpointer.Config(wrong=wrong))


CHECKPOINTERS = mutants(
    _checkpointer(),
    {
        "does not save `extra`": (_checkpointer("extra"), "test_restore_returns_saved_state"),
        "lists the newest step first": (_checkpointer("order"), "test_steps_are_listed_oldest_first"),
        "does not save the text files": (_checkpointer("files"), "test_checkpoint_contains_text_files"),
        "ignores shardings": (
            _checkpointer("sharding"),
            "test_restore_uses_requested_shardings",
        ),
    },
) + mutants(
    _checkpointer(),
    {
        "reads the state after `save` returns": (
            _checkpointer("late"),
            "test_state_can_be_donated_after_save",
        )
    },
    errors=(RuntimeError,),  # the array is deleted
)


class Whole(LocalStorage):
    def read_into(self, path, begin, buffer):
        data = self.read(path)[begin : begin + len(buffer)]
        buffer[: len(data)] = data  # truncation goes unnoticed


class Plain(LocalStorage):
    def write(self, path, chunks):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:  # in place, so a reader sees half of it
            for chunk in chunks:
                opened.write(chunk)


class Merging(LocalStorage):
    def commit(self, source, target):
        for file in self.list(f"{source}/"):  # one after the other, over existing files
            self.write(f"{target}/{file.path.removeprefix(source + '/')}", [self.read(file.path)])
        super().delete(source)


class Keeping(LocalStorage):
    def delete(self, path):
        pass


class Prefixes(LocalStorage):
    def delete(self, path):
        for file in self.list(path):  # deleting "a" also deletes "ab"
            super().delete(file.path)


class Unsorted(LocalStorage):
    def list(self, prefix=""):
        return super().list(prefix)[::-1]


class Untyped(LocalStorage):
    def read(self, path):
        return (self.root / path).read_bytes()


def _storage(cls):
    return suite(StorageSuite, None, uri="{tmp}/there", storage=lambda self, uri: cls(uri))


STORAGES = mutants(
    _storage(LocalStorage),
    {
        "accepts a truncated file": (_storage(Whole), "test_truncated_file_raises"),
        "writes in place": (_storage(Plain), "test_failed_write_keeps_old_file"),
        "commits over existing files": (_storage(Merging), "test_commit_is_atomic"),
        "deletes nothing": (_storage(Keeping), "test_delete_is_idempotent"),
        "deletes by prefix": (_storage(Prefixes), "test_delete_is_idempotent"),
        "lists files out of order": (_storage(Unsorted), "test_list_returns_sizes_by_prefix"),
    },
) + mutants(
    _storage(LocalStorage),
    {"raises the operating system's errors": (_storage(Untyped), "test_an_empty_storage_has_no_files")},
    errors=(FileNotFoundError,),
)


class Tensors:
    """Weights of a line."""

    def __init__(self, wrong):
        self.wrong, self.experiment, self.config = wrong, TrainerSuite().trainer(), Line.Config()
        self.step, self.tokenizer = (-1 if wrong == "step" else 3), None

    def specs(self):
        specs = Functional.from_config(self.config).abstract
        return {"other": specs["weight"]} if self.wrong == "path" else dict(specs)

    def read(self, pattern="**", shardings=None):
        if self.wrong != "silent" and (pattern.startswith("no.") or (shardings and "no.such.tensor" in shardings)):
            raise RequestError("unknown")
        if shardings == {} and self.wrong != "default":
            raise RequestError("without a sharding")
        value = np.arange(8, dtype=np.float32).reshape(4, 2)
        if self.wrong == "dtype":
            value = value.astype(np.float16)
        if self.wrong == "devices" and shardings:
            value = value + 1
        place = (shardings or {}).get("weight")
        return {"weight": jax.device_put(value, place or jax.local_devices()[0])}


def _weights(wrong=""):
    return suite(WeightsSuite, None, weights=lambda self, tmp_path: Tensors(wrong))


WEIGHTS = mutants(
    _weights(),
    {
        "has a negative step": (_weights("step"), "test_properties_are_valid"),
        "has different paths than the model": (_weights("path"), "test_specs_match_model"),
        "reads a different dtype than declared": (_weights("dtype"), "test_tensors_match_specs"),
        "has different values on different devices": (_weights("devices"), "test_shardings_do_not_change_values"),
        "accepts unknown paths": (_weights("silent"), "test_invalid_requests_raise"),
        "places tensors that have no sharding": (_weights("default"), "test_invalid_requests_raise"),
    },
)


class Tracker(Configurable):
    """A tracker that writes one line of JSON per call."""

    @node
    class Config(Configurable.Config["Tracker"]):
        wrong: str = ""

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.wrong, self.folder, self.lines, self.closed = cfg.wrong, Path(run_dir), [], False

    def start(self, info):
        if self.wrong == "prints":
            print("starting")
        path = self.folder / "log"
        old = path.read_text().splitlines() if path.is_file() else []
        if self.wrong != "resumes":
            old = [line for line in old if json.loads(line)["step"] <= info.get("start_step", 0)]
        self.lines = old

    def log(self, step, values):
        if self.wrong != "swallows":
            self.lines.append(json.dumps({"step": step, **values}))

    def text(self, step, name, value):
        pass

    def close(self):
        if self.closed and self.wrong == "once":
            raise RuntimeError("closed twice")
        self.closed = True
        if self.folder.is_file() or self.wrong == "forgets":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "log").write_text("\n".join(self.lines))


def _read(run_dir):
    file = run_dir / "log"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(row.pop("step"), row) for row in rows]


def _tracker(wrong="", **more):
    return suite(TrackerSuite, Tracker.Config(wrong=wrong), **more)


READ = {"read": staticmethod(_read)}
TRACKERS = [
    *mutants(_tracker(), {"drops logged values": (_tracker("swallows"), "test_more_steps_write_more_output")}),
    *mutants(
        _tracker("", **READ),
        {
            "prints to standard output": (_tracker("prints", **READ), "test_tracker_accepts_full_run"),
            "writes nothing on close": (_tracker("forgets", **READ), "test_logged_values_can_be_read"),
            "repeats steps of a resumed run": (
                _tracker("resumes", **READ),
                "test_resumed_log_matches_uninterrupted_log",
            ),
        },
    ),
    *mutants(
        _tracker(),
        {"cannot be closed twice": (_tracker("once"), "test_tracker_accepts_full_run")},
        errors=(RuntimeError,),
    ),
]


class Tokenizer(Configurable):
    """Bytes."""

    @node
    class Config(Configurable.Config["Tokenizer"]):
        wrong: str = ""

    def __init__(self, cfg: Config):
        self.wrong, self.bytes = cfg.wrong, ByteTokenizer.Config().build()
        self.vocab_size = 200 if cfg.wrong == "range" else 257
        self.eos_id = 97 if cfg.wrong == "eos" else 256
        self.digest = str(id(self)) if cfg.wrong == "digest" else ""

    def encode(self, text):
        return [*([256] if self.wrong == "front" else []), *self.bytes.encode(text)]

    def decode(self, ids):
        if self.wrong == "strict":
            return bytes(i for i in ids if i < 256).decode()
        if self.wrong == "empty":
            return ""
        text = self.bytes.decode(ids)
        return {"strip": text.strip(), "shrinks": text[:-1]}.get(self.wrong, text)

    def token_bytes(self):
        return self.bytes.token_bytes() * (2 if self.wrong == "bytes" else 1)


def _tokenizer(wrong="", **more):
    return suite(TokenizerSuite, Tokenizer.Config(wrong=wrong), **more)


LOSSY = {"lossless": False}
TOKENIZERS = [
    *mutants(
        _tokenizer(),
        {
            "has ids above `vocab_size`": (_tokenizer("range"), "test_ids_are_below_vocab_size"),
            "uses a letter as the end of a document": (_tokenizer("eos"), "test_text_does_not_encode_to_eos"),
            "adds a token at the start": (_tokenizer("front"), "test_empty_text_has_no_tokens"),
            "loses spaces": (_tokenizer("strip"), "test_decode_inverts_encode"),
            "counts bytes twice": (_tokenizer("bytes"), "test_token_bytes_sum_to_text_bytes"),
            "has a different digest each time": (_tokenizer("digest"), "test_builds_are_deterministic"),
        },
    ),
    *mutants(
        _tokenizer("", **LOSSY),
        {
            "decodes to nothing and claims to be lossy": (
                _tokenizer("empty", **LOSSY),
                "test_decoded_text_round_trips",
            ),
            "loses a character in each round trip": (
                _tokenizer("shrinks", **LOSSY),
                "test_decoded_text_round_trips",
            ),
        },
    ),
    *mutants(
        _tokenizer(),
        {"fails for half a character": (_tokenizer("strict"), "test_decode_accepts_any_ids")},
        errors=(UnicodeDecodeError,),
    ),
]

MUTANTS = [*CHECKPOINTERS, *STORAGES, *WEIGHTS, *TRACKERS, *TOKENIZERS]
