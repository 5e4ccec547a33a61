"""A model for EleutherAI's lm-evaluation-harness, in this process.

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
from axlearn_core.contracts.text import digest_of
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.run.notices import log_message
from axlearn_plugins_tools.evaluation.evaluate import Subject
from axlearn_plugins_tools.evaluation.subjects import subject_in
from axlearn_plugins_transformer.generate import Generator
from axlearn_plugins_transformer.text.writing import PLAIN_SAMPLING


class AxlearnLM(LM):
    """The requests of the harness, answered by a model of ours.

    Args:
        model: a run directory, or one in Hugging Face format; or a `Subject`.
        step: which checkpoint; by default the newest.
        max_length: of the longest row, in tokens; by default that of the rows that the model was trained with.
        max_gen_toks: how many tokens are generated where a task does not say.
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
        own_subject = model if isinstance(model, Subject) else subject_in(Path(model), step=step, length=max_length)
        self.subject, self.max_gen_toks = own_subject, max_gen_toks
        self._writer: Generator | None = None
        self._engine: Any = None
        self._not_served = False

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is what greedy decoding writes) of each continuation of `(context, continuation)`."""
        pairs = [self.subject.pair(*request.args) for request in requests]
        answers = [(s.log_likelihood, s.greedy) for s in self.subject.scorer.continuations(pairs)]
        return self._cache_answers("loglikelihood", requests, answers)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of each text of `(text,)`, each token predicted once."""
        texts = [self.subject.text(request.args[0]) for request in requests]
        answers = [s.log_likelihood for s in self.subject.scorer(texts)]
        return self._cache_answers("loglikelihood_rolling", requests, answers)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """What the model writes after each context of `(context, options)`, up to the first of `until`.

        The options are those of the harness: `until`, `max_gen_toks`, `do_sample`, `temperature`, `top_k`. With
        axlearn-plugins-serving, all requests are computed together.
        """
        generations = [self._generation_of(*request.args) for request in requests]
        if (engine := self._serving_engine(generations)) is None:
            return self._cache_answers("generate_until", requests, [self._write(w) for w in generations])
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
        """A conversation as the text of a prompt, by the chat template of the model."""
        return self.subject.template.render(chat_history, prompt=add_generation_prompt).text

    @property
    def tokenizer_name(self) -> str:
        """Tells apart what the harness keeps of different tokenizers and templates."""
        digest = digest_of(self.subject.tokenizer)
        return f"{digest}-{self.subject.template.digest}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the chat template, for the record."""
        return self.subject.template.source

    def _cache_answers(self, kind: str, requests: Sequence[Any], answers: list[Any]) -> list[Any]:
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers

    def _generation_of(self, context: str, options: dict[str, Any]) -> "_Wanted":
        unknown = options.keys() - {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
        if unknown or float(options.get("top_p") or 1.0) != 1.0:
            raise RequestError(
                f"this model does not generate with {', '.join(sorted(unknown)) or 'top_p'}\n"
                "    expected: until, max_gen_toks, do_sample, temperature, top_k\n    fix: change the task's generation_kwargs"
            )
        until = options.get("until") or ()
        stops = tuple(s for s in ((until,) if isinstance(until, str) else until) if s)
        count = int(options.get("max_gen_toks") or self.max_gen_toks)
        heat = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        prompt = self.subject.processor.encode_prompt(context)
        self.subject.check(prompt, f"the prompt {context[:60]!r}")
        top_k = int(options["top_k"]) if options.get("top_k") else None
        return _Wanted(prompt[-max(1, self.subject.scorer.length - count) :], _Options(count, heat, top_k, stops))

    def _serving_engine(self, generations: Sequence["_Wanted"]) -> Any:
        """One that generates for all requests together; None where axlearn-plugins-serving is missing, or cannot serve this."""
        room = max((len(w.prompt) + w.options.max_tokens for w in generations), default=0)
        if "serve" not in registry().claims["functions"] or not room or self._not_served:
            return None
        if self._engine is None or self._engine.engine.max_context < room:
            scorer, settings = self.subject.scorer, {"runner.max_context": room, "runner.beyond_context": True}
            try:
                self._engine = ax.serve(
                    scorer.model, program=scorer.program, text=self.subject.processor, set=settings, warm_up=False
                )
            except RequestError as error:
                log_message(f"note: texts are generated one after another: {str(error).splitlines()[0]}")
                self._not_served = True
        return self._engine

    def _write_for(self, context: str, options: dict[str, Any]) -> str:
        return self._write(self._generation_of(context, options))

    def _write(self, generation: "_Wanted") -> str:
        text, options = self.subject.processor, generation.options
        output = text.output(generation.prompt, options.stops)
        pieces = []
        for token in self._writes()(generation.prompt, seed=0, eos_id=text.end_tokens, **options.sampling):
            pieces.append(output.push(token))
            if output.stopped:
                break
        return "".join([*pieces, output.end()])

    def _writes(self) -> Generator:
        """The model taken apart for decoding, once."""
        if self._writer is None:
            self._writer = Generator(self.subject.scorer.model, self.subject.scorer.program)
        return self._writer


class _Options(NamedTuple):
    """How a request is to be continued."""

    max_tokens: int
    temperature: float
    top_k: int | None
    stops: tuple[str, ...]

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_k": self.top_k}


class _Wanted(NamedTuple):
    """A prompt to be continued."""

    prompt: list[int]
    options: _Options
