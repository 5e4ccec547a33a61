"""Load a trained model for inference, with its config and tokenizer."""

from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import find, patch
from axlearn_core.contracts.experiment import end_tokens, get_experiment_name
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.run import bind_weights, open_weights
from axlearn_core.run.notices import log_message
from axlearn_core.train.trainer import Trainer


@attrs.frozen(eq=False, repr=False)
class LoadedModel:
    """A trained model.

    Attributes:
        config: Config of the run.
        program: Compiled functions of the model.
        model: The `nnx.Module` with its weights, or with their moving averages if the run keeps them.
        tokenizer: Tokenizer of the input, or None.
        step: Step of the checkpoint.
    """

    config: Trainer.Config
    program: Program
    model: Any
    tokenizer: Tokenizer | None
    step: int

    def __repr__(self) -> str:
        parameters = f"{self.program.functional.num_parameters:,} parameters"
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        name = [get_experiment_name(self.config)] if get_experiment_name(self.config) else []
        return f"LoadedModel({', '.join([*name, f'step {self.step:,}', parameters, tokenizer])})"

    def generate(self, prompt: str, *, max_tokens: int = 128, temperature: float | None = None, seed: int = 0) -> str:
        """Generate the text that follows `prompt`.

        Args:
            prompt: Text for the model to continue.
            max_tokens: Maximum number of tokens to generate.
            temperature: Sampling temperature. 0 is greedy. None uses the default in the model's files, or else 0.
            seed: Random seed. The same seed draws the same tokens.

        Raises:
            RequestError: The model has no tokenizer or cannot generate, or no installed package generates text.
        """
        if "stream_text" not in registry().claims["functions"]:
            raise RequestError("generating text requires axlearn-plugins-transformer\n    fix: install it")
        stream = registry().entry("functions", "stream_text").load()
        return "".join(stream(self, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed))


def load(uri: str | Path, *, step: int | None = None) -> LoadedModel:
    """Load the model of a run, or of any source that `open_weights` opens, on one device.

    Args:
        uri: A run directory, or the path or URI of weights in a supported format.
        step: Step of the checkpoint (default: the newest).

    Raises:
        CheckpointError: There are no weights at `uri`, or the checkpoint is missing or damaged.
    """
    configure_devices(None)
    weights = open_weights(uri, step=step)
    config = weights.experiment
    if not isinstance(config, Trainer.Config):
        raise CheckpointError(f"{uri}: its config is not a Trainer.Config\n    got: {type(config).__qualname__}")
    tokenizer = weights.tokenizer
    program = compose(_choose_kernels(config), jax.devices()[:1])
    model = {**program.weights_spec.params, **program.weights_spec.variables}
    tensors = weights.read("**", {path: spec.sharding for path, spec in model.items()})
    bound = bind_weights(program.functional, tensors)
    if ends := end_tokens(config):
        bound.end_tokens = ends  # so that the model's `generate` method stops at each of them
    return LoadedModel(config, program, bound, tokenizer, weights.step)


def _choose_kernels(config: Trainer.Config) -> Trainer.Config:
    """Return the config without explicit kernels, which were chosen for the training machine."""
    kernels = {path: value for path, value in find(config, "model.**.kernel").items() if isinstance(value, str)}
    if not kernels:
        return config
    listing = ", ".join(f"{path}={value}" for path, value in kernels.items())
    log_message(f"note: ignoring the kernels that were chosen for training: {listing}")
    return patch(config, dict.fromkeys(kernels))
