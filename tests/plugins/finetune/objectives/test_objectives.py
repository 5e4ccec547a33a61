"""DPO and distillation: formulas, frozen parameters, and complete runs."""

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from axlearn_core.compose import compose
from axlearn_core.compose.flops import count_flops
from axlearn_core.config import node, patch, replace_config
from axlearn_core.errors import ConfigError
from axlearn_core.learn.paths import flatten
from axlearn_core.run import open_weights
from axlearn_plugins_transformer.causal_lm import CausalLM
from support import toy_models
from support.cli_runs import SETTINGS, axlearn, losses, metrics
from support.objective_formulas import log_softmax, loss, loss_of, moved, program, reference_params, sequence_scores

PAIRS = "dpo:data=pairs.jsonl"


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("padding", [1, 3])
def test_pairs_that_pad_a_batch_do_not_count(padding):
    """Zero rows in the last evaluation batch do not change the loss and summaries of the real pairs."""
    trainer = program(f"{PAIRS},beta=0.3,label_smoothing=0.1")
    state = moved(trainer)
    batch = toy_models.batch_for(trainer.config)
    count = len(batch["chosen_tokens"]) - padding
    padded = {name: np.concatenate([x[:count], np.zeros_like(x[count:])]) for name, x in batch.items()}
    value, report = loss_of(trainer, state, padded)
    expected, expected_report = loss_of(trainer, state, {name: x[:count] for name, x in batch.items()})
    assert report["weight"] == expected_report["weight"] == count
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    rewards = {name: x for name, x in report.items() if name.startswith("reward_")}
    assert set(rewards) == {"reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"}
    assert report["reward_accuracy"] > 0  # padding has a zero margin
    for name, x in rewards.items():
        np.testing.assert_allclose(x, expected_report[name], rtol=1e-5, err_msg=name)


