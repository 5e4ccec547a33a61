"""Text written by the model that is being trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from axlearn_core.config import node, setting
from axlearn_core.contracts.capabilities import tokenizer_of
from axlearn_core.contracts.parts import Model
from axlearn_core.train.evaluators import Periodic

if TYPE_CHECKING:
    from axlearn_core.train.session import Session


class TextModel(Model, Protocol):
    """A model that also writes text."""

    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int, eos_id: int | None
    ) -> Iterator[int]:
        """The tokens that follow the prompt, one at a time; `temperature` 0 takes the likeliest."""
        ...


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
        from axlearn_core.train.inference import generate_text

        tokenizer = tokenizer_of(session.input)
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
            program=session.program,
        )
        session.text(self.name, cfg.prompt + "".join(pieces))
        return {}
