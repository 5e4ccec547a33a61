"""Compare the sampled answers of a tuned model with those of its base, on sums without preferences.

    python win_rate.py runs/base runs/preferred

Each model answers each prompt 20 times. A correct, short answer beats any other answer. Prints the share of such answers of each
model, and the win rate of the second model: the probability that its answer beats a random answer of the first, with ties as half.
"""

import json
import sys
from pathlib import Path

from axlearn_core import load

SAMPLES = 20


def good_answers(run: str) -> list[float]:
    """Return the share of good answers for each prompt."""
    model = load(run)
    shares = []
    for row in map(json.loads, Path("held_out.jsonl").read_text().splitlines()):
        texts = [model.generate(row["prompt"], max_tokens=12, temperature=1.0, seed=i) for i in range(SAMPLES)]
        shares.append(sum(text.split("\n")[0] == row["answer"] for text in texts) / SAMPLES)
    return shares


if __name__ == "__main__":
    base, tuned = (good_answers(run) for run in sys.argv[1:3])
    wins = [q * (1 - p) + 0.5 * (p * q + (1 - p) * (1 - q)) for p, q in zip(base, tuned, strict=True)]
    count = len(wins)
    print(f"good answers: {sum(base) / count:.0%} of the base, {sum(tuned) / count:.0%} of the tuned model")
    print(f"win rate: {sum(wins) / count:.0%}")
