"""Merged adapters give the logits of the adapted model."""

from typing import Any, ClassVar

from axlearn_core.compose import ModelWeights
from axlearn_core.errors import RequestError
from axlearn_plugins_finetune.lora.adapters import merge, scales_of
from axlearn_plugins_finetune.lora.feature import without_adapters
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import (
    Run,
    check_precisely,
    compare_logits,
    logits_tolerance,
    missing_logits,
    model_weights,
    product_rounding,
    random_rows,
)


class MergedAdapters:
    """Merges random adapters into the weights, as `axlearn lora merge` does, and compares the logits."""

    summary: ClassVar[str] = "merged adapters give the logits of the adapted model"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models without adapters, and models whose weights are integers."""
        if not scales_of(case.program().functional.describe()):
            return "the model has no adapters"
        try:
            self._merged(case, case.config)
        except RequestError as error:
            return str(error).splitlines()[0]
        return missing_logits(case)

    def check(self, case: Any) -> Outcome:
        """Compare the adapted and the merged model."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, config: Any) -> Outcome:
        program, rows = case.program(config), {"tokens": random_rows(case, 6)}
        one = Run(program=program, weights=model_weights(case, program), rows=rows)
        dense, weights = self._merged(case, config)
        other = Run(program=case.program(dense), weights=weights, rows=rows)
        # If products are in 8 bits, the merged weights are rounded differently from the weights alone.
        tolerance = logits_tolerance(case, program, rows, product_rounding(program, rows))
        return compare_logits(one, other, tolerance=tolerance, compared="logits of the adapted and the merged model")

    def _merged(self, case: Any, config: Any) -> tuple[Any, ModelWeights]:
        program, dense = case.program(config), without_adapters(config)
        functional, weights = case.program(dense).functional, model_weights(case, program)
        params = {
            p: x.astype(functional.abstract[p].dtype) if p in functional.abstract else x
            for p, x in weights.params.items()
        }
        merged = merge(params, scales_of(program.functional.describe()))
        variables = {p: weights.variables[p] for p in functional.variables}
        return dense, ModelWeights({p: merged[p] for p in functional.abstract}, variables)
