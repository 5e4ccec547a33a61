"""From a directory to a model that can be evaluated."""

from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_plugins_tools.evaluation.evaluate import Subject
from axlearn_plugins_tools.evaluation.scoring import Scorer
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor


def subject_of(loaded: Any, *, length: int | None = None) -> Subject:
    """What was loaded, for evaluation.

    Args:
        loaded: of `axlearn_core.train.load`.
        length: of the longest row, in tokens; by default that of the rows that the model was trained with.

    Raises:
        RequestError: it has no tokenizer, or its model gives no likelihoods.
    """
    text = None if loaded.tokenizer is None else text_processor(loaded.config, loaded.tokenizer)
    if text is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot be evaluated on text")
    source: Any = loaded.config.input
    # An imported model never saw a text behind the end of another, and tells the length that it was made for.
    always = text.context_length is None
    return subject(loaded.model, text, length=length or source.sequence_length, program=loaded.program, always=always)


def subject(model: Any, text: TextProcessor, *, length: int, program: Any = None, always: bool = True) -> Subject:
    """A model with its text processor, for evaluation.

    A text begins with the BOS token of the model; without one, with the token that ends a document, as the rows of
    `language-model-input` do.
    """
    has_bos = bool(text.prompt_prefix)
    return Subject(Scorer(model, length=length, program=program), text, always or has_bos)


def subject_in(uri: str | Path, *, step: int | None = None, length: int | None = None) -> Subject:
    """The model of a run, or of another path or URI that an installed plugin can open, for evaluation.

    Raises:
        CheckpointError: nothing can be loaded from it, or it has no such checkpoint.
    """
    from axlearn_core.train import load

    return subject_of(load(uri, step=step), length=length)
