"""The component `stop-at-loss`."""

from collections.abc import Mapping

from axlearn_core.extend import REQUIRED, RunListener, Session, TrainLoop, log_message, node, setting


class StopAtLoss(TrainLoop):
    """Trains until a logged loss is at most `loss`, or to `max_steps`; then evaluates and saves as at any end."""

    @node
    class Config(TrainLoop.Config):
        """`loss`: of one step, as it is logged every `log_every_steps`."""

        loss: float = setting(default=REQUIRED)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.loss = cfg.loss

    def run(self, session: Session) -> None:
        """See `axlearn_core.train.loop.Loop`."""
        session.events.add(_Target(session, self.loss))
        super().run(session)


class _Target(RunListener):
    """Makes the present step the last one."""

    def __init__(self, session: Session, loss: float):
        self.session, self.loss = session, loss

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Every process logs the same values, so that all stop at one step."""
        if values.get("loss", float("inf")) <= self.loss and self.session.step < self.session.max_steps:
            log_message(f"step {step}: the loss {values['loss']:.4g} is at most {self.loss:g}")
            self.session.max_steps = self.session.step
