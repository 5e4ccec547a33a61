"""Steps of small runs are computed again, in this process."""

import shutil

import jax
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose import Program
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_verify.replay import findings, replay
from support import api_runs, planted_runs

STEPS = 6


BAD_DOCUMENT = 23


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of which one has a token with an infinite embedding, in every program of this module."""
    tokenizer = ax.resolve("quickstart").config.input.tokenizer.build()
    with planted_runs.planted_token(tokenizer.encode(planted_runs.BAD)[:1], np.inf):
        yield planted_runs.write_corpus(tmp_path_factory.mktemp("corpus"), bad=BAD_DOCUMENT)


@pytest.fixture(scope="module")
def planted(corpus, tmp_path_factory):
    """A run of which one step is not finite."""
    run = tmp_path_factory.mktemp("planted") / "run"
    planted_runs.train(run, corpus, steps=STEPS)
    return run


@pytest.fixture
def copied(planted, tmp_path):
    return shutil.copytree(planted, tmp_path / "run")


@pytest.fixture(scope="module")
def bad(planted):
    """The replay of the step with the bad document, and the files of the run before and after it."""
    step = next(s for s in planted_runs.bad_steps(planted) if s % 2 == 0)
    before = planted_runs.contents(planted)
    result = replay(planted, step=step, bisect=True, probe="decoder.**.attention")
    return result, before, planted_runs.contents(planted)


@pytest.mark.slow
def test_step_is_bit_identical_and_the_run_unchanged(bad):
    result, before, after = bad
    assert result.identical is True
    assert (result.start, result.compared_steps) == (result.step - 2, (result.step - 1, result.step))
    assert result.compared_scalars == 10
    assert result.compared_arrays > 30
    assert before == after


def test_bad_document_is_named(bad, corpus):
    result = bad[0]
    offset = corpus.read_bytes().index(b'{"text": "a document with')
    for part in (result.nonfinite, result.bisection):
        (document,) = part.documents
        assert document.source == f"{corpus}: the line at byte {offset}"
    assert (result.nonfinite.statistics.layer, result.nonfinite.statistics.tensor) == ("decoder.embedding", "output")
    assert result.bisection.reruns <= 12
    assert result.bisection.rest.finite
    assert result.weights == []


def test_probes_are_in_the_order_of_computation(bad):
    names = [(s.layer, s.tensor) for s in bad[0].probes]
    layers = [f"decoder.layer.{i}.attention" for i in (0, 1)]
    assert names == [*((n, "output") for n in layers), *((n, "gradient of output") for n in layers[::-1])]
    assert all(s.nonfinite > 0 and s.smallest < s.mean < s.largest for s in bad[0].probes)


@pytest.mark.slow
def test_step_without_checkpoint_is_compared_by_scalars(planted):
    result = replay(planted, step=1)
    assert result.identical is True
    assert (result.start, result.compared_arrays) == (0, 0)
    assert result.scalars["loss"] == api_runs.losses(planted)[0]


@pytest.mark.slow
def test_flipped_bit_is_found(corpus, tmp_path, monkeypatch):
    path, index, bit = "decoder.layer.feed_forward.up.weight", (1, 3, 5), 22
    original, count = Program.train_step, iter(range(1, 100))

    def flip(self, state, batch):
        state, scalars = original(self, state, batch)
        if next(count) == 4:
            array = np.array(state.params[path])
            array.view(np.uint32)[index] ^= 1 << bit
            flipped = jax.device_put(array, state.params[path].sharding)
            state = state.replace(params={**state.params, path: flipped})
        return state, scalars

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Program, "train_step", flip)
        planted_runs.train(run, corpus, steps=6)
    result = replay(run, step=4)
    assert result.identical is False
    assert result.different_scalars == ()
    (difference,) = result.different_arrays
    assert (difference.path, difference.index, difference.bit) == (f"params.{path}", index, bit)
    later = replay(run, step=6, from_start=True)
    assert later.different_scalars[0].step == 5
    assert replay(run, step=6).identical is True


@pytest.mark.slow
def test_overflow_is_named(tmp_path):
    """The activations of float16 overflow in the feed-forward layer, and those of float32 do not."""
    run, corpus = tmp_path / "run", planted_runs.write_corpus(tmp_path)
    with planted_runs.scaled_input(GatedFeedForward, 3e3):
        planted_runs.train(run, corpus, "precision:dtype=float16", steps=2)
        assert planted_runs.bad_steps(run) == [1, 2]
        result = replay(run, step=2, shadow="float32", bisect=True)
    assert result.identical is True
    overflow = next(d for d in result.divergences if d.overflowed)
    assert (overflow.layer, overflow.tensor) == ("decoder.layer.0.feed_forward.down", "input")
    assert findings.name_tensor(result.nonfinite.statistics) == "decoder.layer.0.feed_forward, input of down"
    assert result.nonfinite.statistics.dtype == "float16"
    assert "another batch is not finite with these weights either" in result.bisection.ended
    assert "input of down is finite with float32" in str(result)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["first-fit", "concat"])
def test_bad_document_of_a_microbatch_is_named(corpus, tmp_path, packing):
    run = tmp_path / "run"
    settings = {"input.packing": packing, "input.source.chunk_bytes": 500, "input.batch_size": 16}
    planted_runs.train(run, corpus, "gradient-accumulation:steps=2", steps=STEPS, **settings)
    step = planted_runs.bad_steps(run)[0]
    result = replay(run, step=step, bisect=True)
    offset = corpus.read_bytes().index(b'{"text": "a document with')
    blamed = {d.source for d in result.bisection.documents}
    assert result.identical is True
    assert blamed == {d.source for d in result.nonfinite.documents} == {f"{corpus}: the line at byte {offset}"}
    assert all(d.microbatch == d.row % 2 for d in result.bisection.documents)


@pytest.mark.slow
def test_resumed_run_is_replayed_with_the_settings_of_each_step(corpus, tmp_path):
    run, optimizer = tmp_path / "run", {"type": "adamw", "learning_rate": {"type": "cosine-schedule", "peak": 0.01}}
    for steps in (4, 8):  # the schedule ends at the last step
        planted_runs.train(run, corpus, steps=steps, **{"learner.optimizer": optimizer})
    early, late = replay(run, step=4), replay(run, step=6)
    assert (early.identical, early.compared_scalars) == (True, 10)
    assert (late.identical, late.compared_scalars) == (True, 10)


LAYOUTS = {
    "tensor": ((), {"data": 2, "fsdp": 2, "tensor": 2}),
    "pipeline": (("pipeline:microbatches=2",), {"pipeline": 2, "data": 4}),
    "interleaved-steps": (("pipeline:microbatches=2,schedule=1f1b",), {"pipeline": 2, "data": 4}),
    "experts": (("moe:num_experts=4", "expert-parallel"), {"expert": 2, "data": 4}),
    "sequence": (("context-parallel",), {"seq": 2, "data": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_measured_on_every_mesh(corpus, tmp_path, layout):
    features, shape = LAYOUTS[layout]
    run = tmp_path / "run"
    planted_runs.train(run, corpus, *features, steps=2, **{"mesh.shape": shape})
    result = replay(run, step=2, probe="decoder.layer.*", bisect=True)
    assert result.identical is True
    layers = [(f"decoder.layer.{i}", "output") for i in (0, 1)]
    gradients = [(layer, f"gradient of {tensor}") for layer, tensor in layers[::-1]]
    assert [(s.layer, s.tensor) for s in result.probes] == [*layers, *gradients]
    assert all(s.shape[:2] == (8, 32) for s in result.probes)
    assert result.bisection.ended == "the step is normal"


@pytest.mark.slow
def test_spike_is_bisected(corpus, tmp_path):
    """A document with a large gradient, whose loss and outputs are as usual."""
    run, own = tmp_path / "run", planted_runs.write_corpus(tmp_path, bad=BAD_DOCUMENT, letter="q")
    token = ax.resolve("quickstart").config.input.tokenizer.build().encode(" inside")
    with planted_runs.steep_token(token, 1e3):
        planted_runs.train(run, own, steps=STEPS)
        norms = {line["step"]: line["grad_norm"] for line in api_runs.lines(run) if line["step"] > 1}
        step = max(norms, key=norms.__getitem__)
        result = replay(run, step=step, bisect=True)
    assert norms[step] > 4 * min(norms.values())
    (document,) = result.bisection.documents
    offset = own.read_bytes().index(b'{"text": "a document with')
    assert document.source == f"{own}: the line at byte {offset}"
    assert result.bisection.reruns <= 12
    assert result.bisection.rest.norm < 4 * result.bisection.usual
    assert (result.grown.statistics.layer, result.grown.statistics.tensor) == ("decoder.embedding.weight", "gradient")


@pytest.mark.slow
def test_features_compute_the_step_a_second_time(planted):
    result = replay(planted, step=3, with_=["dropout:rate=0.3"])
    assert result.identical is True
    assert result.feature_scalars["loss"] != result.scalars["loss"]


class TestDrift:
    """What changed since the run is named, and `allow_drift` continues."""

    def check(self, run, match):
        with pytest.raises(CheckpointError, match=match) as caught:
            replay(run, step=4)
        assert "--allow-drift" in str(caught.value)
        assert caught.value.exit_code == 2

    def allowed(self, run, change):
        result = replay(run, step=4, allow_drift=True)
        assert change in "\n".join(result.changes)
        return result

    @pytest.mark.slow
    def test_data(self, corpus, tmp_path):
        own = planted_runs.write_corpus(tmp_path)
        planted_runs.train(tmp_path / "run", own, steps=4)
        planted_runs.write_corpus(tmp_path, bad=11)
        self.check(tmp_path / "run", "the data changed: data.digests.*data.jsonl")
        assert self.allowed(tmp_path / "run", "the data changed").identical is False

    @pytest.mark.slow
    def test_missing_data(self, tmp_path):
        own = planted_runs.write_corpus(tmp_path)
        planted_runs.train(tmp_path / "run", own, steps=4)
        own.unlink()
        with pytest.raises(RequestError, match="cannot be replayed, because its data cannot be read"):
            replay(tmp_path / "run", step=4)

    def test_config(self, copied):
        file = copied / "config.yaml"
        file.write_text(file.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"))
        self.check(copied, "config.yaml was edited: learner.optimizer.learning_rate: 0.01 -> 0.02")

    @pytest.mark.slow
    def test_edited_config_does_not_change_a_saved_step(self, copied):
        file = copied / "config.yaml"
        file.write_text(file.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"))
        assert self.allowed(copied, "config.yaml was edited").identical is True

    def test_versions(self, planted, monkeypatch):
        from axlearn_core.run import lock

        now = {**lock.versions(), "jax": "0.0.1"}
        monkeypatch.setattr(lock, "versions", lambda: now)
        self.check(planted, "jax was .*, is 0.0.1")

    @pytest.mark.slow
    def test_code(self, planted, monkeypatch):
        from axlearn_core.learn import learner

        clip = learner._clip
        monkeypatch.setattr(learner, "_clip", lambda *args: jax.tree.map(lambda g: g * 0.5, clip(*args)))
        self.check(planted, "the compiled step was .*: code that computes it changed")
        assert self.allowed(planted, "the compiled step was").identical is False


class TestBadRequests:
    """One clear error, with the nearest step or name."""

    def test_step_whose_checkpoint_is_gone(self, copied):
        shutil.rmtree(copied / "checkpoints/2")
        with pytest.raises(CheckpointError, match="no checkpoint before step 4: that of step 2 is gone") as caught:
            replay(copied, step=4)
        assert "checkpoints: 4, 6" in str(caught.value)
        assert "--step 5, the nearest step that can be replayed" in str(caught.value)

    @pytest.mark.slow
    def test_step_from_the_start(self, planted):
        result = replay(planted, step=4, from_start=True)
        assert (result.identical, result.start, result.compared_steps) == (True, 0, (1, 2, 3, 4))

    def test_step_after_the_end(self, planted):
        with pytest.raises(RequestError, match=r"has not reached step 99\n    got: --step 99\n.*at most 6"):
            replay(planted, step=99)

    def test_unknown_probe(self, planted):
        with pytest.raises(RequestError, match=r"'decoder.\*\*.atention' matches no module.*\n.*nearest: .*attention"):
            replay(planted, step=4, probe="decoder.**.atention")

    def test_feature_that_changes_the_state(self, planted):
        with pytest.raises(RequestError, match="--with ema: the feature changes the training state"):
            replay(planted, step=4, with_=["ema"])

    def test_unknown_shadow(self, planted):
        with pytest.raises(RequestError, match="float33"):
            replay(planted, step=4, shadow="float33")

    def test_no_run(self, tmp_path):
        with pytest.raises(CheckpointError, match="is not a run directory"):
            replay(tmp_path / "none", step=4)
