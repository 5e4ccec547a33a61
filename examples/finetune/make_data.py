"""Write the data of this example: text, conversations and questions.

python make_data.py [--out data] [--seed 0]

The text counts up and down in words. The conversations ask for the number after or before a given number.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
DIRECTIONS = ("after", "before")


def text(rng: random.Random, lines: int) -> str:
    """Return lines such as `two three four five.` and `five four three two.`"""
    parts = []
    for _ in range(lines):
        start, count = rng.randrange(len(WORDS) - 4), rng.randrange(4, 9)
        run = WORDS[start : start + count]
        parts.append(" ".join(run if rng.random() < 0.5 else run[::-1]) + ".\n")
    return "".join(parts)


def pairs() -> list[tuple[str, str, str]]:
    """Return the direction, the number and the answer of each possible question."""
    return [
        (direction, WORDS[i], WORDS[i + (1 if direction == "after" else -1)])
        for direction in DIRECTIONS
        for i in range(1, len(WORDS) - 1)
    ]


def conversation(rng: random.Random, facts: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Return a conversation of one to three questions and their answers."""
    messages = []
    for direction, number, answer in rng.sample(facts, rng.randint(1, 3)):
        messages.append({"role": "user", "content": f"What comes {direction} {number}?"})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def question(rng: random.Random, direction: str, number: str, answer: str) -> dict[str, Any]:
    """Return a question with four choices, formatted like the plain chat template."""
    wrong_answers = rng.sample([w for w in WORDS if w not in (answer, number)], 3)
    choices = rng.sample([answer, *wrong_answers], 4)
    prompt = f"User:\nWhat comes {direction} {number}?\n\nAssistant:\n"
    return {"prompt": prompt, "choices": choices, "answer": choices.index(answer), "delimiter": ""}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    facts = pairs()
    (args.out / "text.txt").write_text(text(rng, 4000), "utf-8")
    rows = {
        "train.jsonl": [conversation(rng, facts) for _ in range(400)],
        "held_out.jsonl": [conversation(rng, facts) for _ in range(40)],
        "questions.jsonl": [question(rng, *pair) for pair in facts],
    }
    for name, lines in rows.items():
        (args.out / name).write_text("".join(json.dumps(row) + "\n" for row in lines), "utf-8")
        print(f"{len(lines)} rows in {args.out / name}")


if __name__ == "__main__":
    main()
