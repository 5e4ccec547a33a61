"""Tokens/s of our input compared with plain Grain and Hugging Face `datasets`, and a test with 10,000 files.

    uv run --with datasets python benchmarks/input_speed.py [--megabytes 16] [--rounds 3] [--files 10000] [--json]

The JSONL files contain the Python standard library. All systems tokenize with the same `tokenizer.json`, shuffle,
concatenate, and cut into rows of 1,024 tokens in batches of 8. A pass begins before the pipeline is built, includes
imports, and ends when it has returned as many tokens as the files have. Each pass is a separate process, and the
systems alternate. The ratio is the system's tokens/s over ours with the same number of workers, so a ratio under 1 is
slower than ours. The figures are medians over the rounds.

`--files N` reads a mixture of two sources over N files. It reports the seconds to the first batch, the seconds to
resume from a position in the middle, whether the batches are then the same, and the peak memory early and late.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files as resources
from pathlib import Path

import numpy as np

BATCH, LENGTH, PIECE, BUFFER = 8, 1024, 8000, 1000
TOKENIZER = resources("axlearn_plugins_transformer.text") / "python-2k.json"
CACHE = "cache"
EARLY, LATE = 200, 2000
"""Numbers of batches after which memory is measured."""


def documents():
    """Yield the texts of the standard library in order of their names."""
    from axlearn_plugins_transformer.text.sources import standard_library_files

    for file in itertools.cycle(standard_library_files()):
        yield Path(file.path).read_text(encoding="utf-8")


def write(folder: Path, megabytes: float, count: int) -> int:
    """Write `count` JSONL files with documents of up to 8,000 characters. Return the number of tokens.

    The files have at least `megabytes` MB in total.
    """
    pieces, size = [], 0
    for text in documents():
        for start in range(0, len(text), PIECE):
            pieces.append(text[start : start + PIECE])
            size += len(pieces[-1])
        if size > megabytes * 2**20 and len(pieces) >= count:
            break
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:05}.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in pieces[i::count]))
    tokenizer, _ = load_tokenizer()
    return sum(len(e.ids) + 1 for e in tokenizer.encode_batch_fast(pieces))


def load_tokenizer():
    """Return the tokenizer and the id of the end of a document."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    return tokenizer, tokenizer.token_to_id("<|endoftext|>")


def ours(paths, workers):
    """Yield batches of `language-model-input`."""
    import axlearn_core as ax

    settings = {
        "input.source": {"type": "files", "paths": [str(p) for p in paths]},
        "input.batch_size": BATCH,
        "input.sequence_length": LENGTH,
        "input.workers": workers,
        "evaluators": {},
    }
    return ax.resolve("quickstart", set=settings).config.input.build(seed=0).train()


def grain_alone(paths, workers):
    """Yield batches of Grain, built as in its documentation: files, lines, tokens, rows of concatenated tokens."""
    import grain
    from absl import flags
    from grain import experimental

    tokenizer, eos = load_tokenizer()

    class Lines(experimental.FlatMapTransform):
        def flat_map(self, element):
            return [json.loads(line)["text"] for line in Path(element).read_text().splitlines()]

    def encode(text):
        return {"tokens": np.array([*tokenizer.encode(text).ids, eos], np.int32)}

    lines = grain.MapDataset.source([str(p) for p in paths]).shuffle(seed=0).repeat().to_iter_dataset()
    tokens = experimental.FlatMapIterDataset(lines, Lines()).map(encode)
    rows = experimental.ConcatThenSplitIterDataset(tokens, length_struct={"tokens": LENGTH}).batch(BATCH)
    if not workers:
        return iter(experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=4))
    flags.FLAGS.mark_as_parsed()
    return iter(rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))


def hugging_face(paths, workers, streaming):
    """Yield batches of `datasets`, tokenized, concatenated and cut as in its language-model examples."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer, eos = load_tokenizer()

    def encode(rows):
        return {"tokens": [[*e.ids, eos] for e in tokenizer.encode_batch(rows["text"])]}

    def join(rows):
        joined = np.concatenate([np.asarray(t, np.int32) for t in rows["tokens"]])
        return {"tokens": joined[: len(joined) // LENGTH * LENGTH].reshape(-1, LENGTH)}

    data = datasets.load_dataset(
        "json",
        data_files=[str(p) for p in paths],
        split="train",
        streaming=streaming,
        cache_dir=str(paths[0].parent / CACHE),
    )
    parallel = {} if streaming or not workers else {"num_proc": workers}
    data = data.shuffle(seed=0, **({"buffer_size": BUFFER} if streaming else {}))
    data = data.map(encode, batched=True, remove_columns=["text"], **parallel).map(join, batched=True, **parallel)
    return data.with_format("numpy").iter(BATCH)


SYSTEMS = {
    "ours": ours,
    "grain": grain_alone,
    "datasets": lambda paths, workers: hugging_face(paths, workers, streaming=False),
    "datasets streaming": lambda paths, workers: hugging_face(paths, workers, streaming=True),
}


def measure(system: str, folder: Path, workers: int, tokens: int) -> dict:
    """Run one pass and return its figures.

    Returns:
        Tokens/s in total and after the first batch, seconds to the first batch, and the peak memory of this process.
    """
    paths = sorted(folder.glob("*.jsonl"))
    start, first, count = time.perf_counter(), None, 0
    batches = SYSTEMS[system](paths, workers)
    for batch in batches:
        count += batch["tokens"].shape[0] * LENGTH
        first = first or time.perf_counter() - start
        if count >= tokens:
            break
    seconds = time.perf_counter() - start
    with contextlib.suppress(AttributeError):
        batches.close()
    return {
        "tokens": count,
        "tokens_per_second": count / seconds,
        "after_the_first": (count - BATCH * LENGTH) / (seconds - first),
        "first_batch_seconds": first,
        "rss_mb": memory(),
    }


def memory() -> float:
    """Return the peak memory of this process in MB. `ru_maxrss` would include the memory of its parent."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000


