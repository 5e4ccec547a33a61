"""Build a `Subject` from a path, a URI or a loaded run."""

from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_plugins_tools.evaluation.evaluate import Subject
from axlearn_plugins_tools.evaluation.scoring import Scorer
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor


def make_subject(loaded: Any, *, length: int | None = None) -> Subject:
    """Return the `Subject` of a loaded run.

    Args:
        loaded: Result of `axlearn_core.train.load`.
        length: Length of the longest row, in tokens. The default is the row length of the training data.

    Raises:
        RequestError: If the run has no tokenizer, or its model cannot compute likelihoods.
    """
    text = None if loaded.tokenizer is None else text_processor(loaded.config, loaded.tokenizer)
    if text is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot be evaluated on text")
    source: Any = loaded.config.input
    # Imported models define a context length. They were not trained on texts that follow the end of another text.
    always = text.context_length is None
    return subject(loaded.model, text, length=length or source.sequence_length, program=loaded.program, always=always)


def subject(model: Any, text: TextProcessor, *, length: int, program: Any = None, always: bool = True) -> Subject:
    """Return a `Subject` for a model and its text processor.

    Each text begins with the BOS token of the model. If the model has no BOS token, it begins with the token that ends
    a document, as in the rows of `language-model-input`.
    """
    has_bos = bool(text.prompt_prefix)
    return Subject(Scorer(model, length=length, program=program), text, always or has_bos)


def subject_in(uri: str | Path, *, step: int | None = None, length: int | None = None) -> Subject:
    """Return the `Subject` of a run, or of a path or URI that an installed plugin can open.

    Raises:
        CheckpointError: If there is nothing to load, or if this step has no checkpoint.
    """
    from axlearn_core.train import load

    return make_subject(load(uri, step=step), length=length)
