"""From a directory to a model that can be evaluated."""

from pathlib import Path
from typing import Any

from axlearn_core.config import Node
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_plugins_evaluation.evaluate import Subject
from axlearn_plugins_evaluation.scoring import Scorer
from axlearn_plugins_text.chat_template import ChatTemplate


def subject_of(loaded: Any, *, length: int | None = None) -> Subject:
    """What was loaded, for evaluation.

    Args:
        loaded: of `axlearn_core.train.load`.
        length: of the longest row, in tokens; by default that of the rows that the model was trained with.

    Raises:
        RequestError: it has no tokenizer, or its model gives no likelihoods.
    """
    if loaded.tokenizer is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot be evaluated on text")
    own: Any = loaded.config.input
    template = getattr(own, "template", None)
    if not (isinstance(template, Node) and hasattr(template, "today")):
        template = ChatTemplate.Config()
    return subject(
        loaded.model,
        loaded.tokenizer,
        length=length or own.sequence_length,
        template=template.build(tokenizer=loaded.tokenizer),
        kernels=loaded.program.kernels,
    )


def subject(model: Any, tokenizer: Any, *, length: int, template: Any = None, kernels: Any = None) -> Subject:
    """A model with its tokenizer, for evaluation. Texts begin with the token that training puts before a document."""
    first = getattr(tokenizer, "bos_id", None)
    return Subject(
        Scorer(model, length=length, kernels=kernels),
        tokenizer,
        template or ChatTemplate.Config().build(tokenizer=tokenizer),
        (tokenizer.eos_id if first is None else first,),
    )


def load(directory: Path, *, step: int | None = None) -> Any:
    """The model of a run directory.

    Raises:
        CheckpointError: it is none, or has no such checkpoint.
    """
    from axlearn_core.train import load as load_run

    if not (directory / "config.yaml").is_file() and (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is a model of Hugging Face, and no run directory")
    return load_run(directory, step=step)
