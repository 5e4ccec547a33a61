"""Model FLOPs are those that a step needs: the trainer and a plan count the same, and frozen weights have no gradients."""

import attrs
import jax
import pytest

from axlearn_core.kernels.selection import use
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_plan.flops import ScopedSelection, model_flops, works
from axlearn_plugins_plan.plan import compose_program
from axlearn_plugins_transformer.kernels.masks import Causal, Chunks, SelectedKeys, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split

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


def test_a_window_counts_fewer_pairs_in_the_causal_convention():
    window, full = 4, 3 * 2 * TOKENS * (ATTENTION + FEED_FORWARD + HEAD + PAIRS)
    pairs = 3 * 2 * TOKENS * PAIRS
    for edits, visible in (((), 0.5 * LENGTH**2), (("model.decoder.layer.attention.window=4",), window * LENGTH)):
        program, batch = compose_program(resolve("quickstart", set=(*SMALL, *edits), target="cpu-8"))
        flops = model_flops(program, "train", batch)
        assert flops.full == full
        assert full - flops.causal == pytest.approx(pairs * (1 - visible / LENGTH**2), rel=0.05)


def test_masks_reduce_the_counted_flops_of_paged_attention():
    """Windows, chunks and selected keys count fewer pairs, for the reference and for a kernel that reports its FLOPs."""
    shapes = [((4, 4, 16), "float32"), ((20, 2, 2, 8, 16), "float32"), *(((n,), "int32") for n in (4, 5, 1))]
    query, pages, lengths, starts, count = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    table = jax.ShapeDtypeStruct((4, 5), "int32")
    slots = jax.ShapeDtypeStruct((4, 1, 4), "int32")
    for mask, share in ((Causal(), 1.0), (Causal() & SlidingWindow(10), 0.25), (Causal() & Chunks(8), 0.2),
                        (Causal() & SelectedKeys(slots), 0.1), (Causal() & SlidingWindow(50), 1.0)):  # fmt: skip
        op = PagedAttentionOp(query, pages, table, lengths, starts, count, mask=mask, scale=1.0, heads_first=True,
                              split=Split(4, 1))  # fmt: skip
        assert op.visible() == share
        selection = ScopedSelection(platform="cpu", gradients=False)
        kernel = "xla" if "mask" in op.extras() or library.unavailable_reason is not None else "native"
        leaves, tree = jax.tree.flatten(attrs.asdict(op, recurse=False))
        at = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]

        def run(*arrays, op=op, leaves=leaves, tree=tree, at=at, kernel=kernel):
            values = dict(zip(at, arrays, strict=True))
            return attrs.evolve(op, **tree.unflatten([values.get(i, x) for i, x in enumerate(leaves)])).run(kernel)

        with use(selection):
            jaxpr = jax.make_jaxpr(run)(*[leaves[i] for i in at]).jaxpr
        work = list(works(jaxpr, selection.scopes))
        assert sum(w.flops for w in work) == op.flops()
        assert sum(w.flops * w.visible for w in work) == pytest.approx(share * op.flops())
