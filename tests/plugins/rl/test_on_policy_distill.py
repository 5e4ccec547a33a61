"""Distillation on the model's own answers: its config, and runs that approach a teacher."""

import pytest

from axlearn_core.config import find, get
from axlearn_core.errors import ConfigError
from axlearn_plugins_finetune.objectives.distillation import Distillation
from axlearn_plugins_rl.on_policy_distill import OnPolicyDistill
from axlearn_plugins_rl.rl_loop import RLLoop
from axlearn_plugins_rl.tasks.jsonl_task import JsonlTask
from support import cli_runs, rollout_runs, toy_models

TASK = JsonlTask.Config(paths="train.jsonl")


def test_the_loss_has_no_cross_entropy_and_a_second_request_updates_it():
    plain = toy_models.small("quickstart")
    distilled = toy_models.resolve(plain, with_=["distill:alpha=0.3"]).config
    for before in (plain, distilled):
        cfg = OnPolicyDistill(task=TASK).apply(before)
        assert (get(cfg, "objective.alpha"), get(cfg, "objective.interpolation")) == (1.0, 1.0)
        assert find(cfg, RLLoop.Config)
        after = OnPolicyDistill(interpolation=0.5, ahead=1).apply(cfg)
        assert after.objective == Distillation.Config(alpha=1.0, interpolation=0.5)
        assert get(after, "loop.buffer.ahead") == 1


def test_a_penalty_is_refused():
    with pytest.raises(ConfigError, match="its loss is a divergence"):
        OnPolicyDistill(task=TASK, kl=0.1).apply(toy_models.small("quickstart"))


@pytest.mark.slow
def test_a_run_approaches_its_teacher(tmp_path):
    """The teacher is a short run on text. The student starts from random weights."""
    task = rollout_runs.write_sums(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{a}+{b}={a + b}\n" for a in range(7) for b in range(7)) * 20)
    sizes = (
        "model.vocab_size=264",
        "input.tokenizer={type: byte-tokenizer}",
        "input.sequence_length=16",
        "evaluators={}",
    )
    source = f"input.source={{type: files, paths: {tmp_path}/text.txt}}"
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    cli_runs.axlearn(*cli_runs.arguments(teacher, steps=30, settings=(*sizes, source)))
    options = f"task={task},teacher={teacher},batch_size=4,group_size=2,max_tokens=6"
    more = ("--with", f"on-policy-distill:{options}")
    settings = (
        *sizes,
        "input.batch_size=4",
        "learner.optimizer={type: adamw, learning_rate: 0.003}",
        "log_every_steps=1",
    )
    cli_runs.axlearn(*cli_runs.arguments(student, steps=20, settings=settings, more=more))
    rows = [row for row in cli_runs.metrics(student) if "loss" in row]
    divergence = [row["teacher_kl"] for row in rows]
    assert rows[0]["loss"] == pytest.approx(divergence[0], rel=1e-5)  # the temperature is 1
    assert {"reward", "answer_length"} <= rows[0].keys()
    assert sum(divergence[-3:]) < 0.7 * sum(divergence[:3])
