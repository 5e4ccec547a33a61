"""Write a small corpus for this example: sums in words, 400 per file.

python make_corpus.py [--out corpus] [--files 16]
"""

import argparse
import random
from pathlib import Path

WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"


def sums(rng: random.Random, lines: int) -> str:
    """Return lines such as `three plus four is seven.`"""
    words = WORDS.split()
    pairs = ((rng.randrange(10), rng.randrange(10)) for _ in range(lines))
    return "".join(f"{words[a]} plus {words[b]} is {words[a + b]}.\n" for a, b in pairs)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--files", type=int, default=16)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for i in range(args.files):
        (args.out / f"{i:03}.txt").write_text(sums(random.Random(i), 400), "utf-8")
    print(f"{args.files} files in {args.out}")


if __name__ == "__main__":
    main()
