"""A property for `axlearn prove`: a model that is exported and imported again gives the same logits.

This module needs `axlearn-plugins-verify`, which loads it.
"""

import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import tokenizers

from axlearn_core.compose import ModelWeights
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_models.huggingface.family import Family, Json, find_family
from axlearn_plugins_models.huggingface.import_export import write_model
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_models.huggingface.text_facts import TOKENIZER
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import (
    Run,
    compare_logits,
    logits_tolerance,
    missing_logits,
    model_weights,
    precise_config,
    random_rows,
)
from axlearn_plugins_verify.prove.training_step import Step, compare_steps


class ExportImport:
    """Writes the model in Hugging Face format, reads it again, and compares the logits of both.

    The config of the imported model comes from its `config.json`. Models without logits per token are compared by their loss.
    """

    summary: ClassVar[str] = "a model that is exported and imported gives the same logits"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models that no family describes."""
        try:
            _describe(case, case.config)
        except RequestError as error:
            lines = str(error).splitlines()
            return " ".join(line.strip() for line in lines[:2])
        return None

    def check(self, case: Any) -> Outcome:
        """Compare the model before the export and after the import."""
        original = precise_config(case.config)  # the files do not depend on the dtype of the computation
        program, (model_family, data) = case.program(original), _describe(case, original)
        weights = model_weights(case, program)
        with tempfile.TemporaryDirectory(prefix="axlearn-prove-") as name:
            directory = Path(name)
            write_model(
                directory,
                model_family,
                {**data, "dtype": "float32"},
                program.functional,
                {**weights.params, **weights.variables},
            )
            if model_family.text:
                write_tokenizer(directory, program.functional.describe().vocab_size)
            source = open_model(directory)
            config = patch(original, {"model": source.config.model})
            other = case.program(config)
            arrays = source.read({**other.weights_spec.params, **other.weights_spec.variables})
        functional = other.functional
        imported = ModelWeights(
            {p: arrays[p] for p in functional.abstract}, {p: arrays[p] for p in functional.variables}
        )
        compared = f"the model and its export as {model_family.model_type}"
        if missing_logits(case) is not None:
            steps = [
                Step(program=p, weights=w, batch=case.batch(case.seed))
                for p, w in ((program, weights), (other, imported))
            ]
            return compare_steps(*steps, compared=compared)
        rows = {"tokens": random_rows(case, 5)}
        tolerance = logits_tolerance(case, program, rows)
        one, two = (Run(program=p, weights=w, rows=rows) for p, w in ((program, weights), (other, imported)))
        return compare_logits(one, two, tolerance=tolerance, compared=f"logits of {compared}")


def _describe(case: Any, config: Any) -> tuple[Family, Json]:
    """Return the family and `config.json` of a shrunk config.

    If a family describes the original, numbers that it derives from sizes may differ by rounding after shrinking.

    Raises:
        RequestError: If no family describes the model.
    """
    try:
        return find_family(config)
    except RequestError:
        model_family, _ = find_family(case.original)
        data = model_family.config_json(config)
        changes = model_family.differences(data, config)
        if all(isinstance(c.old, float) and isinstance(c.new, float) and math.isclose(c.old, c.new) for c in changes):
            return model_family, data
        raise


def write_tokenizer(directory: Path, size: int) -> None:
    """Write a tokenizer with a word for each token ID, because an import needs one."""
    words = {f"word{i}": i for i in range(size)}
    model = tokenizers.models.WordLevel(words, unk_token="word0")  # type: ignore[attr-defined]
    tokenizers.Tokenizer(model).save(str(directory / TOKENIZER))
