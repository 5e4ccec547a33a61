"""Write the data of this example: sums of two numbers below 100.

python make_data.py [--out data] [--seed 0]

`text.jsonl` has the sums as text, for the base model. `train.jsonl` and `held_out.jsonl` have the same problems with their answers,
for reinforcement learning. The other two files contain no held-out sums.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HELD_OUT = 500


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(args.seed).shuffle(pairs)
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    train, held_out = problems[HELD_OUT:], problems[:HELD_OUT]
    write(args.out / "text.jsonl", ({"text": row["prompt"] + row["answer"]} for row in train))
    write(args.out / "train.jsonl", train)
    write(args.out / "held_out.jsonl", held_out)
    print(f"{len(train)} sums for training and {len(held_out)} held out in {args.out}")


if __name__ == "__main__":
    main()
