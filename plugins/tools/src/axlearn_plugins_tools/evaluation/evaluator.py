"""Evaluate a model on files during training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axlearn_core.config import REQUIRED, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.train.evaluators import Periodic
from axlearn_plugins_tools.evaluation.data import read
from axlearn_plugins_transformer.text.protocols import tokenizer_of

if TYPE_CHECKING:
    from axlearn_core.train.session import Session


class FileEvaluator(Periodic):
    """Computes the metrics of `axlearn evaluate` during training.

    The metrics are named `<name>_accuracy`, `<name>_perplexity`, and so on.
    """

    @node
    class Config(Periodic.Config["FileEvaluator"]):
        """Settings for `FileEvaluator`.

        Attributes:
            data: File or glob. The fields of its rows determine the metrics.
            text_field: Field that holds a row's text.
            limit: Maximum number of rows.
        """

        data: str = REQUIRED
        text_field: str = "text"
        limit: int | None = setting(default=None, ge=1)

    def __init__(self, cfg: Config, *, name: str, input: Any):
        super().__init__(cfg, name=name)
        self.data = read(cfg.data, text_field=cfg.text_field, limit=cfg.limit)
        if tokenizer_of(input) is None:
            raise RequestError(f"evaluators.{name}: the trainer's input has no tokenizer, so {cfg.data} cannot be read")

    def run(self, session: "Session") -> Mapping[str, float]:
        """Return the metrics over all rows, with the current parameters."""
        from axlearn_plugins_tools.evaluation.evaluate import evaluate
        from axlearn_plugins_tools.evaluation.subjects import subject
        from axlearn_plugins_transformer.text.processor import text_processor

        source: Any = session.input
        text = text_processor(session.program.config, source.tokenizer)
        assert text is not None
        model = subject(session.model(), text, length=source.config.sequence_length, program=session.program)
        results = evaluate(model, self.data)
        return {f"{self.name}_{k}": v for k, v in results.items() if isinstance(v, float) and "stderr" not in k}
