"""Suite for training loops."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.compose import compose
from axlearn_core.config import Configurable, Node, node, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.learn import AdamW, Learner
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.run.record import RunDir
from axlearn_core.train import LossEvaluator, Trainer
from axlearn_core.train.loop import TrainLoop
from axlearn_core.train.trainer import Result
from axlearn_testing.common import assert_equal


class Line(Layer):
    """A linear model."""

    @node
    class Config(Layer.Config["Line"]):
        """Config without fields."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, precision=Precision())
        self.weight = nnx.Param(rngs.params.normal((4, 2)), out_sharding=("embed", "mlp"), eager_sharding=False)

    def loss(self, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mean squared error."""
        errors = jnp.sum((batch["x"] @ self.weight[...] - batch["y"]) ** 2, axis=1)
        return jnp.mean(errors), {"weight": jnp.float32(errors.shape[0])}


class Noise(Configurable):
    """An input of random numbers. Batch i depends only on i."""

    @node
    class Config(Configurable.Config["Noise"]):
        """`bad` is the index of a batch of NaNs, if any."""

        bad: int | None = None

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def train(self) -> "Numbers":
        """Return an endless stream of batches."""
        return Numbers(bad=self.cfg.bad)

    def evaluation(self) -> "Numbers":
        """Return two batches."""
        return Numbers(2)

    def describe(self) -> Mapping[str, Any]:
        """Return no facts."""
        return {}


class Numbers:
    """Iterator of `Noise`."""

    def __init__(self, count: int | None = None, bad: int | None = None):
        self.position, self.count, self.bad = 0, count, bad

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == self.count:
            raise StopIteration
        self.position += 1
        rng = np.random.default_rng(self.position)
        x = rng.standard_normal((8, 4), np.float32)
        return {"x": x * (np.nan if self.position == self.bad else 1), "y": x[:, :2] - x[:, 2:]}

    def get_state(self) -> Any:
        """Return the number of the batch."""
        return self.position

    def set_state(self, state: Any) -> None:
        """Continue at a batch."""
        self.position = state

    def close(self) -> None:
        """Do nothing."""


class Journal(Configurable):
    """A tracker that stores entries in memory, in `journals[run directory]`."""

    journals: ClassVar[dict[Path, list[tuple[Any, ...]]]] = {}

    @node
    class Config(Configurable.Config["Journal"]):
        """`stop_at` is a step after which the tracker sends SIGTERM to this process."""

        stop_at: int | None = None

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.cfg = cfg
        self.entries = self.journals.setdefault(run_dir, [])

    def start(self, info: Mapping[str, Any]) -> None:
        """Store the start step."""
        self.entries.append(("start", info["start_step"]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store values."""
        self.entries.append(("loss" if "loss" in values else "eval", step, dict(values)))
        if step == self.cfg.stop_at:
            signal.raise_signal(signal.SIGTERM)

    def text(self, step: int, name: str, value: str) -> None:
        """Store text."""
        self.entries.append(("text", step, name, value))

    def close(self) -> None:
        """Record that the tracker was closed."""
        self.entries.append(("close",))


class TrainerSuite:
    """Tests that every training loop must pass, on a model with eight parameters.

    Attributes:
        config: Config of the loop.
    """

    config: Node[Any] = TrainLoop.Config()

    def trainer(self, **edits: object) -> Trainer.Config:
        """Return the root config. `edits` maps paths to values, with `__` in place of dots."""
        cfg = Trainer.Config(
            model=Line.Config(),
            learner=Learner.Config(optimizer=AdamW(learning_rate=0.05)),
            input=Noise.Config(),
            evaluators={"eval": LossEvaluator.Config(every_steps=2)},
            trackers=(Journal.Config(),),
            loop=self.config,
            mesh=Mesh(shape={"data": -1}),
            max_steps=5,
            log_every_steps=1,
        )
        return patch(cfg, {"checkpointer.every_steps": 2, **{k.replace("__", "."): v for k, v in edits.items()}})

    def run(self, path: Path, **edits: object) -> Result:
        """Run in a directory, and resume if it has a checkpoint."""
        cfg = self.trainer(**edits)
        return cfg.build().run(RunDir(path, resumes=path.exists()), config_text="resolved: true\n")

    def losses(self, path: Path) -> list[tuple[int, float]]:
        """Return (step, loss) of each log entry."""
        return [(e[1], e[2]["loss"]) for e in Journal.journals[path] if e[0] == "loss"]

    def saved(self, path: Path) -> dict[int, Any]:
        """Return step -> state for each checkpoint."""
        cfg = self.trainer()
        checkpointer, like = cfg.checkpointer.build(directory=path / "checkpoints"), compose(cfg).state
        states = {step: checkpointer.restore(step, like)[0] for step in checkpointer.steps()}
        checkpointer.close()
        return states

    def test_run_logs_evaluates_and_saves(self, tmp_path: Path) -> None:
        result = self.run(tmp_path / "run")
        entries = Journal.journals[tmp_path / "run"]
        assert (result.step, result.stop_signal) == (5, None)
        assert self.losses(tmp_path / "run")[-1][0] == 5, "the last step must be logged"
        assert [e[1] for e in entries if e[0] == "eval"] == [2, 4, 5], "evaluators must run when due, and at the end"
        assert list(self.saved(tmp_path / "run")) == [2, 4, 5], "checkpoints must be saved when due, and at the end"
        assert entries[0] == ("start", 0)
        assert entries[-1] == ("close",)
        assert "eval_loss" in result.metrics

    def test_runs_are_deterministic(self, tmp_path: Path) -> None:
        self.run(tmp_path / "one")
        self.run(tmp_path / "two")
        assert self.losses(tmp_path / "one") == self.losses(tmp_path / "two")
        assert_equal(self.saved(tmp_path / "one")[5], self.saved(tmp_path / "two")[5], "state")

    def test_resumed_run_matches_uninterrupted_run(self, tmp_path: Path) -> None:
        self.run(tmp_path / "whole")
        self.run(tmp_path / "parts", max_steps=3)
        self.run(tmp_path / "parts")
        assert self.losses(tmp_path / "parts") == self.losses(tmp_path / "whole")
        assert_equal(self.saved(tmp_path / "parts")[5], self.saved(tmp_path / "whole")[5], "state")

    def test_finished_run_stays_unchanged(self, tmp_path: Path) -> None:
        self.run(tmp_path / "run")
        before = self.losses(tmp_path / "run")
        assert self.run(tmp_path / "run").step == 5
        assert self.losses(tmp_path / "run") == before

    def test_signal_stops_and_saves(self, tmp_path: Path) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        result = self.run(tmp_path / "run", max_steps=50, trackers=(Journal.Config(stop_at=3),))
        assert result.stop_signal == signal.SIGTERM
        assert 3 <= result.step < 50
        assert max(self.saved(tmp_path / "run")) == result.step, "the last step must be saved"
        assert signal.getsignal(signal.SIGTERM) == handler, "the previous signal handlers must be restored"

    def test_nonfinite_batch_is_skipped(self, tmp_path: Path, capfd: Any) -> None:
        self.run(tmp_path / "run", input__bad=3)
        assert "step 3" in capfd.readouterr().err, "standard error must name the step"
        assert np.isfinite(self.saved(tmp_path / "run")[5].params["weight"]).all()
