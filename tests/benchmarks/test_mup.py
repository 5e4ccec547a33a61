"""The coordinate check of muP at a small size. The benchmark's results have larger ones."""

import math

import pytest

from support.benchmark_scripts import load_benchmark

mup = load_benchmark("mup")


@pytest.mark.slow
def test_activations_keep_their_size_only_with_mup():
    widths = [64, 128, 256]
    with_mup, without = (mup.fit_slopes("dense", "adamw", widths, 2, base_width=b, steps=3) for b in (64, None))
    names = with_mup.keys() - {"logits"}
    assert {"query", "context", "mlp_hidden", "mlp_out"} <= names
    # Two seeds and small widths are noisy. The slopes of the benchmark, with five seeds, are below 0.05.
    assert max(abs(slope) for name in names for slope in with_mup[name]) < 0.1
    assert max(without[name][-1] for name in names) > 0.2
    assert not math.isnan(with_mup["logits"][-1])
