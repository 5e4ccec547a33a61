"""Samples of several prompts at once, and the same from weights that were trained on: nothing is written in between."""

import sys

import axlearn_core as ax

SIZES = {"runner.max_rows": 8, "runner.max_context": 128}  # what a step and the cache have room for


def main(run: str, earlier: int) -> None:
    """Prints samples of the newest checkpoint of a run, and of an earlier one."""
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
        print(f"other weights change {changed} of {len(prompts)} texts")
        counts = engine.statistics()
        print(f"{counts.output_tokens} tokens in {counts.steps} steps, {counts.compilations} compiled after the start")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
