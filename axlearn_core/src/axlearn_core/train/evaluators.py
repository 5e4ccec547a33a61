"""Evaluators that run during training, such as the loss on held-out data."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.parts import Input
from axlearn_core.nn.summaries import add_reports, get_scalars
from axlearn_core.train.session import Evaluator, Session

__all__ = ["Evaluator", "LossEvaluator", "Periodic"]

T_co = TypeVar("T_co", covariant=True)


class Periodic(Configurable):
    """An evaluator that runs at fixed intervals and at the end of training."""

    @node
    class Config(Configurable.Config[T_co]):
        """Interval of a periodic evaluator.

        Attributes:
            every_steps: Steps between evaluations. 0 evaluates only at the end.
        """

        every_steps: int = setting(default=0, ge=0)

    def __init__(self, cfg: Config[Any], *, name: str):
        self.cfg, self.name = cfg, name

    def due(self, step: int, last: bool) -> bool:
        """Return True every `every_steps` steps and after the last step."""
        return last or (self.cfg.every_steps > 0 and step % self.cfg.every_steps == 0)


class LossEvaluator(Periodic):
    """The mean loss over held-out batches: `<name>_loss`, and `<name>_nats_per_byte` if the input counts bytes.

    The loss is the model's own, such as the cross-entropy of the targets. It excludes auxiliary losses, penalties and label
    smoothing. Other summaries of the model and its layers are logged as `<name>_<summary>`.

    Nats per byte is the total loss divided by the total number of bytes in the targets. Use it to compare
    models with different tokenizers.
    """

    @node
    class Config(Periodic.Config["LossEvaluator"]):
        """Source and number of the evaluation batches.

        Attributes:
            input: Source of the batches, or None for the trainer's input.
            max_batches: Maximum number of batches, or None for all.
        """

        input: Node[Input] | None = None
        max_batches: int | None = setting(default=None, ge=1)

    def __init__(self, cfg: Config, *, name: str, input: Input, build_input: Callable[[Node[Input]], Input]):
        super().__init__(cfg, name=name)
        self.limit = cfg.max_batches
        self.input = input if cfg.input is None else build_input(cfg.input)
        self.input.evaluation().close()  # raises now if the input has no evaluation data

    def run(self, session: Session) -> Mapping[str, float]:
        """Evaluate all batches. The sums stay on the device until the end."""
        batches = self.input.evaluation()
        totals: Any = None
        try:
            for i, batch in enumerate(batches):
                if i == self.limit:
                    break
                sums = session.program.eval_step(session.state, session.put(batch))
                totals = sums if totals is None else add_reports(totals, sums)
        finally:
            batches.close()
        if totals is None:
            return {}
        reported = get_scalars(totals.pop("summaries", {}))
        sums = {k: float(v) for k, v in totals.items()}
        values = {f"{self.name}_loss": sums["loss_sum"] / max(sums["weight"], 1.0)}
        if sums.get("bytes"):
            values[f"{self.name}_nats_per_byte"] = sums["loss_sum"] / sums["bytes"]
        others = {f"{self.name}_{k}": float(v) for k, v in reported.items()}
        return {**values, **{k: v for k, v in others.items() if k not in values}}
