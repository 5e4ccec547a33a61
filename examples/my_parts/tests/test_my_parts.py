"""Tests of each component with the suite of its slot. Run `pytest` after installing the package."""

import csv
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.config import check, flatten
from axlearn_core.errors import CheckpointError, ConfigError, RequestError, WorkError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_my_parts.attention import CosineAttention
from axlearn_plugins_my_parts.checkpointer import MsgpackCheckpointer
from axlearn_plugins_my_parts.data import CopyTask
from axlearn_plugins_my_parts.drafter import RepeatDrafter
from axlearn_plugins_my_parts.evaluator import ParameterNorms
from axlearn_plugins_my_parts.experiment import my_parts
from axlearn_plugins_my_parts.kv_cache import Int8Cache
from axlearn_plugins_my_parts.latent_cache import Int8LatentCache
from axlearn_plugins_my_parts.learner import SignLearner
from axlearn_plugins_my_parts.loop import StopAtLoss
from axlearn_plugins_my_parts.model import Bigram
from axlearn_plugins_my_parts.process_group import RankFromEnvironment
from axlearn_plugins_my_parts.profiler import SlowestSteps
from axlearn_plugins_my_parts.reasoning_format import PlanTags
from axlearn_plugins_my_parts.scheduler import ShortestFirst
from axlearn_plugins_my_parts.tokenizer import Characters
from axlearn_plugins_my_parts.tool_format import CallTags
from axlearn_plugins_my_parts.tracker import CsvTracker, read_csv
from axlearn_plugins_my_parts.watchdog import StackDump
from axlearn_plugins_my_parts.weights import save_npz
from axlearn_plugins_serving.testing import DrafterSuite, ReasoningFormatSuite, SchedulerSuite, ToolFormatSuite
from axlearn_plugins_transformer.attention_variants.testing import LatentCacheSuite
from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp
from axlearn_plugins_transformer.testing import KVCacheSuite
from axlearn_testing import (
    Case,
    CheckpointerSuite,
    CommandOptionSuite,
    CommandSuite,
    EvaluatorSuite,
    InputSuite,
    KernelSuite,
    LayerSuite,
    LearnerSuite,
    ProcessGroupSuite,
    ProfilerSuite,
    StorageSuite,
    TokenizerSuite,
    TrackerSuite,
    TrainerSuite,
    WatchdogSuite,
    WeightsSuite,
)


class TestBigram(LayerSuite):
    config = Bigram.Config(vocab_size=64)
    meshes = 1


class TestCopyTask(InputSuite):
    config = CopyTask.Config()
    vocab_size = 16

    def test_batches_are_as_declared(self):
        batch = next(self.build().train())
        assert {k: (x.shape, str(x.dtype)) for k, x in batch.items()} == self.config.batch_shapes()

    def test_rows_that_processes_do_not_divide_are_refused(self):
        with pytest.raises(ConfigError, match="a multiple of 3"):
            self.build(count=3)


class TestCharacters(TokenizerSuite):
    config = Characters.Config()
    texts = ("a", "def f(x):\n    return x\n", "<eos> \t")

    def test_an_alphabet_has_no_character_twice(self):
        with pytest.raises(ConfigError, match="'b'"):
            check(Characters.Config(alphabet="abb"))


class TestUnknownCharacters(TokenizerSuite):
    config = Characters.Config(alphabet="ü€ ")
    lossless = False


class TestSignLearner(LearnerSuite):
    config = SignLearner.Config(accumulate_steps=2)


class TestMsgpack(CheckpointerSuite):
    config = MsgpackCheckpointer.Config()

    def test_a_step_is_saved_once(self, tmp_path):
        checkpointer = self.config.build(directory=tmp_path)
        assert [checkpointer.save(1, self.state(seed), extra={}, metrics={}) for seed in (1, 2)] == [True, False]


class TestSqlite(StorageSuite):
    uri = "sqlite://{tmp}/there/files.db"
    unwritable = "sqlite://{tmp}/file/files.db"


