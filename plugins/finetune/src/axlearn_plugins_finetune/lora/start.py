"""Start a run from the parameters of an earlier run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.capabilities import KeepsState
from axlearn_core.contracts.experiment import get_tokenizer_config
from axlearn_core.contracts.parts import Weights
from axlearn_core.contracts.text import HasDigest
from axlearn_core.errors import CheckpointError, InputError, RequestError, counted
from axlearn_core.run import Run, open_weights
from axlearn_core.run.notices import log_message
from axlearn_core.train import TrainLoop
from axlearn_core.train.loop import Loop
from axlearn_core.train.session import Session
from axlearn_plugins_finetune.conversion import transfer_run
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.adapters import is_adapter
from axlearn_plugins_transformer.text.protocols import bos_id_of, tokenizer_of

CONTINUES_WITHOUT = "a run that has started continues without it: `axlearn train RUN/config.yaml --run-dir RUN`"
"""Hint in errors about a missing base."""


class ModelMismatchError(CheckpointError):
    """The parameters of a run do not match the model."""


class StartFromRun(Configurable):
    """A training loop that loads parameters at step 0, and then runs the inner loop.

    A run that resumes from its own checkpoint does not load them.
    """

    @node
    class Config(Configurable.Config["StartFromRun"]):
        """Source of the parameters.

        Attributes:
            run_dir: Run of the same model, or other weights that `axlearn_core.open_weights` opens. Missing adapters keep their
                initial values. If the run has a different model, its parameters are transferred if this model's additional
                features have bridges (for example, from a dense model to experts).
            step: Step of the checkpoint. None means the newest.
            adapters: Directory written by `axlearn lora export`.
            same_tokenizer: Whether to reject data whose tokenizer differs from `run_dir`'s.
            loop: Loop that trains.
        """

        wraps: ClassVar[tuple[str, ...]] = ("loop",)

        run_dir: str | None = None
        step: int | None = setting(default=None, ge=0)
        adapters: str | None = None
        same_tokenizer: bool = True
        loop: Node[Loop] = TrainLoop.Config()

        def without_initial_weights(self) -> Node[Loop]:
            """See `axlearn_core.contracts.capabilities.LoadsInitialWeights`."""
            return self.loop

    def __init__(self, cfg: Config, *, input: Any = None, build_input: Any = None):
        self.cfg = cfg
        self.loop = cfg.loop.build(input=input, build_input=build_input)
        self._tokenizer = tokenizer_of(input)
        self._checked = False

    def check_start(self) -> None:
        """See `axlearn_core.contracts.capabilities.ChecksStart`."""
        self._checked = True
        if self.cfg.run_dir is not None and self.cfg.same_tokenizer:
            check_same_tokenizer(
                self.cfg.run_dir,
                self._tokenizer,
                fix="set input.tokenizer to the run's tokenizer, or set loop.same_tokenizer to false if this is intended",
            )

    def get_state(self) -> Any:
        """Return the state of the inner loop, or None. See `axlearn_core.contracts.capabilities.KeepsState`."""
        return self.loop.get_state() if isinstance(self.loop, KeepsState) else None

    def set_state(self, state: Any) -> None:
        """Restore the state of the inner loop."""
        if isinstance(self.loop, KeepsState):
            self.loop.set_state(state)

    def run(self, session: Session) -> None:
        """See `axlearn_core.train.loop.Loop`."""
        if session.start_step == 0:
            if not self._checked:  # nested in another loop, so the trainer did not check it
                self.check_start()
            # The learner gets a new state, so free the old state first.
            state, session.state = session.state.replace(learner=None), None
            session.state = self.started(state, session.program)
        self.loop.run(session)

    def started(self, state: Any, program: Program) -> Any:
        """Return a training state that starts from these weights, with the sharding of `state`.

        The learner's state is new: moments are zero, and a moving average equals the parameters.
        """
        weights = program.trained.select_model_weights(ModelWeights(state.params, state.variables))
        tensors: dict[str, jax.Array] = {**weights.params, **weights.variables}
        if self.cfg.run_dir is not None:
            new_tensors = _read_weights(self.cfg.run_dir, tensors, program, self.cfg.step)
            log_message(
                f"starting from the parameters of {self.cfg.run_dir}: {len(new_tensors)} of {counted(len(tensors), 'array')}"
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
        initial = program.begin(0, state.replace(params=params, variables=variables))
        return initial.replace(rng=state.rng)


def _read_weights(uri: str, like: Mapping[str, Any], program: Program, step: int | None) -> Mapping[str, Any]:
    """Read the weights of a run. Transfer them if the run has a different model."""
    try:
        return read_like(open_weights(uri, step=step), like, name=uri)
    except ModelMismatchError:
        params = transfer_run(uri, program.config, program.functional, step=step)
    log_message(f"{uri} is a run of a different model; transferred its parameters")
    return {p: _put_like(x, like[p]) for p, x in params.items()}


def read_like(weights: Weights, like: Mapping[str, Any], *, name: str) -> dict[str, jax.Array]:
    """Read all weights in the dtypes and shardings of a model's tensors.

    Args:
        weights: Weights of the same model. They may lack adapters.
        like: Path -> array, which may be abstract.
        name: Name of the weights, for error messages.

    Raises:
        ModelMismatchError: The weights belong to a different model.
        CheckpointError: The weights have adapters that the model lacks, or a file is damaged.
    """
    specs = weights.specs()
    _check_model(name, specs, like)
    tensors = weights.read("**", {p: like[p].sharding for p in specs})
    return {p: x.astype(like[p].dtype) for p, x in tensors.items()}


def check_same_tokenizer(uri: str, tokenizer: Any, *, fix: str) -> None:
    """Raise `RequestError` if the tokenizer of the data differs from the tokenizer of a run.

    Args:
        uri: The run. Nothing is checked for other weights, which name no tokenizer.
        tokenizer: Tokenizer of the data, or None.
        fix: Fix to name in the error.
    """
    try:
        config = Run(uri).config
    except CheckpointError:
        raise
    except RequestError:  # weights with a scheme that has no storage backend
        return
    node = get_tokenizer_config(config)
    if tokenizer is None or node is None:
        return
    try:
        run_tokenizer = node.build()
    except InputError as error:
        log_message(f"note: cannot compare the tokenizer of {uri} with the data's tokenizer: {error}")
        return
    facts = [_describe(t) for t in (run_tokenizer, tokenizer)]
    if facts[0] != facts[1]:
        expected, got = (", ".join(f"{k} {v}" for k, v in f.items()) for f in facts)
        raise RequestError(
            f"input.tokenizer is not the tokenizer of {uri}, so token ids have different meanings\n"
            f"    got: {got}\n    expected: {expected}\n"
            f"    fix: {fix}"
        )


def _check_model(name: str, weights: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    problems = [f"missing: {p}" for p in like if p not in weights and not is_adapter(p)]
    problems += [
        f"differs: {p}: got {tuple(weights[p].shape)}, expected {tuple(x.shape)}"
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
        kind = CheckpointError if merge else ModelMismatchError
        raise kind(f"{name} has the weights of a different model\n{listed}\n    fix: {fix}")


def _check_same_maps(exported: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    model_shapes = {p: tuple(x.shape) for p, x in params.items() if is_adapter(p)}
    shapes = {p: tuple(x.shape) for p, x in exported.items()}
    if model_shapes != shapes:
        odd = sorted(set(model_shapes.items()) ^ set(shapes.items()))[0]
        raise RequestError(
            f"the exported adapters do not match this model: they differ at {odd[0]} {odd[1]}\n"
            "    fix: set lora's target and rank to the values of their training"
        )


def _put_like(value: Any, like: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)


def _describe(tokenizer: Any) -> dict[str, Any]:
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "bos_id": bos_id_of(tokenizer)}
    return {"digest": tokenizer.digest if isinstance(tokenizer, HasDigest) else None, **sizes}
