"""Input for KTO: batches of answers that are desirable or not.

Shapes: B rows across all processes, S sequence length.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from axlearn_core.config import node
from axlearn_core.errors import Problem
from axlearn_plugins_finetune.objectives.preference_input import AnswerInput, BatchShapes, ReadRow, Rows, answer_shapes
from axlearn_plugins_finetune.objectives.preferences import LabelledFiles

LABELLED = ("completion", "mismatched")


class LabelledInput(AnswerInput):
    """Batches of prompts with one answer and its label.

    The arrays are `completion_tokens`, `completion_targets` and `completion_weights`, each [B, S], and `labels`, float32 [B], 1 for
    a desirable answer. `mismatched_tokens`, `mismatched_targets` and `mismatched_weights` have the same prompts, each with the
    answer of the next row of the batch. See `AnswerInput` for their contents.
    """

    @node
    class Config(AnswerInput.Config["LabelledInput"]):
        """Data source and batch shape."""

        def batch_shapes(self) -> BatchShapes:
            """See `AnswerInput.Config.batch_shapes`."""
            arrays = answer_shapes(LABELLED, self.batch_size, self.sequence_length)
            return {**arrays, "labels": ((self.batch_size,), "float32")}

        def validate(self) -> Iterable[Problem]:
            """Check that each batch has answers to other prompts."""
            yield from super().validate()
            if self.batch_size == 1:
                yield Problem(
                    path="batch_size",
                    message="one row does not have another row whose answer does not match its prompt",
                    got="1",
                    expected="at least 2",
                    fix="increase it",
                )

    fields = ("completion",)
    unit = "row"
    source_type, source_name = LabelledFiles, "labelled-files"

    def arrays(self, row: Mapping[str, Any], read_next: ReadRow) -> Rows:
        """See `AnswerInput.arrays`."""
        other = read_next()
        answers = {
            "completion": self.encode_answer(row["prompt"], row["completion"]),
            "mismatched": None if other is None else self.encode_answer(row["prompt"], other["completion"]),
        }
        arrays = {f"{a}_{name}": x for a, columns in answers.items() if columns for name, x in columns.items()}
        return {**self.padding(), **arrays, "labels": np.array(row["label"], np.float32)}
