"""A trained model, ready for use: its config, its tokenizer, and the model with its weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint.weights import bind_weights, open_weights
from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import find, patch
from axlearn_core.contracts.capabilities import GeneratesTokens, encode_prompt
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.train.session import log_message
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

    def generate(self, prompt: str, *, max_tokens: int = 128, temperature: float = 0.0, seed: int = 0) -> str:
        """The text that the model writes after `prompt`, without the prompt."""
        if self.tokenizer is None:
            raise RequestError("this run's input has no tokenizer, so its model cannot write text")
        return "".join(
            generate_text(
                self.model,
                self.tokenizer,
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                program=self.program,
            )
        )


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
    return Loaded(config, program, bind_weights(program.functional, tensors), tokenizer, weights.step)


def _choose_kernels(config: Trainer.Config) -> Trainer.Config:
    """The config without the kernels that it names: those were named for the machine that it was trained on."""
    kernels = {path: value for path, value in find(config, "model.**.kernel").items() if isinstance(value, str)}
    if not kernels:
        return config
    listing = ", ".join(f"{path}={value}" for path, value in kernels.items())
    log_message(f"note: kernels named for training are not asked for here: {listing}")
    return patch(config, dict.fromkeys(kernels))


def generate_text(
    model: object,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    program: Program | None = None,
) -> Iterator[str]:
    """Yields pieces of text as they are generated; a character that spans tokens comes when it is complete.

    `program`: of the experiment that the model belongs to; without it the model is compiled on its own, for one device.
    """
    if not isinstance(model, GeneratesTokens):
        raise RequestError(f"a {type(model).__name__} does not write text: it has no method `generate`")
    prompt_ids = encode_prompt(tokenizer, prompt) or [tokenizer.eos_id]
    ids: list[int] = []
    prefix = tokenizer.decode(prompt_ids)
    for token in model.generate(
        prompt_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        eos_id=tokenizer.eos_id,
        program=program,
    ):
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        text = tokenizer.decode([*prompt_ids, *ids])
        if not text.endswith("\ufffd"):
            yield text[len(prefix) :]
            prefix = text
