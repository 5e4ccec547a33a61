"""Every installed input, learner, checkpointer, storage, tracker and training loop passes its suite.

The methods of a component's class determine its kind.
"""

import contextlib
import json
import warnings

import attrs
import numpy as np
import pytest

from axlearn_core.config import patch
from axlearn_core.contracts import parts
from axlearn_core.errors import ConfigError
from axlearn_core.run.metric_files import METRICS, read_jsonl
from axlearn_core.train.loop import Loop
from axlearn_testing import (
    CheckpointerSuite,
    InputSuite,
    LearnerSuite,
    ObjectiveSuite,
    StorageSuite,
    TrackerSuite,
    TrainerSuite,
)  # fmt: skip
from support import installed_parts, toy_models

TEXT = "def f(x):\n    return x\n\nprint('grüße', f(1))\n" * 6


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Files of several lengths."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(6):
        (folder / f"{i}.txt").write_text(TEXT[: 60 * (i + 1)] + f"# {i}\n", "utf-8")
        talk = [{"role": "user", "content": TEXT[: 4 * i + 5]}, {"role": "assistant", "content": f"{i} " * (3 * i + 2)}]
        (folder / f"{i}.jsonl").write_text(json.dumps({"messages": talk}), "utf-8")
        pairs = [{"prompt": TEXT[: 4 * i + k], "chosen": f"{i}", "rejected": f"{k} no"} for k in range(3)]
        labelled = [{"prompt": p["prompt"], "completion": p["rejected"], "label": i % 2 == 0} for p in pairs]
        for suffix, rows in (("pairs", pairs), ("labels", labelled)):
            (folder / f"{i}.{suffix}").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


class Input(InputSuite):
    """Test over a few short texts."""

    vocab_size = 300

    @pytest.fixture(autouse=True)
    def over_texts(self, texts):
        fields = {a.name for a in attrs.fields(type(self.config))}
        if "source" not in fields:  # images
            pixels = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8)
            np.savez(texts / "images.npz", images=pixels, labels=np.arange(10) % 4)
            more = {"paths": str(texts / "*.npz"), "held_out": 0.3} if "paths" in fields else {"held_out": 6}
            self.config = installed_parts.toy_config(type(self.config), **more)
            return
        # Use the first one that the input accepts.
        rows = (("preference-files", "pairs"), ("labelled-files", "labels"))
        for kind, suffix in (("files", "txt"), ("chat-files", "jsonl"), *rows):
            paths = {"paths": [f"{texts}/[0-3].{suffix}"], "validation_paths": [f"{texts}/[45].{suffix}"]}
            source = {"type": kind, **paths}
            settings = {"source": source, "tokenizer": {"type": "byte-tokenizer"}, "sequence_length": 80}
            self.config = installed_parts.toy_config(type(self.config), **settings)
            with contextlib.suppress(ConfigError):
                self.build()
                break


def read_json_lines(run_dir):
    return [(r["step"], r) for r in read_jsonl(run_dir / METRICS)[0]]


def read_events(run_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from TensorBoard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(e.step, {"loss": e.value}) for e in events.Scalars("train/loss")]


READERS = {"jsonl": read_json_lines, "tensorboard": read_events}

# A task-input yields examples, and an rl-loop makes batches of them for a policy-gradient. tests/plugins/rl has tests of these,
# with the suite for objectives.
_rollouts = ("task-input", "rl-loop", "policy-gradient")


def others(protocol):
    """The components of a kind that do not need rollouts."""
    return {name: cfg for name, cfg in installed_parts.implementations(protocol).items() if name not in _rollouts}


_inputs = others(parts.Input)
globals().update(installed_parts.make_suites(Input, _inputs))
globals().update(installed_parts.make_suites(LearnerSuite, installed_parts.implementations(parts.Learner)))
globals().update(installed_parts.make_suites(CheckpointerSuite, installed_parts.implementations(parts.Checkpointer)))
for _name, _config in installed_parts.implementations(parts.Tracker).items():
    _read = {"read": staticmethod(READERS[_name])} if _name in READERS else {}
    _read |= {"remote": "Prometheus scrapes it over HTTP"} if _name == "prometheus" else {}
    _read |= {"pytestmark": pytest.mark.slow_cases("test_tracker_accepts_full_run")} if _name == "tensorboard" else {}
    globals().update(installed_parts.make_suites(TrackerSuite, {_name: _config}, **_read))
for _name, _config in others(Loop).items():
    _own = type(_config).__module__.startswith("axlearn_core.")
    # A run takes seconds to compile, so the loops of plugins are slow tests.
    globals().update(
        installed_parts.make_suites(TrainerSuite, {_name: _config}, pytestmark=[] if _own else [pytest.mark.slow])
    )


class Objective(ObjectiveSuite):
    """Test with a small language model, and the batch that the objective needs."""

    model = toy_models.small("quickstart").model

    def batch(self):
        one, two = (toy_models.batch(seed, rows=8) for seed in (0, 1))
        answers = {"chosen": one, "rejected": two, "completion": one, "mismatched": two}
        arrays = {f"{name}_{k}": x for name, rows in answers.items() for k, x in rows.items()}
        return {**one, **arrays, "labels": np.arange(8, dtype=np.float32) % 2}


for _name, _config in others(parts.Objective).items():
    _own = type(_config).__module__.startswith("axlearn_core.")
    # The programs of plugins' objectives have several models and take seconds to compile.
    _long = ("every_option", "frozen_arrays", "gradients_reach", "loss_depends", "step_changes", "the_loss")
    # tests/core/train/test_objective.py tests the same two of an objective with parameters.
    _slow = tuple(f"test_{name}_*" for name in ("microbatches", "sharded", *(() if _own else _long)))
    globals().update(
        installed_parts.make_suites(Objective, {_name: _config}, pytestmark=[pytest.mark.slow_cases(*_slow)])
    )


@pytest.mark.slow_cases("test_nonfinite_gradients_skip_update[nan-loss]")
class TestAccumulatingLearner(LearnerSuite):
    config = patch(
        installed_parts.toy_config(installed_parts.components()["learner"]), {"accumulate_steps": 4, "ema_decay": 0.5}
    )


class TestDirectories(StorageSuite):
    uri = "file://{tmp}/checkpoints"
