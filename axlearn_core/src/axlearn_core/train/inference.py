"""A trained model, ready for use: its config, its tokenizer, and the model with its weights."""

from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import find, patch
from axlearn_core.contracts.experiment import end_tokens
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.run import bind_weights, open_weights
from axlearn_core.run.notices import log_message
from axlearn_core.train.trainer import Trainer


@attrs.frozen(eq=False)
class Loaded:
    """A trained model.

    Attributes:
        model: the `nnx.Module` with its weights: for a run that keeps moving averages, these.
        tokenizer: the input's tokenizer, or None where the input has none.
        step: the checkpoint's step.
    """

    config: Trainer.Config
    program: Program
    model: Any
    tokenizer: Tokenizer | None
    step: int

    def generate(self, prompt: str, *, max_tokens: int = 128, temperature: float | None = None, seed: int = 0) -> str:
        """Generate the text that follows `prompt`.

        Args:
            prompt: text for the model to continue.
            max_tokens: at most this many.
            temperature: 0 is greedy. None takes the model's default, which is 0 if its files name none.
            seed: equal seeds draw equal tokens.

        Raises:
            RequestError: the model has no tokenizer, does not generate, or no installed package generates text.
        """
        if "stream_text" not in registry().claims["functions"]:
            raise RequestError("generating text needs axlearn-plugins-transformer\n    fix: install it")
        stream = registry().entry("functions", "stream_text").load()
        return "".join(stream(self, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed))


def load(uri: str | Path, *, step: int | None = None) -> Loaded:
    """The model at a path or URI, on one device: of a run, or of anything that `open_weights` opens.

    Args:
        uri: a run directory, or another source of weights.
        step: which checkpoint of a run; by default the newest.

    Raises:
        CheckpointError: no weights lie there, no such checkpoint, or it is damaged.
    """
    configure_devices(None)
    weights = open_weights(uri, step=step)
    config = weights.experiment
    if not isinstance(config, Trainer.Config):
        raise CheckpointError(f"{uri}: its config is not a trainer's\n    got: {type(config).__qualname__}")
    tokenizer = weights.tokenizer
    program = compose(_choose_kernels(config), jax.devices()[:1])
    model = {**program.weights_spec.params, **program.weights_spec.variables}
    tensors = weights.read("**", {path: spec.sharding for path, spec in model.items()})
    bound = bind_weights(program.functional, tensors)
    if ends := end_tokens(config):
        bound.end_tokens = ends  # so that the model's own `generate` ends at each of them too
    return Loaded(config, program, bound, tokenizer, weights.step)


def _choose_kernels(config: Trainer.Config) -> Trainer.Config:
    """The config without the kernels that it names: those were named for the machine that it was trained on."""
    kernels = {path: value for path, value in find(config, "model.**.kernel").items() if isinstance(value, str)}
    if not kernels:
        return config
    listing = ", ".join(f"{path}={value}" for path, value in kernels.items())
    log_message(f"note: kernels named for training are not asked for here: {listing}")
    return patch(config, dict.fromkeys(kernels))