class TestNpzWeights(WeightsSuite):
    def weights(self, tmp_path):
        if not (tmp_path / "model.npz").exists():
            ax.train("my-parts", steps=1, run_dir=tmp_path / "run")
            save_npz(ax.open_weights(tmp_path / "run"), tmp_path / "model.npz")
        return ax.open_weights(tmp_path / "model.npz")

    def test_they_are_those_of_the_run(self, tmp_path):
        weights = self.weights(tmp_path)
        np.testing.assert_array_equal(weights.read()["table"], ax.open_weights(tmp_path / "run").read()["table"])

    def test_another_file_is_refused(self, tmp_path):
        np.savez(tmp_path / "other.npz", table=np.zeros(3))
        with pytest.raises(CheckpointError, match="save_npz"):
            ax.open_weights(tmp_path / "other.npz")


class TestParameterNorms(EvaluatorSuite):
    config = ParameterNorms.Config(every_steps=2)

    def test_a_pattern_that_fits_nothing_is_refused(self, tmp_path):
        with pytest.raises(WorkError, match="matches no parameter"):
            self.run(tmp_path / "run", {"probe": ParameterNorms.Config(pattern="no.such")})


class TestCsv(TrackerSuite):
    config = CsvTracker.Config()

    @staticmethod
    def read(run_dir):
        return [(step, {name: float(value)}) for step, name, value in read_csv(run_dir) if name == "loss"]


class TestSlowestSteps(ProfilerSuite):
    config = SlowestSteps.Config(count=2)

    def test_the_slowest_step_comes_first(self, tmp_path, monkeypatch):
        clock = iter([0.0, 1.0, 4.0, 5.0, 7.0])
        monkeypatch.setattr("time.perf_counter", lambda: next(clock))
        profiler = self.build(tmp_path)
        for step in range(5):
            profiler.before(step)
        profiler.close()
        slowest = json.loads((tmp_path / "slowest_steps-0.json").read_text())
        assert slowest == [{"step": 2, "seconds": 3.0}, {"step": 4, "seconds": 2.0}]


class TestStackDump(WatchdogSuite):
    config = StackDump.Config(seconds=1.0)

    @staticmethod
    def acted(run_dir):
        return any("most recent call first" in file.read_text() for file in run_dir.glob("stacks-*.txt"))


class TestRankFromEnvironment(ProcessGroupSuite):
    config = RankFromEnvironment.Config()

    def environment(self, rank, count, address):
        host, _, port = address.partition(":")
        return {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": host, "MASTER_PORT": port}

    def test_half_an_environment_is_refused(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(RequestError, match="WORLD_SIZE"):
            self.config.build().initialize()


class TestStopAtLoss(TrainerSuite):
    config = StopAtLoss.Config(loss=-1.0)  # no squared error is this low

    def test_it_stops_there(self, tmp_path):
        path = tmp_path / "run"
        result = self.run(path, loop=StopAtLoss.Config(loss=2.0), max_steps=200)
        assert 1 < result.step < 200
        below = [step for step, loss in self.losses(path) if loss <= 2.0]
        assert result.step - below[0] in (0, 1), "the next step may be in flight when a loss is logged"
        assert max(self.saved(path)) == result.step, "the last step is saved"


class TestInt8Cache(KVCacheSuite):
    config = Int8Cache.Config()
    tolerance = 2e-2

    def test_it_holds_a_byte_for_each_value(self):
        cache = self.empty("bfloat16")
        assert {str(x.dtype) for x in cache["values"].values()} == {"int8"}


class TestInt8LatentCache(LatentCacheSuite):
    config = Int8LatentCache.Config()
    tolerance = 2e-2

    def test_it_holds_a_byte_for_each_number(self):
        assert str(self.empty("bfloat16")["latents"].dtype) == "int8"


class TestCosineAttention(LayerSuite):
    config = CosineAttention.Config(num_heads=4)


ATTENTION = "model.decoder.layer.attention"
SMALL = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.feed_forward.hidden_dim": 48,
    "model.dtype": "float32",
    ATTENTION: {"type": "cosine-attention", "num_heads": 4},
}


@pytest.mark.parametrize(
    ("feature", "path", "value"),
    [
        ("rope", "position.type", "rope"),
        ("alibi", "position.type", "alibi"),
        ("interleave:every=2,window=4", "window.children.0.size", 4),
        ("context-parallel", "kernel", "ring"),
        ("paged-cache", "kv_cache.type", "paged-cache"),
    ],
)
def test_features_find_the_attention_by_its_roles_and_slots(feature, path, value):
    config = ax.resolve(ax.resolve("quickstart", set=SMALL).config, with_=[feature]).config
    assert flatten(config, registry().display_name)[f"{ATTENTION}.{path}"] == value


def test_attention_generates_from_pages_what_it_generates_without():
    small = ax.resolve("quickstart", set=SMALL).config
    config = ax.resolve(small, with_=["rope", "interleave:every=2,window=4"]).config
    paged = ax.resolve(config, with_=["paged-cache:page_size=4"]).config
    functional, rng = Functional.from_config(config.model), np.random.default_rng(0)
    params = {p: jnp.asarray(rng.normal(size=s.shape), s.dtype) for p, s in functional.abstract.items()}
    tokens = [
        list(f.bind(params).generate([1, 2, 3], max_tokens=8))
        for f in (functional, Functional.from_config(paged.model))
    ]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1


def normalize(kernel, x, weight, **options):
    return RMSNormOp(x, weight, **options).run(kernel)


def case(dtype, offset):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in ((2, 16, 32), (32,)))
    run = functools.partial(normalize, eps=1e-5, offset=offset)
    return Case(name=dtype, run=run, operands=(x, weight), tolerance=2e-5 if dtype == "float32" else 3e-2)


