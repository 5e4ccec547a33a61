"""Evaluate a model on data: perplexity, bits per byte, and accuracy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import InputError
from axlearn_plugins_tools.evaluation.data import Data, Question
from axlearn_plugins_tools.evaluation.scoring import Score, Scorer
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import check_ids, token_bytes


@attrs.frozen(eq=False)
class Subject:
    """A model that computes likelihoods of text.

    Attributes:
        scorer: Computes the log-likelihoods.
        processor: Encodes text for the model.
        always: Whether to prepend the token that begins a document to every text, as in training. If False, it is only
            prepended to an empty context.
    """

    scorer: Scorer
    processor: TextProcessor
    always: bool = True

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self.processor.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """Chat template of the model, or the plain template."""
        return self.processor.template

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens at the beginning of every document."""
        return self.processor.document_prefix

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of its continuation.

        See `TextProcessor.encode_continuation`.
        """
        before, after = self.processor.encode_continuation(context, continuation)
        self.check([*before, *after], f"the text {(context + continuation)[:60]!r}")
        if not self.processor.prompt_prefix and (self.always or not before):
            before = [*self.prefix, *before]
        return before, after

    def text(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text including the prefix, and whether each token counts.

        The prefix does not count.
        """
        ids = self.processor.encode_document(text)
        self.check(ids, f"the text {text[:60]!r}")
        return [*self.prefix, *ids], [False] * len(self.prefix) + [True] * len(ids)

    def check(self, ids: Sequence[int], location: str) -> None:
        """Raise `InputError` if a text has a token outside the model's vocabulary.

        Args:
            ids: Tokens of the text.
            location: Name of the text, for use in the error message.
        """
        check_ids(self.tokenizer, ids, vocabulary_size(self.scorer.model), location)


def evaluate(subject: Subject, data: Data, *, stride: int | None = None) -> dict[str, Any]:
    """Return the metrics for one set of rows. See `text`, `chat` and `choices`."""
    if data.kind == "choices":
        return choices(subject, data)
    return (text if data.kind == "text" else chat)(subject, data, stride=stride)


def text(subject: Subject, data: Data, *, stride: int | None = None) -> dict[str, Any]:
    """Return the metrics for texts.

    Every token of a text counts. The end of a document is not predicted.

    Returns:
        `rows`, `tokens`, `bytes` (of UTF-8), `loss` (nats per token), `perplexity`, `bits_per_byte`.
    """
    scores = subject.scorer([subject.text(t) for t in data.items], stride=stride)
    return _losses(scores, sum(len(t.encode()) for t in data.items))


def chat(subject: Subject, data: Data, *, stride: int | None = None) -> dict[str, Any]:
    """Return the metrics for conversations.

    Only the tokens of the assistant's messages and their end tokens count.

    Returns:
        The same metrics as `text`.
    """
    texts, size = [], 0.0
    sizes = token_bytes(subject.tokenizer)
    for row, location in zip(data.items, data.places, strict=True):
        template = subject.processor.data_template  # has a fixed date, so the results are reproducible
        rendered = template.render_answers(row["messages"], tools=row.get("tools"), location=location)
        ids, marks = template.encode(rendered)
        subject.check(ids, location)
        texts.append((ids, marks))
        size += float(sizes[np.asarray(ids, np.int64)[1:][np.asarray(marks, bool)[1:]]].sum())
    return _losses(subject.scorer(texts, stride=stride), size)


def _losses(scores: Sequence[Score], size: float) -> dict[str, Any]:
    total, tokens = -math.fsum(s.log_likelihood for s in scores), sum(s.tokens for s in scores)
    loss = total / tokens
    return {
        "rows": len(scores),
        "tokens": tokens,
        "bytes": int(size),
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": total / size / math.log(2) if size else math.inf,
    }


def choices(subject: Subject, data: Data) -> dict[str, Any]:
    """Return the metrics for a set of questions.

    `accuracy` selects the choice with the highest log-likelihood given the prompt. `accuracy_normalized` selects the
    choice with the highest log-likelihood per character. Ties go to the first choice.

    Returns:
        `rows`, `accuracy`, `accuracy_normalized`, and the standard error of each.

    Raises:
        InputError: If a choice is empty or longer than the model's rows.
    """
    pairs, owners = [], []
    for question, location in zip(data.items, data.places, strict=True):
        for choice in question.choices:
            pair = subject.pair(question.prompt, question.delimiter + choice)
            if not 0 < len(pair[1]) <= subject.scorer.length:
                raise InputError(
                    f"{location}: a choice has {len(pair[1])} tokens\n    got: {choice[:60]!r}\n"
                    f"    expected: 1 to {subject.scorer.length}, the longest row of this model"
                )
            pairs.append(pair)
        owners.append(len(pairs))
    scores = [s.log_likelihood for s in subject.scorer.continuations(pairs)]
    correct = {"accuracy": [], "accuracy_normalized": []}
    for question, stop in zip(data.items, owners, strict=True):
        likelihoods = np.array(scores[stop - len(question.choices) : stop])
        for name, values in (("accuracy", likelihoods), ("accuracy_normalized", likelihoods / _lengths(question))):
            correct[name].append(float(int(np.argmax(values)) == question.answer))
    return {"rows": len(data.items), **_means(correct)}


def _lengths(question: Question) -> np.ndarray:
    return np.array([len(c) for c in question.choices], np.float64)


def _means(correct: Mapping[str, Sequence[float]]) -> dict[str, float]:
    means = {}
    for name, values in correct.items():
        means[name] = float(np.mean(values))
        if len(values) > 1:
            means[f"{name}_stderr"] = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    return means
