"""Packing: documents in one row give the same logits as in separate rows."""

from typing import Any, ClassVar

import numpy as np

from axlearn_core.compose import Program
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.contracts.experiment import get_input_config
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import (
    Run,
    check_precisely,
    compare_logits,
    competing_tokens,
    logits_tolerance,
    missing_logits,
    model_weights,
    random_rows,
)


class PackedDocuments:
    """Compares the logits of rows with two documents each to those of rows with one document."""

    summary: ClassVar[str] = "packed documents give the logits of separate ones"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models without logits per token, and inputs that do not pack."""
        source = get_input_config(case.config)
        shapes = source.batch_shapes() if isinstance(source, DeclaresBatches) else {}
        packs = any(name.endswith("segment_ids") for name in shapes)
        return (
            missing_logits(case)
            or (None if packs else "the input does not pack: its batches have no `segment_ids`")
            or (competing_tokens(case))
        )

    def check(self, case: Any) -> Outcome:
        """Compare packed and separate documents."""
        return check_precisely(case, lambda config: self._check(case, case.program(config)))

    def _check(self, case: Any, program: Program) -> Outcome:
        weights = model_weights(case, program)
        tokens = random_rows(case, 3)
        rows, length = tokens.shape
        size = length // 2
        index = np.arange(length)
        segments = np.where(index < 2 * size, index // size + 1, 0)
        positions = np.where(index < 2 * size, index % size, 0)
        packed = {
            "tokens": tokens,
            "segment_ids": np.broadcast_to(segments, tokens.shape).astype(np.int32),
            "positions": np.broadcast_to(positions, tokens.shape).astype(np.int32),
        }
        documents = tokens[:, : 2 * size].reshape(rows * 2, size)
        one = Run(program=program, weights=weights, rows={"tokens": documents})
        other = Run(
            program=program,
            weights=weights,
            rows=packed,
            select=lambda x: x[:, : 2 * size].reshape(rows * 2, size, *x.shape[2:]),
        )
        return compare_logits(
            one,
            other,
            tolerance=logits_tolerance(case, program, one.rows),
            compared=f"logits of {2 * rows} documents of {size} tokens, two in a row and one in a row",
        )
