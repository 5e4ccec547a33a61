"""Replay of the limits on the tokens to sample from: the config, and ratios of training runs."""

import pytest

from axlearn_core.config import get
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rl.sampling_mask import MORE, SamplingMask
from support import cli_runs, rollout_runs

TASK = "grpo:task={type: jsonl-task, paths: problems.jsonl}"


def test_the_policy_samples_and_records_as_the_rows_expect():
    cfg = SamplingMask(top_k=7, top_p=0.5).apply(resolve("quickstart", with_=[TASK]).config)
    policy = get(cfg, "loop.policy")
    assert (policy.top_k, policy.top_p, policy.min_p) == (7, 0.5, 0.0)
    assert get(cfg, "loop.policy.engine.runner.kept_tokens") == cfg.input.kept_tokens == 7 + MORE
    shape = cfg.input.batch_shapes()["tokens"][0]
    assert cfg.input.batch_shapes()["kept_tokens"] == ((*shape, 7 + MORE), "int32")
    assert SamplingMask(top_k=7, top_p=0.5).apply(cfg) == cfg


def test_a_model_without_rollouts_is_refused():
    with pytest.raises(ConfigError, match="sampling-mask needs rollouts"):
        SamplingMask().apply(resolve("quickstart").config)


def run(folder, *features, mode="parity", code=0, settings=()):
    task = rollout_runs.write_sums(folder)
    settings = (f"loop.policy.engine.runner.mode={mode}", *settings)
    more = [word for feature in features for word in ("--with", feature)]
    arguments = rollout_runs.arguments(folder / "run", task, steps=3, settings=settings)
    result = cli_runs.axlearn(*arguments, *more, code=code)
    return [row for row in cli_runs.metrics(folder / "run") if "loss" in row], result.stderr


@pytest.mark.slow
def test_ratios_are_exactly_1_in_parity(tmp_path):
    rows, messages = run(tmp_path, "sampling-mask:top_k=20,top_p=0.8,min_p=0.001")
    assert [(row["train_rollout_difference"], row["ratio"], row["ratio_max"]) for row in rows] == [(0, 1, 1)] * 3
    assert "the training step does not know" not in messages


@pytest.mark.slow
def test_ratios_are_1_up_to_rounding_in_fast(tmp_path):
    rows, _ = run(tmp_path, "sampling-mask:top_k=20,top_p=0.8", mode="fast")
    assert all(row["train_rollout_difference"] < 5e-6 for row in rows)
    assert all(row["ratio_max"] == pytest.approx(1, abs=5e-6) for row in rows)


@pytest.mark.slow
def test_without_the_record_ratios_start_below_1(tmp_path):
    rows, messages = run(tmp_path, settings=("loop.policy.top_k=20",))
    assert all(row["ratio"] < 0.9 for row in rows)
    assert "fix: --with sampling-mask" in messages


@pytest.mark.slow
@pytest.mark.parametrize("top_k", ["100", "null"])
def test_a_later_limit_that_the_record_cannot_hold_is_refused(tmp_path, top_k):
    _, messages = run(tmp_path, "sampling-mask:top_k=20", code=2, settings=(f"loop.policy.top_k={top_k}",))
    assert f"expected: at most input.kept_tokens = {20 + MORE}" in messages
