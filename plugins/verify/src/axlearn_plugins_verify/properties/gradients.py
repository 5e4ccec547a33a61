"""Every parameter gets a gradient, or is frozen by name."""

from typing import Any, ClassVar

import numpy as np

from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.training_step import Step, split_layers


class Gradients:
    """Computes the gradients of a batch, and looks for parameters whose gradient is zero in a whole layer."""

    summary: ClassVar[str] = "every parameter gets a gradient or is frozen by name"

    def skip_reason(self, case: Any) -> str | None:
        """Always check."""
        return None

    def check(self, case: Any) -> Outcome:
        """List the parameters without a gradient in several batches."""
        program, weights = case.program(), case.weights()
        frozen = set(program.function("train").frozen)
        has_gradient: dict[tuple[str, str], bool] = {}
        for index in range(2):  # a single batch may not reach every part, such as an expert
            gradients = Step(program=program, weights=weights, batch=case.batch(index)).evaluate().gradients
            for path in gradients.keys() - frozen:
                for layer, value in split_layers(program, path, gradients[path]).items():
                    has_gradient[path, layer] = has_gradient.get((path, layer), False) or bool(np.any(value != 0))
        missing = sorted(key for key, nonzero in has_gradient.items() if not nonzero)
        difference = None
        if missing:
            path, index = missing[0]
            detail = f"is zero{f' in layer {index}' if index else ''}, and no rule of the learner freezes it"
            more = f"; {len(missing)} parameters have none" if len(missing) > 1 else ""
            difference = Difference(
                layer=path.rpartition(".")[0], tensor=f"gradient of {path}", error=1.0, detail=detail + more
            )
        return Outcome(
            error=1.0 if missing else 0.0,
            tolerance=0.0,
            compared=f"gradients of {len({path for path, _ in has_gradient})} trained parameters with zero",
            difference=difference,
        )
