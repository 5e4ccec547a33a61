"""Text written by the model that is being trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Model
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.index import package_of
from axlearn_core.plugins.registry import registry
from axlearn_core.train.evaluators import Periodic
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from axlearn_plugins_transformer.text.protocols import tokenizer_of
from axlearn_plugins_transformer.text.writing import PLAIN_SAMPLING, continue_text, engine_sizes

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
        """What is written, and how.

        Attributes:
            prompt: what the model goes on from.
            max_tokens: of each sample.
            temperature: 0 takes the likeliest token each time.
            count: samples of the prompt; the i-th draws with the run's seed + i.
            engine: generates with the engine of `ax.serve`: all samples in the same steps. It is kept between
                evaluations, with a cache and a copy of the weights of its own. Otherwise the model's `generate` writes one
                sample after another.
        """

        prompt: str = "def "
        max_tokens: int = setting(default=96, ge=1)
        temperature: float = setting(default=0.7, ge=0)
        count: int = setting(default=1, ge=1)
        engine: bool = False

    def __init__(self, cfg: Config, *, name: str):
        super().__init__(cfg, name=name)
        self.sampling = cfg
        self._engine: Any = None
        if cfg.engine:
            _check_engine()

    def run(self, session: "Session") -> Mapping[str, float]:
        """Generates the samples, from the run's seed on."""
        tokenizer = tokenizer_of(session.input)
        if tokenizer is None:
            return {}
        processor = text_processor(session.program.config, tokenizer)
        assert processor is not None
        write = self._write_with_engine if self.sampling.engine else self._write
        for text in write(session, processor):
            session.text(self.name, self.sampling.prompt + text)
        return {}

    def _write(self, session: "Session", text: TextProcessor) -> Iterator[str]:
        cfg, model = self.sampling, session.model()
        for index in range(cfg.count):
            pieces = continue_text(
                text,
                model,
                cfg.prompt,
                max_tokens=cfg.max_tokens,
                temperature=cfg.temperature,
                seed=session.seed + index,
                program=session.program,
            )
            yield "".join(pieces)

    def _write_with_engine(self, session: "Session", text: TextProcessor) -> Iterator[str]:
        cfg, model = self.sampling, session.model()
        prompt = text.encode_prompt(cfg.prompt)
        if self._engine is None:
            self._engine = _open_engine(model, session.program, text, cfg.count, len(prompt) + cfg.max_tokens)
        else:
            self._engine.update_weights(model)
        [result] = self._engine.generate(
            [prompt],
            n=cfg.count,
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            seed=session.seed,
            logprobs=None,
            **PLAIN_SAMPLING,
        )
        yield from (sample.text for sample in result.samples)


def _check_engine() -> None:
    """Raises `ConfigError` where no engine can be had: the plugin is missing, or the run has several processes."""
    problem = fix = None
    if "serve" not in registry().claims["functions"]:
        package = package_of("functions", "serve") or "a plugin"
        problem, fix = f"the engine is in {package}, which is not installed", "install it"
    elif jax.process_count() > 1:
        problem, fix = "the engine is of one process, and this run has several", "engine=false"
    if problem is not None:
        raise ConfigError(Problem(path="evaluators.sample-evaluator.engine", message=problem, got="true", fix=fix))


def _open_engine(model: Any, program: Any, text: TextProcessor, count: int, room: int) -> Any:
    """An engine for so many samples of so many tokens, prompt included; each function is compiled when it is first used."""
    import axlearn_core as ax

    return ax.serve(model, program=program, text=text, set=engine_sizes(count, room), warm_up=False)
