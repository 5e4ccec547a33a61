"""Write the data of this example: sums of small numbers.

`sums.txt` is text to train a base model. `pairs.jsonl` has preferences: the chosen answer is correct, and the rejected
answer is off by one.
"""

import json
from pathlib import Path

SUMS = [(a, b) for a in range(8) for b in range(8)]


def pair(a: int, b: int) -> dict[str, str]:
    """Return one row of preferences."""
    wrong = a + b + (1 if (a * 8 + b) % 2 else -1)
    return {"prompt": f"{a} plus {b} is ", "chosen": f"{a + b}.", "rejected": f"{wrong}."}


if __name__ == "__main__":
    Path("sums.txt").write_text("".join(f"{a} plus {b} is {a + b}.\n" for a, b in SUMS * 20))
    Path("pairs.jsonl").write_text("".join(json.dumps(pair(*s)) + "\n" for s in SUMS))