@pytest.mark.fast_cases("0.2")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_its_formula(smoothing):
    trainer = program(f"{PAIRS},beta=0.3,label_smoothing={smoothing}", **{"objective.loss_chunk": 5})
    state = moved(trainer)
    (value, report), batch = loss(trainer, state)
    ratios = {
        answer: 0.3
        * (
            sequence_scores(trainer, state.params, batch, answer)
            - sequence_scores(trainer, reference_params(state), batch, answer)
        )
        for answer in ("chosen", "rejected")
    }
    margin = ratios["chosen"] - ratios["rejected"]
    expected = (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
    np.testing.assert_allclose(value, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(report["reward_margin"], margin.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_chosen"], ratios["chosen"].mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_rejected"], ratios["rejected"].mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_accuracy"], (margin > 0).mean())
    assert report["weight"] == toy_models.ROWS
    held_out = jax.device_get(trainer.eval_step(state, trainer.put(batch)))
    np.testing.assert_allclose(held_out["loss_sum"] / held_out["weight"], np.log1p(np.exp(-margin)).mean(), rtol=1e-5)


@pytest.mark.slow  # a run from the command line starts with the same loss
@pytest.mark.parametrize("features", [(PAIRS,), (PAIRS, "lora:rank=2"), (PAIRS, "dropout:rate=0.0")])
def test_the_first_loss_of_dpo_is_ln_2(features):
    trainer = program(*features)
    (value, report), _ = loss(trainer, trainer.init(0))
    assert value == pytest.approx(math.log(2), abs=1e-6)
    assert report["reward_margin"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_with_adapters_the_reference_is_the_base():
    trainer = program(PAIRS, "lora:rank=2")
    assert not trainer.trained.frozen, "the reference needs no extra memory"
    state = moved(trainer)
    (value, _), batch = loss(trainer, state)
    base = {p: x if not p.endswith("lora_b") else 0 * x for p, x in state.params.items()}
    scores = [
        sequence_scores(trainer, state.params, batch, a) - sequence_scores(trainer, base, batch, a)
        for a in ("chosen", "rejected")
    ]
    np.testing.assert_allclose(value, np.log1p(np.exp(-0.1 * (scores[0] - scores[1]))).mean(), rtol=1e-5)


def divergence(p, q):
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.fast_cases("0.3")
@pytest.mark.parametrize("interpolation", [0.0, 0.3, 1.0])
def test_distillation_is_its_formula(interpolation):
    trainer = program(f"distill:temperature=2.0,alpha=0.7,interpolation={interpolation}", **{"objective.loss_chunk": 5})
    state = moved(trainer)
    (value, report), batch = loss(trainer, state)
    params = reference_params(state, "objective.teacher."), state.params
    teacher, student = (log_softmax(trainer, p, batch["tokens"], 2.0) for p in params)
    with np.errstate(divide="ignore"):
        mixture = np.logaddexp(np.log(interpolation) + teacher, np.log(1 - interpolation) + student)
    expected = interpolation * divergence(teacher, mixture) + (1 - interpolation) * divergence(student, mixture)
    if interpolation in (0, 1):
        expected = divergence(teacher, student) if interpolation == 0 else divergence(student, teacher)
    weights = batch["weights"]
    mean = (expected * weights).sum() / weights.sum()
    picked = np.take_along_axis(log_softmax(trainer, state.params, batch["tokens"]), batch["targets"][..., None], -1)
    entropy = -(picked[..., 0] * weights).sum() / weights.sum()
    np.testing.assert_allclose(report["teacher_kl"], mean, rtol=1e-4)
    np.testing.assert_allclose(report["cross_entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(value, 0.7 * 4 * mean + 0.3 * entropy, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_is_its_own_teacher_has_no_divergence():
    trainer = program("distill:temperature=3.0,alpha=1.0")
    (value, report), _ = loss(trainer, trainer.init(0))
    assert abs(report["teacher_kl"]) < 1e-6
    assert abs(value) < 1e-5


@pytest.mark.slow
def test_evaluation_of_a_distilled_model_is_its_own_loss():
    trainer, plain = program("distill:temperature=2.0"), program()
    state = moved(trainer)
    batch = trainer.put(toy_models.batch())
    got = trainer.eval_step(state, batch)
    fresh = plain.init(0)
    expected = plain.eval_step(fresh.replace(params=state.params), batch)
    np.testing.assert_allclose(got["loss_sum"], expected["loss_sum"], rtol=1e-6)


@pytest.mark.fast_cases("distill:temperature=2.0")
@pytest.mark.parametrize("feature", [PAIRS, "distill:temperature=2.0"])
def test_frozen_models_have_no_optimizer_state_and_start_as_the_model(feature):
    trainer = program(feature)
    frozen = [p for p in trainer.state.variables if p.startswith("objective.")]
    assert len(frozen) == len(trainer.functional.abstract)
    moments = list(flatten(trainer.state.learner))
    assert any("decoder" in path for path in moments)
    assert not any("objective" in path for path in moments)
    assert not any(path.startswith("objective.") for path in trainer.state.params)
    state = trainer.init(0)
    for path in frozen:
        np.testing.assert_array_equal(state.variables[path], state.params[path.split(".", 2)[2]])
    plain = program().init(0)
    for path, value in plain.params.items():
        np.testing.assert_array_equal(state.params[path], value, err_msg="the model begins as it does without")


@pytest.mark.slow
@pytest.mark.parametrize("feature", [PAIRS, "distill:temperature=2.0"])
def test_an_objective_goes_with_a_pipeline(feature):
    plain = program(feature)
    state = moved(plain)
    (value, _), _ = loss(plain, state)
    split = program(feature, "pipeline:microbatches=4", devices=8, shape={"pipeline": 2, "fsdp": 4})
    (value_there, _), _ = loss(split, jax.device_get(state))
    np.testing.assert_allclose(value_there, value, rtol=1e-5)


def test_a_model_of_images_is_refused():
    cfg = toy_models.resolve("vit-b16").config
    objective = toy_models.resolve(toy_models.small("quickstart"), with_=["distill"]).config.objective
    with pytest.raises(ConfigError, match="this objective needs a language model"):
        compose(patch(cfg, {"objective": objective}), jax.devices()[:1])


def test_a_teacher_of_another_vocabulary_is_refused():
    cfg = toy_models.resolve(toy_models.small("quickstart"), with_=["distill"]).config
    teacher = patch(cfg.model, {"vocab_size": 128})
    with pytest.raises(ConfigError, match="different vocabularies"):
        compose(patch(cfg, {"objective.teacher": teacher, "objective.teacher_weights": "x"}), jax.devices()[:1])


def test_a_reference_of_another_model_needs_weights():
    cfg = toy_models.resolve(toy_models.small("quickstart"), with_=[PAIRS]).config
    reference = patch(cfg.model, {"decoder.num_layers": 1})
    with pytest.raises(ConfigError, match=r"objective\.reference: cannot start with the weights of the trained model"):
        compose(patch(cfg, {"objective.reference": reference}), jax.devices()[:1])


# Complete runs from the command line.


def settings(*more):
    return [w for s in (*SETTINGS, *TEXT, *more) for w in ("--set", s)]


TEXT = ("input.tokenizer={type: byte-tokenizer}", "model.vocab_size=264", "trackers=[{type: jsonl}]")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Create a directory with preferences and text."""
    folder = tmp_path_factory.mktemp("objectives")
    rows = [{"prompt": f"{i} and ", "chosen": f"{i + 1}.", "rejected": f"{i}!"} for i in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "text.txt").write_text("".join(f"{i} and {i + 1}.\n" for i in range(10)) * 20)
    return folder


@pytest.fixture(scope="module")
def home(files):
    """Create a base run in the directory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(files)
        source = "input.source={type: files, paths: text.txt}"
        axlearn("train", "quickstart", "--run-dir", "base", "--steps", "3", *settings(source))
    return files


FEATURES = {
    "dpo": "dpo:data=pairs.jsonl,base=base",
    "distill": "distill:teacher=base,temperature=2",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "distill"])
def test_a_run_resumes_bit_for_bit_and_generates_without_the_objective(kind, home, monkeypatch):
    monkeypatch.chdir(home)

    def train(run_dir, steps):
        more = ("log_every_steps=1", "evaluators={}", "checkpointer.every_steps=3")
        axlearn(
            "train", "base/config.yaml", "--with", FEATURES[kind], "--run-dir", run_dir, "--steps", str(steps),
            *[w for s in more for w in ("--set", s)],
        )  # fmt: skip

    train(f"{kind}-whole", 5)
    train(f"{kind}-parts", 3)
    train(f"{kind}-parts", 5)
    assert losses(home / f"{kind}-parts") == losses(home / f"{kind}-whole")
    first = next(m for m in metrics(home / f"{kind}-whole") if "loss" in m)
    if kind == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert {"reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected"} <= first.keys()
    whole, base = open_weights(home / f"{kind}-whole"), open_weights(home / "base")
    assert set(whole.specs()) == set(base.specs())
    stored = whole.checkpoint.read({f"variables.objective.{'reference' if kind == 'dpo' else 'teacher'}.{p}": s
                                    for p, s in base.specs().items()})  # fmt: skip
    for path, value in base.read().items():
        copied = next(x for p, x in stored.items() if p.endswith(f".{path}"))
        np.testing.assert_array_equal(copied, value, err_msg="the frozen model still equals the base")
    axlearn("generate", f"{kind}-whole", "--prompt", "1 and ", "--max-tokens", "2")
    axlearn("checkpoint", "export-hf", f"{kind}-whole", f"{kind}-hf")
    exported = load_file(home / f"{kind}-hf" / "model.safetensors")
    assert sum(x.size for x in exported.values()) == sum(s.size for s in whole.specs().values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl, line 2: is not JSON"),
        ('{"prompt": "a", "chosen": "b", "rejcted": "c"}', "line 2: has no field 'rejected'"),
        ('{"prompt": "a", "chosen": "b", "rejected": 3}', "line 2: rejected is a int"),
        ('{"prompt": "a", "chosen": "", "rejected": "c"}', "line 2: chosen is empty"),
        ('{"prompt": "a", "chosen": "c", "rejected": "c"}', "line 2: chosen and rejected are equal"),
        (json.dumps({"prompt": "a" * 90, "chosen": "b", "rejected": "c"}), "line 2: the pair is longer than a row"),
    ],
)
def test_bad_rows_are_refused_by_line(line, message, files, monkeypatch):
    monkeypatch.chdir(files)
    (files / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + "\n")
    error_text = axlearn(
        "train", "quickstart", "--with", "dpo:data=bad.jsonl", "--run-dir", "bad", "--steps", "1", *settings(), code=2
    )
    assert message in error_text.stderr
    assert "fix:" in error_text.stderr or "expected:" in error_text.stderr
    assert not (files / "bad").exists()


def test_missing_weights_are_rejected_before_writing(files, monkeypatch):
    monkeypatch.chdir(files)
    train = ("train", "quickstart", *settings(), "--run-dir", "none")
    source = "input.source={type: files, paths: text.txt}"
    error_text = axlearn(*train, "--with", "distill:teacher=nowhere", "--set", source, code=2)
    assert "nowhere" in error_text.stderr
    objective = "objective={type: dpo, reference_weights: nowhere}"
    error_text = axlearn(*train, "--with", PAIRS, "--set", objective, "--set", "evaluators={}", code=2)
    assert "nowhere" in error_text.stderr
    assert not (files / "none").exists()


@pytest.mark.parametrize("features", [(), ("lora:rank=2",)], ids=["all", "adapters"])
def test_a_reference_counts_as_one_forward_pass(features):
    """Its gradient is stopped, also if it is the policy itself with disabled adapters."""

    def counts(trainer):
        batch = toy_models.batch_for(trainer.config)
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        return trainer.model_flops(batch), count_flops(trainer.function("loss").call, trainer.trained.specs, specs)

    (both, forward), (policy, passes) = counts(program(PAIRS, *features)), counts(program(*features))
    assert (both - forward / 2) / (forward / 2) == pytest.approx(policy / passes, rel=0.02)


class Doubled(CausalLM):
    """A model with doubled embeddings."""

    @node
    class Config(CausalLM.Config):
        pass

    def embed(self, inputs):
        return 2 * super().embed(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["distill", PAIRS])
def test_objectives_use_the_embeddings_of_a_subclass(feature):
    plain = program(feature)
    model = replace_config(plain.config.model, CausalLM, Doubled.Config())
    doubled = compose(patch(plain.config, {"model": model}), jax.devices()[:1])
    losses = [float(loss(trainer, moved(trainer))[0][0]) for trainer in (plain, doubled)]
    assert abs(losses[0] - losses[1]) > 1e-4
