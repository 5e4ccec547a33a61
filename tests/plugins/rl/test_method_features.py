"""The features of reinforcement learning: what they set, and that paths reach through the wrappers."""

import pytest

from axlearn_core.config import patch
from axlearn_core.config.tree import get
from axlearn_core.errors import CheckpointError, ConfigError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rl.policy_gradient.critic_model import CriticModel
from axlearn_plugins_rl.policy_gradient.generalized_advantages import GeneralizedAdvantages
from axlearn_plugins_rl.presets import PRESETS
from axlearn_plugins_rl.reward_evaluator import RewardEvaluator
from axlearn_plugins_rl.rl_loop import RLLoop
from axlearn_plugins_rl.task_input import TaskInput

TASK = "task={type: jsonl-task, paths: problems.jsonl}"


def config(options="", feature="grpo", **settings):
    names = [f"{feature}:{TASK}{',' if options else ''}{options}"]
    return resolve("quickstart", with_=names, set=settings).config


def test_the_input_keeps_the_tokenizer_and_the_length_of_rows():
    before, after = resolve("quickstart").config, config("batch_size=3,group_size=5")
    assert isinstance(after.input, TaskInput.Config)
    assert after.input.tokenizer == before.input.tokenizer
    assert after.input.sequence_length == before.input.sequence_length
    assert after.input.num_rows == 15


def test_options_reach_the_parts_of_the_loop():
    loop = config("max_tokens=7,temperature=0.5,ahead=2,reward={type: format}").loop
    assert (loop.policy.max_tokens, loop.policy.temperature, loop.buffer.ahead) == (7, 0.5, 2)
    assert type(loop.reward).__qualname__ == "FormatReward.Config"


def test_settings_reach_through_the_loop_that_loads_the_base():
    settings = {"loop.buffer.ahead": 1, "loop.policy.engine.runner.mode": "parity", "loop.max_nonfinite_steps": 3}
    cfg = config("base=runs/base", **settings)
    assert isinstance(cfg.loop.loop, RLLoop.Config)
    assert get(cfg, "loop.loop.buffer.ahead") == 1
    assert get(cfg, "loop.loop.policy.engine.runner.mode") == "parity"
    assert get(cfg, "loop.loop.loop.max_nonfinite_steps") == 3


def test_evaluators_of_the_loss_become_evaluators_of_the_reward():
    assert isinstance(config().evaluators["eval"], RewardEvaluator.Config)


@pytest.mark.parametrize("method", PRESETS)
def test_each_method_is_a_feature_that_can_be_applied_twice(method):
    from axlearn_core.plugins.registry import registry

    cfg = config(feature=method)
    feature = registry().feature(method)
    assert feature().apply(cfg) == cfg
    assert get(cfg, "loop.dead_groups") == ("resample" if method == "dapo" else "keep")


def test_an_option_changes_the_loop_that_exists():
    from axlearn_plugins_rl.method_features import Grpo

    cfg = patch(config(), {"loop.resample_rounds": 5})
    changed = Grpo(max_tokens=9).apply(cfg)
    assert (changed.loop.policy.max_tokens, changed.loop.resample_rounds) == (9, 5)


@pytest.mark.parametrize("first", PRESETS)
@pytest.mark.parametrize("second", PRESETS)
def test_a_method_replaces_another_one_completely(first, second):
    resolved = resolve(config(feature=first), with_=[second])
    assert resolved.config == config(feature=second)


def test_what_a_method_replaces_is_said():
    subjects = {d.subject for d in resolve(config(feature="dapo"), with_=["ppo"]).decisions if d.kind == "replaced"}
    assert {"loop.advantage", "loop.dead_groups"} <= subjects


def test_a_critic_is_a_model_with_an_optimizer_of_its_own():
    cfg = config("critic=policy,critic_learning_rate=0.002", feature="ppo")
    assert cfg.objective.critic == GeneralizedAdvantages.Config(values=CriticModel.Config(), coefficient=1.0)
    head, rate = cfg.learner.rules
    assert (head.pattern, head.freeze) == ("objective.critic.values.model.decoder.head.**", True)
    assert (rate.pattern, rate.optimizer.learning_rate) == ("objective.critic.**", 0.002)
    changed = resolve(cfg, with_=["ppo:critic=policy"]).config
    assert changed.learner.rules == (head,)
    assert resolve(cfg, with_=["grpo"]).config == config()


def test_a_critic_without_weights_is_refused():
    with pytest.raises((ConfigError, RequestError, CheckpointError), match="runs/nowhere"):
        config("critic=runs/nowhere", feature="ppo")


def test_a_method_without_a_task_says_what_is_missing():
    with pytest.raises((ConfigError, RequestError), match=r"grpo needs a task(?s:.*)reasoning-gym"):
        resolve("quickstart", with_=["grpo"])
