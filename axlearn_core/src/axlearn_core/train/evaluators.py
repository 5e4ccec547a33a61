"""What is measured during training: the loss on held-out data, and samples of generated text."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.parts import Input
from axlearn_core.nn.summaries import add_reports, values_of
from axlearn_core.train.session import Evaluator, Session

__all__ = ["Evaluator", "LossEvaluator", "Periodic"]

T_co = TypeVar("T_co", covariant=True)


class Periodic(Configurable):
    """An evaluator that runs every so many steps, and at the end."""

    @node
    class Config(Configurable.Config[T_co]):
        """`every_steps`: 0 runs it at the end only."""

        every_steps: int = setting(default=0, ge=0)

    def __init__(self, cfg: Config[Any], *, name: str):
        self.cfg, self.name = cfg, name

    def due(self, step: int, last: bool) -> bool:
        """After every `every_steps` steps, and after the last one."""
        return last or (self.cfg.every_steps > 0 and step % self.cfg.every_steps == 0)


class LossEvaluator(Periodic):
    """The mean loss over held-out batches: `<name>_loss`, and `<name>_nats_per_byte` if the input counts bytes.

    The loss is what the model itself scores, such as the cross-entropy of the targets. Auxiliary losses, penalties and label
    smoothing are no part of it. What the model or its layers report beside it is logged as `<name>_<what>`.

    Nats per byte compare models with different tokenizers: the summed loss over the summed bytes of the targets.
    """

    @node
    class Config(Periodic.Config["LossEvaluator"]):
        """`input`: where batches come from, the trainer's own input by default. `max_batches`: None takes all."""

        input: Node[Input] | None = None
        max_batches: int | None = setting(default=None, ge=1)

    def __init__(self, cfg: Config, *, name: str, input: Input, build_input: Callable[[Node[Input]], Input]):
        super().__init__(cfg, name=name)
        self.limit = cfg.max_batches
        self.input = input if cfg.input is None else build_input(cfg.input)
        self.input.evaluation().close()  # says now if there is nothing to evaluate on

    def run(self, session: Session) -> Mapping[str, float]:
        """Runs over the batches; sums stay on the device until the end."""
        batches = self.input.evaluation()
        totals: Any = None
        try:
            for i, batch in enumerate(batches):
                if i == self.limit:
                    break
                sums = session.program.eval_step(session.state, session.program.put(batch))
                totals = sums if totals is None else add_reports(totals, sums)
        finally:
            batches.close()
        if totals is None:
            return {}
        reported = values_of(totals.pop("summaries", {}))
        sums = {k: float(v) for k, v in totals.items()}
        values = {f"{self.name}_loss": sums["loss_sum"] / max(sums["weight"], 1.0)}
        if sums.get("bytes"):
            values[f"{self.name}_nats_per_byte"] = sums["loss_sum"] / sums["bytes"]
        beside = {f"{self.name}_{k}": float(v) for k, v in reported.items()}
        return {**values, **{k: v for k, v in beside.items() if k not in values}}
