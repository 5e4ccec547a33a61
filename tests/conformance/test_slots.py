"""Every installed tokenizer, evaluator, profiler, watchdog, process group, weights source and cache passes its suite."""

import json

import pytest

import axlearn_core as ax
from axlearn_core.contracts import parts
from axlearn_core.run import open_weights
from axlearn_core.train.evaluators import Evaluator
from axlearn_plugins_finetune.lora.merge import export_run
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache
from axlearn_plugins_transformer.attention_variants.testing import LatentCacheSuite
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_plugins_transformer.testing import KVCacheSuite
from axlearn_testing import (
    EvaluatorSuite,
    ProcessGroupSuite,
    ProfilerSuite,
    TokenizerSuite,
    WatchdogSuite,
    WeightsSuite,
)
from support import installed_parts
from support.paths import HF_FIXTURES

DIRECTORY = HF_FIXTURES / "llama3"
SETTINGS = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
    "input.batch_size": 8,
    "input.sequence_length": 16,
    "evaluators": {},
}

for _name, _config in installed_parts.implementations(parts.Tokenizer).items():
    _settings = {"builtin": "python-2k"} if _name == "tokenizer-json" else {}
    _toy = {_name: installed_parts.toy_config(type(_config), **_settings)}
    globals().update(installed_parts.make_suites(TokenizerSuite, _toy))

_profilers = {
    n: installed_parts.toy_config(type(c), **({"start_step": 1} if n == "profiler" else {}))
    for n, c in installed_parts.implementations(parts.Profiler).items()
}
_runs = {"pytestmark": pytest.mark.slow_cases("test_failed_run_*", "test_resumed_run_*")}
globals().update(installed_parts.make_suites(ProfilerSuite, _profilers, **_runs))
globals().update(installed_parts.make_suites(WatchdogSuite, installed_parts.implementations(parts.Watchdog), **_runs))
_long = {
    "pytestmark": pytest.mark.slow_cases(
        "test_chunks_are_the_whole[prefill]",
        "test_chunks_are_the_whole[tokens]",
        "test_what_it_*[chunks]",
        "test_what_it_*[softcap]",
    )
}
globals().update(installed_parts.make_suites(KVCacheSuite, installed_parts.implementations(KVCache), **_long))
# The expanded layout stores keys and values. The tests of the server's `parity` mode use it.
_latent = {n: c for n, c in installed_parts.implementations(LatentCache).items() if n != "expanded-latent-cache"}
globals().update(installed_parts.make_suites(LatentCacheSuite, _latent, **_long))


class TextEvaluator(EvaluatorSuite):
    """Test with a small language model and its text."""

    @pytest.fixture(autouse=True)
    def of_text(self, tmp_path):
        cfg = ax.resolve("quickstart", set=SETTINGS).config
        self.edits = {"model": cfg.model, "input": cfg.input, "learner": cfg.learner}
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"def f{i}(x):"}) + "\n" for i in range(4)))
        more = {
            "file-evaluator": {"data": str(tmp_path / "texts.jsonl")},
            "loss-evaluator": {"max_batches": 2},
            "sample-evaluator": {"max_tokens": 4},
        }
        name = next(n for n, c in installed_parts.components().items() if c is type(self.config))
        if name == "reward-evaluator":
            self.edits = self.train_with_rewards(tmp_path)
        self.config = installed_parts.toy_config(type(self.config), **more.get(name, {}))

    def train_with_rewards(self, folder):
        """The changes to a trainer whose evaluator samples answers to examples."""
        rows = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8))
        (folder / "sums.jsonl").write_text(rows)
        task = {"type": "jsonl-task", "paths": str(folder / "sums.jsonl"), "validation_fraction": 0.5}
        options = {"task": task, "batch_size": 4, "group_size": 2, "max_tokens": 4, "kl": 0}
        cfg = ax.resolve("quickstart", with_={"grpo": options}, set=SETTINGS).config
        return {name: getattr(cfg, name) for name in ("model", "input", "learner", "objective", "loop")}


_evaluators = installed_parts.implementations(Evaluator)
globals().update(installed_parts.make_suites(TextEvaluator, _evaluators, pytestmark=pytest.mark.slow))


class TestLoss(EvaluatorSuite):
    config = _evaluators["loss-evaluator"]


class Joined(ProcessGroupSuite):
    """Use JAX's own environment variables."""

    def environment(self, rank, count, address):
        return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(rank)}


globals().update(
    installed_parts.make_suites(
        Joined, installed_parts.implementations(parts.ProcessGroup), pytestmark=pytest.mark.slow
    )
)


class TestDirectoryWeights(WeightsSuite):
    def weights(self, tmp_path):
        return open_weights(DIRECTORY)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make a run, a run that adapts it, and its adapters."""
    place = tmp_path_factory.mktemp("runs")
    for name, features, more in (
        ("base", [], {"learner.ema_decay": 0.5}),
        ("tuned", [f"lora:rank=2,base={place}/base"], {}),
    ):
        ax.train("quickstart", with_=features, set={**SETTINGS, **more}, steps=1, run_dir=place / name)
    export_run(place / "tuned", place / "adapters")
    return place


class OfRuns(WeightsSuite):
    """One of `runs`."""

    name: str

    @pytest.fixture(autouse=True)
    def over_runs(self, runs):
        self.runs = runs

    def weights(self, tmp_path):
        return open_weights(self.runs / self.name)


for _name in ("base", "tuned", "adapters"):
    _more = {"name": _name, "pytestmark": pytest.mark.slow}
    globals()[f"Test{_name.title()}Weights"] = type(_name, (OfRuns,), _more)
