"""Input for fine-tuning on conversations.

Rows are packed, and only the assistant's answers count toward the loss.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from axlearn_core.config import Node, node
from axlearn_core.errors import ConfigError, InputError, Problem
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.conversations import Conversation, ConversationRecords
from axlearn_plugins_transformer.text.examples import Example, example
from axlearn_plugins_transformer.text.language_model import LanguageModelInput
from axlearn_plugins_transformer.text.long_texts import long_text_error
from axlearn_plugins_transformer.text.records import Document, HasRecordSizes
from axlearn_plugins_transformer.text.sources import Part, Split
from axlearn_plugins_transformer.text.tokenizers import check_ids

SPLITS: tuple[Split, ...] = ("train", "validation")


class ChatInput(LanguageModelInput):
    """Batches of conversations.

    The chat template renders a conversation into tokens. The weight of a target is 1 in the assistant's answers, and 0
    elsewhere. In other documents, such as those from a mixture, all tokens count.
    """

    @node
    class Config(LanguageModelInput.Config):
        """Settings for the template and the conversations.

        Attributes:
            packing: How to pack conversations into rows. With `concat`, conversations can have any length.
            template: Chat template.
            answers: Train on all answers of a conversation, or only on the last one.
            too_long: Raise an error for a conversation that is longer than a row, truncate it, or drop it.
        """

        packing: Literal["concat", "first-fit", "none"] = "first-fit"
        template: Node[ChatTemplate] = ChatTemplate.Config()
        answers: Literal["all", "last"] = "all"
        too_long: Literal["error", "truncate", "drop"] = "error"

    config: Config

    def __init__(self, cfg: Config, **offered: Any):
        super().__init__(cfg, **offered)
        self._check_source()
        self.template = cfg.template.build(tokenizer=self.tokenizer)
        if cfg.too_long == "error" and not self._any_length:
            self._check_lengths()

    def example(self, document: Document) -> Example | None:
        """Return the tokens of a conversation with weights.

        Other documents are handled as in the base class.
        """
        if not isinstance(document, Conversation):
            return super().example(document)
        ids, marks = self._encode_conversation(document)
        if len(ids) > self._limit and not self._any_length:
            if self.config.too_long == "error":
                raise self._too_long([(document.location, len(ids))], None)
            ids, marks = ([], []) if self.config.too_long == "drop" else (ids[: self._limit], marks[: self._limit])
        return example(ids[:-1], ids[1:], marks[1:]) if any(marks[1:]) else None

    def _encode_conversation(self, document: Conversation) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and whether each is in an answer to train on."""
        row, last = document.row, self.config.answers == "last"
        rendered = self.template.render_answers(
            row["messages"], last=last, tools=row.get("tools"), location=document.location
        )
        ids, marks = self.template.encode(rendered)
        check_ids(self.tokenizer, ids, self.vocab_size, document.location)
        return ids, marks

    def describe(self) -> Mapping[str, Any]:
        """Return the base class's facts and a hash of the template."""
        return {**super().describe(), "template": self.template.digest}

    def _check_source(self) -> None:
        parts = [part for split in SPLITS for part in self.source.parts(split)]
        if parts and not any(isinstance(d, Conversation) for part in parts for d in part.records[0]):
            raise ConfigError(
                Problem(
                    path="input.source",
                    message="does not contain conversations",
                    got=type(self.config.source).__qualname__,
                    expected="chat-files, or a mixture with it",
                    fix="a run file or --set overrides the input.source that the chat feature sets: remove the "
                    "setting there, or set it to {type: chat-files, paths: ...}",
                )
            )

    def _with_rows(self, part: Part) -> Part:
        part, records = super()._with_rows(part), part.records
        if self.config.too_long != "drop" or self._any_length or not isinstance(records, ConversationRecords):
            return part
        fits = np.ones(len(records), bool)
        for i in self._long_rows(records):
            fits[i] = self.example(records[i][0]) is not None
        return attrs.evolve(part, records=records.select(fits)) if fits.any() else part

    def _check_lengths(self) -> None:
        """Before training, check the conversations that may be too long.

        Short rows are skipped, because rows with few bytes have few tokens.

        Raises:
            InputError: Some conversations are too long. The error says how many and names the longest.
        """
        parts = [part for split in SPLITS for part in self.source.parts(split)]
        records = [part.records for part in parts if isinstance(part.records, ConversationRecords)]
        documents = (d for r in records for i in self._long_rows(r) for d in r[i] if isinstance(d, Conversation))
        lengths = ((document.location, len(self._encode_conversation(document)[0])) for document in documents)
        if too_long := [(location, count) for location, count in lengths if count > self._limit]:
            raise self._too_long(too_long, sum(map(len, records)))

    def _too_long(self, lengths: Sequence[tuple[str, int]], total: int | None) -> InputError:
        return long_text_error(
            "conversation",
            lengths,
            total=total,
            limit=self._limit,
            sequence_length=self.config.sequence_length,
            fix="set input.too_long to 'truncate' or 'drop'",
        )

    @property
    def _limit(self) -> int:
        return self.config.sequence_length + 1  # the first token is only an input, the last only a target

    def _long_rows(self, records: Any) -> list[int]:
        sizes = np.asarray(records.sizes if isinstance(records, HasRecordSizes) else (), np.int64)
        return np.flatnonzero(sizes > self.config.sequence_length // 2).tolist()

    @property
    def _any_length(self) -> bool:
        return self.config.packing == "concat"
