"""Train the quickstart's tokenizer on the training files of the standard library.

    python plugins/transformer/train_tokenizer.py [--vocab-size 2048] [--out FILE.json]

The shipped file was trained with Python 3.11.7 and tokenizers 0.23.3. The same versions give the same bytes. The tokenizer
is a byte-level BPE, so any text round-trips. Text is split before merging such that one token can contain a newline with the
indentation after it, or a word with adjacent space and punctuation (" self.", "(name", "__init__").
"""

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from axlearn_plugins_transformer.text import StandardLibrary

WORDS = r"(?:\r?\n)+[ \t]*|[ ]?[^\s\w]*\w+[(.:,=]?|[ ]?[^\s\w]+|\s+"
OUT = Path(__file__).parents[0] / "src/axlearn_plugins_transformer/text/python-2k.json"


def train(vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose end-of-document token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    files = [f for part in StandardLibrary.Config().build().parts("train") for f in part.files]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((Path(f.path).read_text("utf-8") for f in files), trainer)
    return tokenizer


def main() -> None:
    """Parse the command line, train and write the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=2048, help="Size of the vocabulary (default: 2048).")
    parser.add_argument("--out", type=Path, default=OUT, help="Output file.")
    args = parser.parse_args()
    args.out.write_text(train(args.vocab_size).to_str(pretty=False) + "\n", "utf-8")
    print(f"wrote {args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
