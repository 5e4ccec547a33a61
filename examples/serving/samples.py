"""Sample from several prompts at once, before and after a weight update.

The weights go directly to the running engine. No files are written.
"""

import sys

import axlearn_core as ax

SIZES = {"runner.max_rows": 8, "runner.max_context": 128}  # maximum number of rows, and of tokens per row


def main(run: str, earlier: int) -> None:
    """Print samples of the newest checkpoint of a run, and compare it with an earlier one."""
    with ax.serve(run, set=SIZES) as engine:
        prompts = ["def ", "class ", "import "]
        for result in engine.generate(prompts, n=2, max_tokens=12, temperature=0.8, seed=0):
            for sample in result.samples:
                likelihood = sum(p.logprob for p in sample.logprobs)
                print(f"{likelihood:7.2f} {sample.text!r}")
        before = engine.generate(prompts, max_tokens=12, temperature=0)
        engine.update_weights(ax.open_weights(run, step=earlier).read())
        after = engine.generate(prompts, max_tokens=12, temperature=0)
        changed = sum(a.tokens != b.tokens for a, b in zip(before, after, strict=True))
        print(f"the other weights changed {changed} of {len(prompts)} texts")
        counts = engine.statistics()
        print(
            f"{counts.output_tokens} tokens in {counts.steps} steps, {counts.compilations} compilations after the start"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
