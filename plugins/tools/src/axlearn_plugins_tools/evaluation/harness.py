"""Adapter for EleutherAI's lm-evaluation-harness that runs the model in this process.

    import lm_eval
    from axlearn_plugins_tools.evaluation.harness import AxlearnLM

    lm_eval.simple_evaluate(model=AxlearnLM("runs/mine"), tasks=["hellaswag"])

Needs `axlearn-plugins-tools[lm-eval]`. Source: `lm_eval.api.model.LM`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.model import LM  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

import axlearn_core as ax
from axlearn_core.contracts.text import get_digest
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.run.notices import log_message
from axlearn_plugins_tools.evaluation.evaluate import Subject
from axlearn_plugins_tools.evaluation.subjects import subject_in
from axlearn_plugins_transformer.generate import Generator
from axlearn_plugins_transformer.text.decoding import OutputOptions
from axlearn_plugins_transformer.text.text_stream import PLAIN_SAMPLING


class AxlearnLM(LM):
    """A model for the harness.

    Args:
        model: A run directory, a directory in Hugging Face format, or a `Subject`.
        step: Step of the checkpoint. The default is the newest.
        max_length: Length of the longest row, in tokens. The default is the row length of the training data.
        max_gen_toks: Number of tokens to generate if a task does not set it.
    """

    def __init__(
        self,
        model: str | Path | Subject,
        *,
        step: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
    ):
        super().__init__()
        subject = model if isinstance(model, Subject) else subject_in(Path(model), step=step, length=max_length)
        self.subject, self.max_gen_toks = subject, max_gen_toks
        self._generator: Generator | None = None
        self._engine: Any = None
        self._serving_unavailable = False

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the score of each continuation in `(context, continuation)`.

        Returns:
            The log-likelihood, and whether greedy decoding would generate the continuation.
        """
        pairs = [self.subject.pair(*request.args) for request in requests]
        answers = [(s.log_likelihood, s.greedy) for s in self.subject.scorer.continuations(pairs)]
        return self._cache_answers("loglikelihood", requests, answers)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each text in `(text,)`. Each token is predicted once."""
        texts = [self.subject.text(request.args[0]) for request in requests]
        answers = [s.log_likelihood for s in self.subject.scorer(texts)]
        return self._cache_answers("loglikelihood_rolling", requests, answers)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the generated text for each request, whose arguments are `(context, options)`.

        Generation stops before the first occurrence of a string in `until`. Supports the harness options `until`,
        `max_gen_toks`, `do_sample`, `temperature` and `top_k`. If axlearn-plugins-serving is installed, all requests run
        in one batch.
        """
        generations = [self._parse_generation(*request.args) for request in requests]
        if (engine := self._serving_engine(generations)) is None:
            return self._cache_answers("generate_until", requests, [self._generate(w) for w in generations])
        answers = [""] * len(generations)
        for options in dict.fromkeys(w.options for w in generations):
            rows = [row for row, w in enumerate(generations) if w.options == options]
            prompts = [generations[row].prompt for row in rows]
            sampling = {**PLAIN_SAMPLING, **options.sampling}
            results = engine.generate(prompts, stop=options.stops, seed=0, logprobs=None, **sampling)
            for row, result in zip(rows, results, strict=True):
                answers[row] = result.text
        return self._cache_answers("generate_until", requests, answers)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a conversation, rendered by the chat template of the model."""
        return self.subject.template.render(chat_history, prompt=add_generation_prompt).text

    @property
    def tokenizer_name(self) -> str:
        """Key for the harness's caches, unique to the tokenizer and chat template."""
        digest = get_digest(self.subject.tokenizer)
        return f"{digest}-{self.subject.template.digest}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, for the harness's records."""
        return self.subject.template.source

    def _cache_answers(self, kind: str, requests: Sequence[Any], answers: list[Any]) -> list[Any]:
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers

    def _parse_generation(self, context: str, options: dict[str, Any]) -> "_Generation":
        unknown = options.keys() - {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
        if unknown or float(options.get("top_p") or 1.0) != 1.0:
            raise RequestError(
                f"generation does not support {', '.join(sorted(unknown)) or 'top_p'}\n"
                "    expected: until, max_gen_toks, do_sample, temperature, top_k\n    fix: change the task's generation_kwargs"
            )
        until = options.get("until") or ()
        stops = tuple(s for s in ((until,) if isinstance(until, str) else until) if s)
        count = int(options.get("max_gen_toks") or self.max_gen_toks)
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        prompt = self.subject.processor.encode_prompt(context)
        self.subject.check(prompt, f"the prompt {context[:60]!r}")
        top_k = int(options["top_k"]) if options.get("top_k") else None
        return _Generation(
            prompt[-max(1, self.subject.scorer.length - count) :], _Options(count, temperature, top_k, stops)
        )

    def _serving_engine(self, generations: Sequence["_Generation"]) -> Any:
        """Return an engine that generates text for all requests together.

        Returns None if axlearn-plugins-serving is not installed or does not support the model.
        """
        room = max((len(w.prompt) + w.options.max_tokens for w in generations), default=0)
        if "serve" not in registry().claims["functions"] or not room or self._serving_unavailable:
            return None
        if self._engine is None or self._engine.engine.max_context < room:
            scorer, settings = self.subject.scorer, {"runner.max_context": room, "runner.beyond_context": True}
            try:
                self._engine = ax.serve(
                    scorer.model, program=scorer.program, text=self.subject.processor, set=settings, warm_up=False
                )
            except RequestError as error:
                log_message(f"note: generating texts one at a time: {str(error).splitlines()[0]}")
                self._serving_unavailable = True
        return self._engine

    def _generate_for(self, context: str, options: dict[str, Any]) -> str:
        return self._generate(self._parse_generation(context, options))

    def _generate(self, generation: "_Generation") -> str:
        text, options = self.subject.processor, generation.options
        output = text.output(generation.prompt, OutputOptions(stops=tuple(options.stops)))
        pieces = []
        for token in self._cached_generator()(generation.prompt, seed=0, eos_id=text.end_tokens, **options.sampling):
            pieces.append(output.push(token))
            if output.stopped:
                break
        return "".join([*pieces, output.end()])

    def _cached_generator(self) -> Generator:
        """Return the generator of the model. The first call builds it."""
        if self._generator is None:
            self._generator = Generator(self.subject.scorer.model, self.subject.scorer.program)
        return self._generator


class _Options(NamedTuple):
    """Sampling options for a request."""

    max_tokens: int
    temperature: float
    top_k: int | None
    stops: tuple[str, ...]

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_k": self.top_k}


class _Generation(NamedTuple):
    """A prompt and its sampling options."""

    prompt: list[int]
    options: _Options
