"""The `stop-at-loss` component."""

from collections.abc import Mapping

from axlearn_core.extend import REQUIRED, RunListener, Session, TrainLoop, log_message, node, setting


class StopAtLoss(TrainLoop):
    """Trains until a logged loss is at most `loss`, or until `max_steps`.

    Then it evaluates and saves, like every training loop.
    """

    @node
    class Config(TrainLoop.Config):
        """Settings for `StopAtLoss`.

        Attributes:
            loss: Training loss at which to stop. It is checked every `log_every_steps`.
        """

        loss: float = setting(default=REQUIRED)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.loss = cfg.loss

    def run(self, session: Session) -> None:
        """Train the model. See `axlearn_core.train.loop.Loop`."""
        session.events.add(_LossListener(session, self.loss))
        super().run(session)


class _LossListener(RunListener):
    """Ends the run after the current step if the loss reaches the target."""

    def __init__(self, session: Session, loss: float):
        self.session, self.loss = session, loss

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Stop at the current step if the loss is low enough.

        All processes log the same values, so they stop at the same step.
        """
        if values.get("loss", float("inf")) <= self.loss and self.session.step < self.session.max_steps:
            log_message(f"step {step}: the loss {values['loss']:.4g} is at most {self.loss:g}")
            self.session.max_steps = self.session.step
