"""Beginning a run with the parameters of another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import Program
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.errors import CheckpointError, InputError, RequestError
from axlearn_core.train import TrainLoop
from axlearn_core.train.api import saved_config
from axlearn_core.train.loop import Loop
from axlearn_core.train.session import Session, say
from axlearn_plugins_lora import adapters
from axlearn_plugins_lora.adapters import is_adapter
from axlearn_plugins_runs import carried

PARAMS, AVERAGE = "params.", "learner.ema."


class OtherModel(CheckpointError):
    """The parameters of a run are not those of the model at hand."""


class StartFromRun(Configurable):
    """Loads parameters into a run that is at its beginning, then hands over to the loop inside.

    A run that continues from its own checkpoint loads nothing.
    """

    @node
    class Config(Configurable.Config["StartFromRun"]):
        """Where the parameters come from.

        Attributes:
            run_dir: a run of the same model; adapters that it does not have stay as they were initialised. One of another
                model is carried over where the features that this model has more have bridges (a dense model to experts).
            step: which of its checkpoints; the newest where it is None.
            adapters: a directory written by `axlearn lora export`.
            same_tokenizer: refuses data whose tokenizer is not that of `run_dir`.
            loop: what trains.
        """

        run_dir: str | None = None
        step: int | None = setting(default=None, ge=0)
        adapters: str | None = None
        same_tokenizer: bool = True
        loop: Node[Loop] = TrainLoop.Config()

    def __init__(self, cfg: Config, *, input: Any = None):
        self.cfg = cfg
        self.loop = cfg.loop.build(input=input)
        if cfg.run_dir is not None and cfg.same_tokenizer:
            _check_tokenizer(Path(cfg.run_dir).expanduser(), getattr(input, "tokenizer", None))

    def run(self, session: Session) -> None:
        """See `axlearn_core.train.loop.Loop`."""
        if session.start_step == 0:
            session.state = self.started(session.state, session.program)
        self.loop.run(session)

    def started(self, state: Any, program: Program) -> Any:
        """A training state of a program with the parameters in place, sharded as they were."""
        params: dict[str, jax.Array] = dict(state.params)
        if self.cfg.run_dir is not None:
            directory = Path(self.cfg.run_dir).expanduser()
            found = _parameters(directory, params, program, self.cfg.step)
            say(f"starting from the parameters of {directory}: {len(found)} of {len(params)} arrays")
            params |= found
        if self.cfg.adapters is not None:
            exported = adapters.load(Path(self.cfg.adapters).expanduser())
            _check_same_maps(exported.params, params)
            exported.check(params)
            params |= {p: _placed(x, params[p]) for p, x in exported.params.items()}
        learner = state.learner
        average = getattr(learner, "ema", None)
        if average is not None:  # begins at the parameters, in buffers of its own
            learner = learner._replace(
                ema={p: jnp.array(params[p], jnp.float32, copy=True, device=a.sharding) for p, a in average.items()}
            )
        return state.replace(params=params, learner=learner)


def _parameters(run_dir: Path, params: Mapping[str, Any], program: Program, step: int | None) -> Mapping[str, Any]:
    """Those of a run of the same model; of another one, what its parameters become in this model."""
    try:
        return run_parameters(run_dir, params, step=step)
    except OtherModel:
        made = carried(run_dir, program.config, program.functional, step=step)
    say(f"{run_dir} is of another model: its parameters are carried over")
    return {p: _placed(x, params[p]) for p, x in made.items()}


def run_parameters(run_dir: Path, like: Mapping[str, Any], *, step: int | None = None) -> dict[str, jax.Array]:
    """The parameters of a run's checkpoint (their moving average where it kept one), as `like` has them.

    Args:
        run_dir: the run.
        like: path -> array, which may be abstract; gives dtypes and shardings.
        step: by default the newest.

    Returns:
        Those that the run has: all of `like`, but for adapters.

    Raises:
        OtherModel: it is a run of another model.
        CheckpointError: it is no run, or has no such checkpoint.
    """
    config: Any = saved_config(run_dir)
    if config is None:
        raise CheckpointError(f"{run_dir} is no run directory: it has no config.yaml")
    checkpointer = config.checkpointer.build(directory=run_dir / "checkpoints")
    try:
        if not (hasattr(checkpointer, "inspect") and hasattr(checkpointer, "restore_partial")):
            raise RequestError(f"the checkpointer of {run_dir} cannot restore a part of a state")
        known = checkpointer.steps()
        step = max(known, default=None) if step is None else step
        if step not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise CheckpointError(f"{run_dir} has no checkpoint{f' of step {step}' if known else ''} (there: {listed})")
        there = checkpointer.inspect(step).arrays
        _check_model(run_dir, there, like)
        sources = {p: next((k for k in (AVERAGE + p, PARAMS + p) if k in there), None) for p in like}
        wanted = {
            key: jax.ShapeDtypeStruct(like[p].shape, there[key].dtype, sharding=getattr(like[p], "sharding", None))
            for p, key in sources.items()
            if key is not None
        }
        loaded = checkpointer.restore_partial(step, wanted, "**")
    finally:
        checkpointer.close()
    return {p: loaded[key].astype(like[p].dtype) for p, key in sources.items() if key is not None}


def _check_tokenizer(run_dir: Path, mine: Any) -> None:
    """Raises `RequestError` where a run was trained with another tokenizer than the data is read with."""
    node: Any = getattr(getattr(saved_config(run_dir), "input", None), "tokenizer", None)
    if mine is None or node is None:
        return
    try:
        its = node.build()
    except InputError as error:
        say(f"note: the tokenizer of {run_dir} cannot be compared with the data's: {error}")
        return
    facts = [{n: getattr(t, n, None) for n in ("digest", "vocab_size", "eos_id")} for t in (its, mine)]
    if facts[0] != facts[1]:
        its, mine = (", ".join(f"{k} {v}" for k, v in f.items()) for f in facts)
        raise RequestError(
            f"input.tokenizer is not the tokenizer of {run_dir}, so its parameters mean other tokens\n"
            f"    got: {mine}\n    expected: {its}\n"
            "    fix: set input.tokenizer to that of the run; if another one is meant, set loop.same_tokenizer to false"
        )


def _check_model(run_dir: Path, there: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    has = {k.removeprefix(PARAMS): info for k, info in there.items() if k.startswith(PARAMS)}
    problems = [f"missing: {p}" for p in like if p not in has and not is_adapter(p)]
    problems += [
        f"differs: {p}: {tuple(has[p].shape)} there, {tuple(x.shape)} here"
        for p, x in like.items()
        if p in has and tuple(has[p].shape) != tuple(x.shape)
    ]
    stray = [p for p in has if p not in like]
    problems += [f"not in this model: {p}" for p in stray]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        merge = any(is_adapter(p) for p in stray)
        fix = "merge its adapters first: `axlearn lora merge`" if merge else "start from a run of the same model"
        listed = "\n".join(f"    {p}" for p in [*problems[:12], *more])
        kind = CheckpointError if merge else OtherModel
        raise kind(f"{run_dir} is of another model\n{listed}\n    fix: {fix}")


def _check_same_maps(exported: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    here = {p: tuple(x.shape) for p, x in params.items() if is_adapter(p)}
    given = {p: tuple(x.shape) for p, x in exported.items()}
    if here != given:
        odd = sorted(set(here.items()) ^ set(given.items()))[0]
        raise RequestError(
            f"the exported adapters are not those of this model: they differ at {odd[0]} {odd[1]}\n"
            "    fix: give lora the target and rank that they were trained with"
        )


def _placed(value: Any, like: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)
