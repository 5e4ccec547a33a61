"""A finished run, ready for use: its model, its tokenizer, its config."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import settle
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.plugins.manager import host
from axlearn_core.train.api import saved_config
from axlearn_core.train.trainer import Trainer


@attrs.frozen(eq=False)
class Loaded:
    """A trained model.

    Attributes:
        model: the `nnx.Module` with the parameters of the checkpoint (their moving average where the run kept one).
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


def load(run_dir: str | Path, *, step: int | None = None) -> Loaded:
    """The model of a run directory at a step, by default the newest; or of another directory that a plugin can read.

    Raises:
        CheckpointError: the directory is no run, has no such checkpoint, or the checkpoint is damaged.
    """
    settle(None)
    path = Path(run_dir)
    config = saved_config(path)
    if config is None and step is None and (found := host().only("axlearn_load", directory=path)) is not None:
        return found
    if config is None:
        there = "has no config.yaml" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"{path} is no run directory: it {there}\n    fix: give the directory that `axlearn train` named"
        )
    if not isinstance(config, Trainer.Config):
        raise CheckpointError(f"{path}/config.yaml is no trainer's config")
    tokenizer_node: Any = getattr(config.input, "tokenizer", None)
    tokenizer = tokenizer_node.build() if tokenizer_node is not None else None
    program = compose(config, jax.devices()[:1])
    checkpointer = config.checkpointer.build(directory=path / "checkpoints")
    try:
        found = checkpointer.latest_step() if step is None else step
        if found is None or found not in checkpointer.steps():
            known = ", ".join(map(str, checkpointer.steps())) or "none"
            raise CheckpointError(f"{path} has no checkpoint{f' of step {step}' if step else ''} (there: {known})")
        state, _ = checkpointer.restore(found, program.state)
    finally:
        checkpointer.close()
    return Loaded(config, program, program.model(state), tokenizer, found)


def generate_text(
    model: Any,
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
    if not hasattr(model, "generate"):
        raise RequestError(f"a {type(model).__name__} does not write text: it has no method `generate`")
    prompt_ids = getattr(tokenizer, "encode_prompt", tokenizer.encode)(prompt) or [tokenizer.eos_id]
    ids: list[int] = []
    shown = tokenizer.decode(prompt_ids)
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
            yield text[len(shown) :]
            shown = text
