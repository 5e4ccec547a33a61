"""Which checkpoints a policy gives up."""

import math

import pytest

from axlearn_core.checkpoint.manifest import Manifest
from axlearn_core.checkpoint.retention import list_expired_steps
from axlearn_core.checkpoint.sharded import ShardedCheckpointer


def manifests(losses):
    return {step: Manifest(step, {}, {"eval_loss": loss}, {}, run="run") for step, loss in losses.items()}


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 2)])
def test_a_metric_that_is_no_number_is_not_the_best(mode, best):
    losses = {1: math.nan, 2: 2.0, 3: 1.0, 4: math.nan, 5: 1.5, 6: math.nan}
    cfg = ShardedCheckpointer.Config(keep_last=1, keep_best=1, best_metric="eval_loss", best_mode=mode)
    assert set(losses) - set(list_expired_steps(cfg, manifests(losses))) == {best, 6}
    assert set(list_expired_steps(cfg, manifests(dict.fromkeys(losses, math.nan)))) == {1, 2, 3, 4, 5}
