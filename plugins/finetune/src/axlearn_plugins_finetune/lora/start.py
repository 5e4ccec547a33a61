"""Beginning a run with the parameters of another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.experiment import tokenizer_of_input
from axlearn_core.contracts.parts import Weights
from axlearn_core.contracts.text import HasDigest
from axlearn_core.errors import CheckpointError, InputError, RequestError
from axlearn_core.run import Run, open_weights
from axlearn_core.run.notices import log_message
from axlearn_core.train import TrainLoop
from axlearn_core.train.loop import Loop
from axlearn_core.train.session import Session
from axlearn_plugins_finetune.conversion import carried
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.adapters import is_adapter
from axlearn_plugins_transformer.text.protocols import bos_id_of, tokenizer_of

CONTINUES_WITHOUT = "a run that has begun goes on without it: `axlearn train RUN/config.yaml --run-dir RUN`"
"""For errors about a base that is gone."""


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
            run_dir: a run of the same model, or other weights that `axlearn_core.open_weights` opens; adapters that they
                lack stay as they were initialised. A run of another model is carried over where the features that this
                model has more have bridges (a dense model to experts).
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

        def begun(self) -> Node[Loop]:
            """See `axlearn_core.contracts.capabilities.BeginsElsewhere`."""
            return self.loop

    def __init__(self, cfg: Config, *, input: Any = None):
        self.cfg = cfg
        self.loop = cfg.loop.build(input=input)
        self._tokenizer = tokenizer_of(input)
        self._checked = False

    def check_beginning(self) -> None:
        """See `axlearn_core.contracts.capabilities.ChecksBeginning`."""
        self._checked = True
        if self.cfg.run_dir is not None and self.cfg.same_tokenizer:
            _check_tokenizer(self.cfg.run_dir, self._tokenizer)

    def run(self, session: Session) -> None:
        """See `axlearn_core.train.loop.Loop`."""
        if session.start_step == 0:
            if not self._checked:  # this loop is inside another one
                self.check_beginning()
            # The learner's state begins anew: the old one is freed first.
            state, session.state = session.state.replace(learner=None), None
            session.state = self.started(state, session.program)
        self.loop.run(session)

    def started(self, state: Any, program: Program) -> Any:
        """A training state of a program that begins with these weights, sharded as `state` is.

        The learner's state is new: moments at zero, a moving average at the parameters.
        """
        weights = program.trained.of_model(ModelWeights(state.params, state.variables))
        tensors: dict[str, jax.Array] = {**weights.params, **weights.variables}
        if self.cfg.run_dir is not None:
            new_tensors = _weights(self.cfg.run_dir, tensors, program, self.cfg.step)
            log_message(
                f"starting from the parameters of {self.cfg.run_dir}: {len(new_tensors)} of {len(tensors)} arrays"
            )
            tensors |= new_tensors
        if self.cfg.adapters is not None:
            exported = adapters.load(Path(self.cfg.adapters).expanduser())
            _check_same_maps(exported.params, tensors)
            exported.check(tensors)
            tensors |= {p: _put_like(x, tensors[p]) for p, x in {**exported.variables, **exported.params}.items()}
        params, variables = (
            {p: tensors.get(p, x) for p, x in part.items()} for part in (state.params, state.variables)
        )
        begun = program.begin(0, state.replace(params=params, variables=variables))
        return begun.replace(rng=state.rng)


def _weights(uri: str, like: Mapping[str, Any], program: Program, step: int | None) -> Mapping[str, Any]:
    """The weights of a run of the same model; of another one, what they become in this model."""
    try:
        return read_like(open_weights(uri, step=step), like, name=uri)
    except OtherModel:
        carried_over = carried(uri, program.config, program.functional, step=step)
    log_message(f"{uri} is of another model: its parameters are carried over")
    return {p: _put_like(x, like[p]) for p, x in carried_over.items()}


def read_like(weights: Weights, like: Mapping[str, Any], *, name: str) -> dict[str, jax.Array]:
    """All weights, in the dtypes and shardings of a model's tensors.

    Args:
        weights: of the same model; they may lack adapters.
        like: path -> array, which may be abstract.
        name: of the weights, for errors.

    Raises:
        OtherModel: they are of another model.
        CheckpointError: they have adapters that the model lacks, or a file is damaged.
    """
    specs = weights.specs()
    _check_model(name, specs, like)
    tensors = weights.read("**", {p: like[p].sharding for p in specs})
    return {p: x.astype(like[p].dtype) for p, x in tensors.items()}


def _check_tokenizer(uri: str, own: Any) -> None:
    """Raises `RequestError` where a run was trained with another tokenizer than the data is read with."""
    try:
        config = Run(uri).config
    except CheckpointError:
        raise
    except RequestError:  # weights of a scheme that no storage has
        return
    node = tokenizer_of_input(config)
    if own is None or node is None:
        return
    try:
        its = node.build()
    except InputError as error:
        log_message(f"note: the tokenizer of {uri} cannot be compared with the data's: {error}")
        return
    facts = [_describe(tokenizer) for tokenizer in (its, own)]
    if facts[0] != facts[1]:
        expected, got = (", ".join(f"{k} {v}" for k, v in f.items()) for f in facts)
        raise RequestError(
            f"input.tokenizer is not the tokenizer of {uri}, so its parameters mean other tokens\n"
            f"    got: {got}\n    expected: {expected}\n"
            "    fix: set input.tokenizer to that of the run; if another one is meant, set loop.same_tokenizer to false"
        )


def _check_model(name: str, weights: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    problems = [f"missing: {p}" for p in like if p not in weights and not is_adapter(p)]
    problems += [
        f"differs: {p}: {tuple(weights[p].shape)} there, {tuple(x.shape)} here"
        for p, x in like.items()
        if p in weights and tuple(weights[p].shape) != tuple(x.shape)
    ]
    stray = [p for p in weights if p not in like]
    problems += [f"not in this model: {p}" for p in stray]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        merge = any(is_adapter(p) for p in stray)
        fix = "merge its adapters first: `axlearn lora merge`" if merge else "start from a run of the same model"
        listed = "\n".join(f"    {p}" for p in [*problems[:12], *more])
        kind = CheckpointError if merge else OtherModel
        raise kind(f"{name} is of another model\n{listed}\n    fix: {fix}")


def _check_same_maps(exported: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    own_shapes = {p: tuple(x.shape) for p, x in params.items() if is_adapter(p)}
    shapes = {p: tuple(x.shape) for p, x in exported.items()}
    if own_shapes != shapes:
        odd = sorted(set(own_shapes.items()) ^ set(shapes.items()))[0]
        raise RequestError(
            f"the exported adapters are not those of this model: they differ at {odd[0]} {odd[1]}\n"
            "    fix: give lora the target and rank that they were trained with"
        )


def _put_like(value: Any, like: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)


def _describe(tokenizer: Any) -> dict[str, Any]:
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "bos_id": bos_id_of(tokenizer)}
    return {"digest": tokenizer.digest if isinstance(tokenizer, HasDigest) else None, **sizes}
