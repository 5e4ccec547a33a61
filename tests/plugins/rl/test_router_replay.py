"""Replay of the experts of rollouts: the config, the record of the engine, and training runs."""

import attrs
import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import find, get
from axlearn_core.errors import ConfigError
from axlearn_core.nn import summaries
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_moe.replayed_layer import ReplayedLayer
from axlearn_plugins_rl.router_replay import RouterReplay
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.local_engine import LocalEngine
from axlearn_plugins_serving.open_engine import build_engine
from support import cli_runs, rollout_runs

TASK = "grpo:task={type: jsonl-task, paths: problems.jsonl},batch_size=2,group_size=2,kl=0"
MOE = "moe:num_experts=8,top_k=2"
SMALL = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 3,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.attention.num_kv_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
}


def base(*features):
    return resolve("quickstart", with_=[TASK, *features], set={**SMALL, "input.sequence_length": 16}).config


def test_rows_hold_the_experts_and_the_parameters_keep_their_paths():
    plain = base(MOE)
    cfg = RouterReplay().apply(plain)
    assert cfg.input.batch_shapes()["layers.experts"] == ((4, 16, 3, 2), "int16")
    assert get(cfg, "model.decoder.layer.attention.num_heads") == 4
    assert RouterReplay().apply(cfg) == cfg
    (layer,) = find(RouterReplay(use=False).apply(cfg), ReplayedLayer.Config).values()
    assert not layer.use
    paths = [set(compose(c, jax.devices()[:1]).trained.abstract) for c in (plain, cfg)]
    assert paths[0] == paths[1]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ((), "experts per token: none"),
        (("moe:router={type: expert-choice-router}",), "experts that depend only on the token"),
        (("moe:dispatch={type: capacity-dispatch}",), "experts that depend only on the token"),
    ],
)
def test_a_model_whose_experts_cannot_be_replayed_is_refused(features, message):
    with pytest.raises(ConfigError, match=message):
        RouterReplay().apply(base(*features))


def test_replay_without_rollouts_is_refused():
    with pytest.raises(ConfigError, match="router-replay needs rollouts"):
        RouterReplay().apply(resolve("quickstart", with_=[MOE], set=SMALL).config)


def forward(model, batch):
    with summaries.collect() as collected:
        model.hidden_states(batch)
    return {name: float(x.value) for name, x in collected.summaries.items() if hasattr(x, "value")}


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["separate", "stacked"])
def test_the_step_uses_the_experts_of_the_engine_if_the_router_moves(layers):
    """The step has the load of the record if the router moves. Without replay, it has another load."""
    program = compose(RouterReplay().apply(base(MOE)), jax.devices()[:1])
    state = program.init(0)
    weights = program.weights(state)
    runner = attrs.evolve(ServingEngine.Config().runner, max_context=64, max_rows=4, layers=layers)
    config = ServingEngine.Config(runner=runner)
    model = program.functional.describe()
    engine = LocalEngine(
        build_engine(model, program=program, text=None, config=config, warm_up=False, weights=lambda: weights)
    )
    shared = [1, 2, 3, 4, 5, 6, 7, 8] * 5
    prompts = [shared, [*shared, 9, 9]]  # the second one finds a prefix in the cache
    first, second = (engine.generate([p], max_tokens=8, seed=3, records=True)[0] for p in prompts)
    assert second.cached_tokens > 0
    moved = {
        p: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape) if p.endswith("router.weight") else x
        for p, x in weights.params.items()
    }
    for sample in (first, second):
        tokens = [*sample.prompt, *sample.sample.drawn_tokens]
        experts = sample.sample.records["experts"]
        assert experts.shape == (len(tokens) - 1, 3, 2)
        plain = {"tokens": np.int32([tokens[:-1]])}
        batch = {**plain, "layers.experts": experts[None]}
        same, other, free = (
            forward(program.functional.bind(params, weights.variables), inputs)
            for params, inputs in ((weights.params, batch), (moved, batch), (moved, plain))
        )
        counts = np.stack([np.bincount(experts[:, layer].ravel(), minlength=8) for layer in range(3)])
        load = (counts.max(-1) / counts.sum(-1) * 8).mean()
        assert (same["router_mismatch"], other["router_mismatch"] > 0.1) == (0, True)
        assert other["expert_load_max"] == pytest.approx(load, rel=1e-5)
        assert same["expert_load_max"] == pytest.approx(load, rel=1e-5)
        assert free["expert_load_max"] != pytest.approx(load, rel=1e-3)
    engine.close()


def run(folder, task, *, steps, ahead=0, replay="router-replay"):
    more = ("--with", "moe:num_experts=4,top_k=2", "--with", replay)
    arguments = rollout_runs.arguments(folder, task, steps=steps, ahead=ahead, settings=("input.experts=[2, 2]",))
    cli_runs.axlearn(*arguments, *more)
    return [row for row in cli_runs.metrics(folder) if "loss" in row]


@pytest.mark.slow
def test_a_run_with_replay_resumes(tmp_path):
    task = rollout_runs.write_sums(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for steps in (2, 4):
        run(parts, task, steps=steps)
    rows = run(whole, task, steps=4)
    assert rollout_runs.curves(parts) == rollout_runs.curves(whole)
    assert [(row["router_mismatch"], row["train_rollout_difference"]) for row in rows] == [(0, 0)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["router-replay", "router-replay:use=false"])
def test_older_weights_choose_other_experts(tmp_path, replay):
    rows = run(tmp_path / "run", rollout_runs.write_sums(tmp_path), steps=3, ahead=1, replay=replay)
    assert rows[0]["router_mismatch"] == 0
    assert rows[2]["router_mismatch"] > 0
