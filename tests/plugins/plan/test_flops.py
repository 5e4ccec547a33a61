"""Model FLOPs are those that a step needs: the trainer and a plan count the same, and frozen weights have no gradients."""

import pytest

from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.flops import model_flops
from axlearn_plugins_plan.plan import compose_program

LAYERS, WIDTH, HIDDEN, VOCAB, ROWS, LENGTH = 2, 128, 384, 2048, 8, 64
SMALL = (f"model.decoder.num_layers={LAYERS}", f"input.batch_size={ROWS}", f"input.sequence_length={LENGTH}")
TOKENS = ROWS * LENGTH
ATTENTION, FEED_FORWARD, HEAD = LAYERS * 4 * WIDTH**2, LAYERS * 3 * WIDTH * HIDDEN, WIDTH * VOCAB
PAIRS = LAYERS * 2 * WIDTH * LENGTH
"""Scores and values, for each token."""


def counted(experiment, *features):
    """Return the model FLOPs of a step, which the plan and the trainer must count alike."""
    program, batch = compose_program(resolve(experiment, set=SMALL, target="cpu-8", with_=list(features)))
    flops = model_flops(program, "train", batch).full
    assert flops == program.model_flops(batch)
    return flops


def test_a_step_that_trains_everything_counts_three_passes():
    assert counted("quickstart") == 3 * 2 * TOKENS * (ATTENTION + FEED_FORWARD + HEAD + PAIRS)


def test_frozen_weights_have_no_gradients_and_adapters_have():
    rank = 8
    adapters = LAYERS * 4 * 2 * WIDTH * rank
    frozen = 2 * (ATTENTION + FEED_FORWARD + HEAD)  # forward, and the gradients of the activations
    first = 3 * WIDTH * (WIDTH + rank)  # the first layer's three projections read the frozen embedding
    assert counted("quickstart", f"lora:rank={rank}") == 2 * TOKENS * (frozen + 3 * (PAIRS + adapters) - first)


@pytest.mark.parametrize("trained", ["norm", "head"])
def test_frozen_layers_before_every_trained_one_count_once(trained):
    """The head needs the gradient of its input for the norm, or that of its weight."""
    expected = 2 * TOKENS * (ATTENTION + FEED_FORWARD + PAIRS + 2 * HEAD)
    assert counted("quickstart", f"freeze:pattern='!decoder.{trained}.**'") == expected
