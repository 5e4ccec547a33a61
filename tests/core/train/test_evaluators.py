"""The evaluators of the core, with batches and sums that are given."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from axlearn_core.train import LossEvaluator


class Batches:
    """Counts the batches that are taken."""

    def __init__(self, count):
        self.left, self.closed = count, False

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left

    def close(self):
        self.closed = True


@pytest.mark.parametrize(("limit", "expected"), [(None, [4, 3, 2, 1, 0]), (2, [4, 3]), (9, [4, 3, 2, 1, 0])])
def test_the_loss_is_the_mean_over_at_most_max_batches(limit, expected):
    opened, numbers = [], []

    def evaluation():
        opened.append(Batches(5))
        return opened[-1]

    def step(state, batch):
        numbers.append(batch)
        return {"loss_sum": jnp.float32(batch), "weight": jnp.float32(1 if batch else 3)}

    cfg = LossEvaluator.Config(max_batches=limit)
    evaluator = LossEvaluator(cfg, name="eval", input=SimpleNamespace(evaluation=evaluation), build_input=None)
    program = SimpleNamespace(eval_step=step)
    values = evaluator.run(SimpleNamespace(state=None, program=program, put=lambda batch: batch))
    assert numbers == expected
    assert values == {"eval_loss": pytest.approx(sum(numbers) / sum(1 if batch else 3 for batch in numbers))}
    assert all(batches.closed for batches in opened)
