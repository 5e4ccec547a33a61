"""Parts of a trainer as a third party would write them: only by protocol, without base classes of ours."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.config import REQUIRED, Configurable, interface, node, setting


class Counting:
    """Batches of rows that count up, from anywhere; the state is how many were given."""

    def __init__(self, rows, length, vocabulary):
        self.rows, self.length, self.vocabulary, self.position = rows, length, vocabulary, 0

    def __iter__(self):
        return self

    def __next__(self):
        first = np.random.default_rng(self.position).integers(0, self.vocabulary, (self.rows, 1))
        tokens = ((first + np.arange(self.length + 1)) % self.vocabulary).astype(np.int32)
        self.position += 1
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def get_state(self):
        return {"given": self.position}

    def set_state(self, state):
        self.position = state["given"]

    def close(self):
        pass


class CountingInput(Configurable):
    """An input pipeline."""

    @node
    class Config(Configurable.Config["CountingInput"]):
        batch_size: int = setting(default=8, ge=1)
        sequence_length: int = setting(default=16, ge=1)
        vocab_size: int = interface(default=REQUIRED)

    def __init__(self, cfg):
        self.cfg = cfg

    def train(self):
        return Counting(self.cfg.batch_size, self.cfg.sequence_length, self.cfg.vocab_size)

    def evaluation(self):
        return iter(())

    def describe(self):
        return {"kind": "counting"}


class CountedObjective(Configurable, nnx.Module):
    """The model's own loss, and how many rows it is of."""

    @node
    class Config(Configurable.Config["CountedObjective"]):
        """Nothing to set."""

    def __init__(self, cfg):
        pass

    def loss(self, model, batch, key):
        loss, summaries = model.loss(batch)
        return loss, {**summaries, "rows": jnp.float32(batch["tokens"].shape[0])}


class SignLearner(Configurable):
    """A learner: moves every parameter by a constant, against the sign of a moving average of its gradient."""

    @node
    class Config(Configurable.Config["SignLearner"]):
        rate: float = setting(default=0.003, gt=0)

    def __init__(self, cfg):
        self.rate = cfg.rate

    def init(self, params):
        return {"average": jax.tree.map(jnp.zeros_like, params)}

    def value_and_grad(self, loss, params, variables, batch, key):
        (value, (summaries, variables)), grads = jax.value_and_grad(loss, has_aux=True)(params, variables, batch, key)
        return (value, summaries, variables), grads

    def evaluation_params(self, state, params):
        return params

    def update(self, grads, state, params, loss):
        average = jax.tree.map(lambda a, g: 0.7 * a + g.astype(a.dtype), state["average"], grads)
        result = jax.tree.map(lambda p, a: p - self.rate * jnp.sign(a), params, average)
        return result, {"average": average}, {"moved": jnp.float32(self.rate)}


class NpzCheckpointer(Configurable):
    """A checkpointer: one file per step."""

    @node
    class Config(Configurable.Config["NpzCheckpointer"]):
        every: int = setting(default=2, ge=1)

    def __init__(self, cfg, *, directory):
        self.every, self.directory, self.files = cfg.every, Path(directory), {}

    def due(self, step):
        return step % self.every == 0

    def save(self, step, state, *, extra, metrics):
        self.directory.mkdir(parents=True, exist_ok=True)
        arrays = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(jax.device_get(state)))}
        np.savez(self.directory / f"{step}.npz", extra=json.dumps(extra), **arrays)
        return True

    def steps(self):
        return sorted(int(p.stem) for p in self.directory.glob("*.npz"))

    def latest_step(self):
        return max(self.steps(), default=None)

    def restore(self, step, like):
        with np.load(self.directory / f"{step}.npz") as file:
            leaves, tree = jax.tree.flatten(like)
            values = [jax.device_put(file[str(i)], leaf.sharding) for i, leaf in enumerate(leaves)]
            return tree.unflatten(values), json.loads(str(file["extra"]))

    def wait(self):
        pass

    def close(self):
        pass


class TextTracker(Configurable):
    """A tracker: lines of text."""

    @node
    class Config(Configurable.Config["TextTracker"]):
        name: str = "told.txt"

    def __init__(self, cfg, *, run_dir):
        self.file = Path(run_dir) / cfg.name

    def _tell(self, line):
        with self.file.open("a") as file:
            print(json.dumps(line), file=file)

    def start(self, info):
        self._tell({"start": info["start_step"]})

    def log(self, step, values):
        self._tell({"step": step, **{k: float(v) for k, v in values.items()}})

    def text(self, step, name, value):
        self._tell({"step": step, name: value})

    def close(self):
        self._tell({"closed": True})


class PlainLoop(Configurable):
    """A trainer loop: one step after the other, and how many it took."""

    def __init__(self, cfg):
        self.taken = 0

    def run(self, session):
        while session.step < session.max_steps:
            batch = session.program.put(next(session.batches))
            session.state, scalars = session.program.train_step(session.state, batch)
            session.step += 1
            self.taken += 1
            session.log(session.step, {k: float(v) for k, v in scalars.items()} | {"taken": self.taken})
            session.save(force=session.step == session.max_steps)
