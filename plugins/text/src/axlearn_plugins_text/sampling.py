"""Text written by the model that is being trained."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from axlearn_core.config import node, setting
from axlearn_core.train.evaluators import Periodic

if TYPE_CHECKING:
    from axlearn_core.train.session import Session


class SampleEvaluator(Periodic):
    """Text that the model writes after a prompt, for the trackers' `text`."""

    @node
    class Config(Periodic.Config["SampleEvaluator"]):
        """`temperature` 0 takes the likeliest token each time."""

        prompt: str = "def "
        max_tokens: int = setting(default=96, ge=1)
        temperature: float = setting(default=0.7, ge=0)

    def __init__(self, cfg: Config, *, name: str):
        super().__init__(cfg, name=name)
        self.sampling = cfg

    def run(self, session: "Session") -> Mapping[str, float]:
        """Generates one sample with the run's seed."""
        from axlearn_core.train.loading import generate_text

        tokenizer = getattr(session.input, "tokenizer", None)
        if tokenizer is None:
            return {}
        cfg = self.sampling
        pieces = generate_text(
            session.model(),
            tokenizer,
            cfg.prompt,
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            seed=session.seed,
        )
        session.text(self.name, cfg.prompt + "".join(pieces))
        return {}