class TestProduct(KernelSuite):
    op, name = RMSNormOp, "product"
    cases = (case("float32", 0.0), case("bfloat16", 1.0))


def test_the_experiment_has_a_part_in_every_slot(tmp_path):
    result = ax.train("my-parts", run_dir=tmp_path / "run")
    assert 1 < result.step < 200, "the run stops at the target loss"
    assert result.metrics["loss"] <= 1.0
    assert result.metrics["norm_total"] > 0
    run = Path(tmp_path / "run")
    names = {row["name"] for row in csv.DictReader((run / "metrics.csv").open())}
    assert {"loss", "eval_loss", "norm_table"} <= names
    assert len(json.loads((run / "slowest_steps-0.json").read_text())) == 10
    assert not list(run.glob("stacks-*")), "no phase took too long"
    assert (run / f"checkpoints/{result.step}/state.msgpack").exists()
    assert ax.train("my-parts", run_dir=run, steps=result.step).step == result.step, "the run is complete"
    assert my_parts() == ax.resolve("my-parts").config


class TestOneLine(CommandSuite):
    name = "plan-one-line"
    arguments = ("my-parts", "--target", f"cpu-{len(jax.devices())}")


def test_the_command_prints_one_line_by_its_word_and_as_a_flag():
    machine = f"cpu-{len(jax.devices())}"
    for words in (["plan", "one-line", "my-parts"], ["plan", "my-parts", "--one-line"]):
        result = CliRunner().invoke(cli, [*words, "--target", machine])
        assert (result.exit_code, result.output) == (0, f"my-parts on {machine}: fits\n"), result.output
    both = CliRunner().invoke(cli, ["plan", "my-parts", "--target", machine, "--one-line", "--json"])
    assert both.exit_code == 2


class TestSeed(CommandOptionSuite):
    command, name, value = "train", "--seed", "3"
    arguments = ("my-parts", "--seed", "3", "--dry-run")


def test_the_option_sets_the_seed():
    wrong = CliRunner().invoke(cli, ["train", "my-parts", "--seed", "three", "--dry-run"])
    assert wrong.exit_code == 2
    assert "--seed three" in wrong.output


class TestShortestFirst(SchedulerSuite):
    config = ShortestFirst.Config()


class TestRepeatDrafter(DrafterSuite):
    config = RepeatDrafter.Config()


class TestCallTags(ToolFormatSuite):
    format = CallTags()

    def write(self, calls, rng):
        return "\n".join(f"<call {call.name}>{json.dumps(call.arguments)}</call>" for call in calls)


class TestPlanTags(ReasoningFormatSuite):
    format = PlanTags()
    prompt_inside = "<plan>\n"
    prompt_without = "<plan></plan>"

    def write(self, reasoning, text, *, inside):
        return f"{'' if inside else '<plan>'}{reasoning}</plan>{text}"