def many_files(folder: Path) -> dict:
    """Measure a mixture over many files: the first batch, resuming in the middle, and memory."""
    import axlearn_core as ax

    source = {"type": "mixture", "sources": {}, "weights": {"most": 3, "rest": 1}}
    for name, part in (("most", "*[0-4].jsonl"), ("rest", "*[5-9].jsonl")):
        source["sources"][name] = {"type": "files", "paths": str(folder / part)}
    settings = {
        "input.source": source,
        "input.batch_size": BATCH,
        "input.sequence_length": LENGTH,
        "evaluators": {},
    }
    build = ax.resolve("quickstart", set=settings).config.input.build
    start = time.perf_counter()
    batches = build(seed=0).train()
    next(batches)
    first = time.perf_counter() - start
    for _ in range(EARLY - 1):
        next(batches)
    early, state = memory(), json.loads(json.dumps(batches.get_state()))
    expected = [next(batches)["tokens"] for _ in range(3)]
    for _ in range(LATE - EARLY - 3):
        next(batches)
    late = memory()
    batches.close()
    start = time.perf_counter()
    resumed = build(seed=0).train()
    resumed.set_state(state)
    again = [next(resumed)["tokens"]]
    seconds = time.perf_counter() - start
    again += [next(resumed)["tokens"] for _ in range(2)]
    resumed.close()
    return {
        "files": len(list(folder.glob("*.jsonl"))),
        "first_batch_seconds": first,
        "resume_seconds": seconds,
        "same_batches": bool(all(np.array_equal(a, b) for a, b in zip(expected, again, strict=True))),
        f"rss_mb_after_{EARLY}": early,
        f"rss_mb_after_{LATE}": late,
    }


def child(*arguments) -> dict:
    """Run this file in a separate process and return its output."""
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    return json.loads(process.stdout.splitlines()[-1])


def compare(folder: Path, rounds: int, tokens: int) -> list[dict]:
    """Return a row for each system and number of workers.

    Each row has the median ratio to our figure of the same round.
    """
    cases = [(s, w) for w in (0, 2) for s in SYSTEMS if not (w and s == "datasets streaming")]
    measured = {case: [] for case in cases}
    for turn in range(rounds):
        for system, workers in cases if turn % 2 == 0 else cases[::-1]:
            shutil.rmtree(folder / CACHE, ignore_errors=True)  # cache of `datasets` for a second pass
            result = child("--one", system, folder, workers, tokens)
            print(f"  {system}, {workers} workers: {result}", file=sys.stderr, flush=True)
            measured[system, workers].append(result)
    rows = []
    for (system, workers), results in measured.items():
        pairs = zip(results, measured["ours", workers], strict=True)
        medians = {k: statistics.median(r[k] for r in results) for k in results[0]}
        ratio = statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs)
        rows.append({"system": system, "workers": workers, **medians, "speed_beside_ours": ratio})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=10_000, help="of the mixture")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("SYSTEM", "FOLDER", "WORKERS", "TOKENS"), help=argparse.SUPPRESS)
    parser.add_argument("--many", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        system, folder, workers, tokens = args.one
        print(json.dumps(measure(system, Path(folder), int(workers), int(tokens))))
        return
    if args.many:
        print(json.dumps(many_files(args.many)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = write(folder / "few", args.megabytes, 64)
        rows = compare(folder / "few", args.rounds, tokens)
        write(folder / "many", args.megabytes, args.files)
        many = child("--many", folder / "many")
    if args.json:
        print(json.dumps({"speed": rows, "many_files": many}))
        return
    print("| system | workers | tokens/s | beside ours | tokens/s after the first batch | first batch, s | MB |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        cells = [row["system"], row["workers"], f"{row['tokens_per_second']:,.0f}", f"{row['speed_beside_ours']:.2f}"]
        cells += [f"{row['after_the_first']:,.0f}", f"{row['first_batch_seconds']:.1f}", f"{row['rss_mb']:.0f}"]
        print(f"| {' | '.join(map(str, cells))} |")
    print(json.dumps(many, indent=1))


if __name__ == "__main__":
    main()
