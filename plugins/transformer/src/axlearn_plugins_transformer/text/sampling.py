"""Text samples from the model during training."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Model
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.index import find_package
from axlearn_core.plugins.registry import registry
from axlearn_core.train.evaluators import Periodic
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from axlearn_plugins_transformer.text.protocols import tokenizer_of
from axlearn_plugins_transformer.text.text_stream import PLAIN_SAMPLING, continue_text, engine_sizes

if TYPE_CHECKING:
    from axlearn_core.train.session import Session


class TextModel(Model, Protocol):
    """A model that can generate text."""

    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int, eos_id: int | None
    ) -> Iterator[int]:
        """Yield the tokens that follow the prompt.

        A temperature of 0 takes the most probable token.
        """
        ...


class SampleEvaluator(Periodic):
    """Generates text after a prompt and passes it to the trackers' `text` method."""

    @node
    class Config(Periodic.Config["SampleEvaluator"]):
        """Settings for the samples.

        Attributes:
            prompt: Text to continue.
            max_tokens: Maximum number of tokens per sample.
            temperature: Sampling temperature. 0 always takes the most probable token.
            count: Number of samples. Sample i uses the run's seed + i.
            engine: Generate all samples together with the engine of `ax.serve`. The engine stays in memory between
                evaluations, with its own cache and a copy of the weights. If False, the model's `generate` writes one
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
        """Generate the samples, starting with the run's seed."""
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
            self._engine.update_weights(model, share=True)
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
    """Raise ConfigError if the engine is unavailable.

    The plugin may be missing, or the run may have several processes.
    """
    problem = fix = None
    if "serve" not in registry().claims["functions"]:
        package = find_package("functions", "serve") or "a plugin"
        problem, fix = f"the engine requires {package}, which is not installed", "install it"
    elif jax.process_count() > 1:
        problem, fix = "the engine supports only one process, but this run has several", "engine=false"
    if problem is not None:
        raise ConfigError(Problem(path="evaluators.sample-evaluator.engine", message=problem, got="true", fix=fix))


def _open_engine(model: Any, program: Any, text: TextProcessor, count: int, num_tokens: int) -> Any:
    """Return an engine for `count` samples of `num_tokens` tokens, including the prompt.

    Functions are compiled on first use.
    """
    import axlearn_core as ax

    return ax.serve(model, program=program, text=text, set=engine_sizes(count, num_tokens), warm_up=False)
