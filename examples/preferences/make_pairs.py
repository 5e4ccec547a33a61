"""Write the data of this example: sums of small numbers.

`sums.jsonl` has one document per sum to train a base model, which hedges half of its answers. `pairs.jsonl` has
preferences: the chosen answer is correct and short, and the rejected answer hedges or is off by one. `labelled.jsonl`
has the same answers, one per row. `held_out.jsonl` has the prompts and answers of sums that have no preferences.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SUMS = [(a, b) for a in range(8) for b in range(8)]
HELD_OUT = [(a, b) for a, b in SUMS if (3 * a + 5 * b) % 4 == 0]


def pair(a: int, b: int) -> dict[str, str]:
    """Return one row of preferences."""
    wrong = a + b + (1 if (a * 8 + b) % 2 else -1)
    rejected = f"{wrong}." if (a + b) % 3 == 0 else f"{a + b}, I think."
    return {"prompt": f"{a} plus {b} is ", "chosen": f"{a + b}.", "rejected": rejected}


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSONL."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    texts = [f"{a} plus {b} is {a + b}{end}" for a, b in SUMS for end in (".", ", I think.")] * 20
    random.Random(0).shuffle(texts)
    write("sums.jsonl", [{"text": text} for text in texts])
    pairs = [pair(a, b) for a, b in SUMS if (a, b) not in HELD_OUT]
    write("pairs.jsonl", pairs)
    answers = [(p["prompt"], p[kind], kind == "chosen") for p in pairs for kind in ("chosen", "rejected")]
    write("labelled.jsonl", [{"prompt": p, "completion": c, "label": label} for p, c, label in answers])
    write("held_out.jsonl", [{"prompt": f"{a} plus {b} is ", "answer": f"{a + b}."} for a, b in HELD_OUT])
