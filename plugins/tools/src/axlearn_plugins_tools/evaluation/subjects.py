"""From a directory to a model that can be evaluated."""

from pathlib import Path
from typing import Any

from axlearn_core.config import Node
from axlearn_core.contracts.capabilities import encode_prompt
from axlearn_core.errors import RequestError
from axlearn_plugins_tools.evaluation.evaluate import Subject
from axlearn_plugins_tools.evaluation.scoring import Scorer
from axlearn_plugins_transformer.text.chat_template import ChatTemplate


def subject_of(loaded: Any, *, length: int | None = None, own: bool = True) -> Subject:
    """What was loaded, for evaluation.

    Args:
        loaded: of `axlearn_core.train.load`.
        length: of the longest row, in tokens; by default that of the rows that the model was trained with.
        own: whether it was trained on rows that begin with the token that ends a document.

    Raises:
        RequestError: it has no tokenizer, or its model gives no likelihoods.
    """
    if loaded.tokenizer is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot be evaluated on text")
    source: Any = loaded.config.input
    template = getattr(source, "template", None)
    if not (isinstance(template, Node) and hasattr(template, "today")):
        template = ChatTemplate.Config()
    return subject(
        loaded.model,
        loaded.tokenizer,
        length=length or source.sequence_length,
        template=template.build(tokenizer=loaded.tokenizer),
        program=loaded.program,
        always=own,
    )


def subject(
    model: Any, tokenizer: Any, *, length: int, template: Any = None, program: Any = None, always: bool = True
) -> Subject:
    """A model with its tokenizer, for evaluation.

    A text begins with the token that the model expects there (`bos` of its tokenizer); without one with that which ends
    a document, as the rows of `language-model-input` do.
    """
    front = encode_prompt(tokenizer, "")
    return Subject(
        Scorer(model, length=length, program=program),
        tokenizer,
        template or ChatTemplate.Config().build(tokenizer=tokenizer),
        tuple(front or (tokenizer.eos_id,)),
        always or bool(front),
    )


def subject_in(uri: str | Path, *, step: int | None = None, length: int | None = None) -> Subject:
    """The model of a run, or of another path or URI that an installed plugin can open, for evaluation.

    Raises:
        CheckpointError: nothing can be loaded from it, or it has no such checkpoint.
    """
    from axlearn_core.train import load

    return subject_of(load(uri, step=step), length=length, own=_is_own(uri))


def _is_own(uri: str | Path) -> bool:
    """Whether a model was trained on rows of ours from the start: others never saw a text behind the end of another."""
    directory = Path(uri)
    return (directory / "config.yaml").is_file() and not (directory / "huggingface").is_dir()
