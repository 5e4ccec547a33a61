"""Routes from text to tokens, each through the entry point that users call, with one interface."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import numpy as np

import axlearn_core as ax
from axlearn_core.errors import AxlearnError
from axlearn_plugins_models.huggingface.import_export import import_run
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_tools.evaluation.data import Data
from axlearn_plugins_tools.evaluation.evaluate import chat
from axlearn_plugins_tools.evaluation.subjects import subject_in
from axlearn_plugins_transformer.text.processor import text_processor
from support.text_matrix import reference as texts

LIMIT = 128  # tokens of a row


class Captured(Exception):  # raised to end a call once its request is known
    """The request that reached a model."""

    def __init__(self, prompt: Sequence[int], options: Any = None):
        super().__init__()
        self.prompt, self.options = list(prompt), options


class Route:
    """A route from text to tokens.

    Attributes:
        reads: `prompt` for texts that a model continues, `document` for texts that it learns from.
        clock: `now` if templates see the time of the call, else `fixed`.
    """

    name: str
    reads: str = "prompt"
    clock = "now"

    def __init__(self, directory: Path, folder: Path, reference: Mapping[str, Any]):
        self.directory, self.folder, self.reference = directory, folder, reference

    def encode(self, text: str, special: str = "text") -> list[int]:
        """The ids of a prompt, or of a document with `input.special_tokens`."""
        raise NotImplementedError

    def encode_chat(self, name: str) -> list[int]:
        """The ids of `CHATS[name]`: up to its last answer, or with it if the route reads documents."""
        raise NotImplementedError

    def answers(self, name: str) -> list[int]:
        """For each id of `encode_chat`, 1 if the model learns it or is measured on it."""
        raise NotImplementedError

    def write(self, text: str) -> str:
        """Return the text that the model writes greedily after a text."""
        raise NotImplementedError

    def refusal(self) -> str:
        """Return the error for a text with a token that has no row in the model."""
        try:
            self.encode(texts.BEYOND_TEXT, "parse")
        except AxlearnError as error:
            return str(error)
        return ""

    @functools.cached_property
    def config(self) -> Any:
        """Return the config of the experiment that the route uses."""
        raise NotImplementedError

    @functools.cached_property
    def text(self) -> Any:
        """Return the text processor of the route."""
        return text_processor(self.config)

    def end_tokens(self) -> list[int]:
        """Return the ids that end an output."""
        return sorted(self.text.end_tokens)

    def dtype(self) -> str:
        """Return the compute dtype of the model."""
        return str(self.config.model.dtype)

    def context_length(self) -> int | None:
        """Return the context length of the model."""
        return self.text.context_length

    def sampling(self) -> dict[str, float]:
        """The defaults of requests."""
        return dict(self.text.sampling)

    def run(self) -> Path:
        """Return a run that was imported from the directory."""
        run = self.folder / "run"
        if not run.exists():
            import_run(self.directory, run, set=["model.decoder.stack.mode=unrolled"])
        return run


class Training(Route):
    """Rows of the training input of a run that starts from an imported run."""

    name, reads, clock = "training", "document", "fixed"
    features: Mapping[str, Any] = {}

    def resolve(self, features: Mapping[str, Any], **settings: Any) -> Any:
        """Return the config of a training run."""
        rows = {"input.batch_size": 1, "input.sequence_length": LIMIT, "evaluators": {}}
        features = {**features, **self.features}
        return ax.resolve(self.run() / "config.yaml", with_=features, set={**rows, **settings}).config

    @functools.cached_property
    def config(self) -> Any:
        return self.resolve({})

    def encode(self, text: str, special: str = "text") -> list[int]:
        file = self._file({"text": text})
        source = {"type": "files", "paths": [file]}
        more = {"input.source": source, "input.packing": "none", "input.special_tokens": special}
        return self._row(self.resolve({}, **more))[0]

    def encode_chat(self, name: str) -> list[int]:
        return self._chat_row(name)[0]

    def answers(self, name: str) -> list[int]:
        return self._chat_row(name)[1]

    def _chat_row(self, name: str) -> tuple[list[int], list[int]]:
        file = self._file({"messages": texts.CHATS[name][0], "tools": texts.tools_of(name)})
        return self._row(self.resolve({"chat": {"data": file}}))

    def _file(self, row: Mapping[str, Any]) -> str:
        file = self.folder / f"{self.name}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        return str(file)

    def _row(self, config: Any) -> tuple[list[int], list[int]]:
        """(the tokens of the first row, its last target among them, whether each is learnt)."""
        batches = config.input.build(vocab_size=self.reference["rows"]).train()
        try:
            batch = next(batches)
        finally:
            batches.close()
        count = int((batch["segment_ids"][0] == 1).sum())
        row = [int(batch["tokens"][0, 0]), *batch["targets"][0, :count].tolist()]
        return row, [0, *batch["weights"][0, :count].astype(int).tolist()]


class Distillation(Training):
    """Rows of a training with the feature `distill`, whose teacher is the model directory."""

    name = "distillation"

    @property
    def features(self) -> Mapping[str, Any]:
        return {"distill": {"teacher": str(self.directory)}}

    def dtype(self) -> str:
        """Of the teacher too."""
        model, teacher = self.config.model.dtype, self.config.objective.teacher.dtype
        return str(model) if model == teacher else f"{model}, teacher {teacher}"


class DPO(Training):
    """Pairs of the feature `dpo`. Conversations come as text that a template rendered."""

    name = "DPO"

    @functools.cached_property
    def config(self) -> Any:
        return self.resolve({"dpo": {"data": self._file({"prompt": "a", "chosen": "b", "rejected": "c"})}})

    def encode(self, text: str, special: str = "text") -> list[int]:
        *row, _, end = self._pair(text, "!", special)[0]
        return [*row, end]

    def encode_chat(self, name: str) -> list[int]:
        return self._pair(*self._parts(name), "parse")[0][:-1]  # without the end of the document

    def answers(self, name: str) -> list[int]:
        return self._pair(*self._parts(name), "parse")[1][:-1]

    def refusal(self) -> str:
        try:
            self._pair(texts.BEYOND_TEXT, "a", "parse")
        except AxlearnError as error:
            return str(error)
        return ""

    def _parts(self, name: str) -> tuple[str, str]:
        text = self.text.template.render(texts.CHATS[name][1]).text
        before = self.text.template.render(texts.CHATS[name][1][:-1], prompt=True).text
        return before, text.removeprefix(before)

    def _pair(self, prompt: str, answer: str, special: str) -> tuple[list[int], list[int]]:
        file = self._file({"prompt": prompt, "chosen": answer, "rejected": "!!"})
        pairs = {"data": file, "validation_fraction": 0.0}
        config = self.resolve({"dpo": pairs}, **{"input.special_tokens": special})
        batch = next(config.input.build(vocab_size=self.reference["rows"]).train())
        count = int(np.flatnonzero(batch["chosen_weights"][0])[-1]) + 1
        row = [int(batch["chosen_tokens"][0, 0]), *batch["chosen_targets"][0, :count].tolist()]
        return row, [0, *batch["chosen_weights"][0, :count].astype(int).tolist()]


class _Recorder:
    """A scorer that stores its requests."""

    def __init__(self, model: Any):
        self.model, self.rows = model, []

    def __call__(self, rows: Sequence[Any], **_: Any) -> list[Any]:
        self.rows += rows
        return [SimpleNamespace(log_likelihood=-1.0, tokens=1) for _ in rows]


class Evaluation(Route):
    """`axlearn evaluate` of the model directory."""

    name, reads, clock = "evaluation", "document", "fixed"

    @functools.cached_property
    def subject(self) -> Any:
        """What is evaluated."""
        return subject_in(self.directory)

    @functools.cached_property
    def text(self) -> Any:
        return self.subject.processor

    @functools.cached_property
    def config(self) -> Any:
        return SimpleNamespace(model=self.subject.scorer.model.cfg)

    def encode(self, text: str, special: str = "text") -> list[int]:
        if special == "parse":
            return [i for part in self.subject.pair(text, "") for i in part]
        return self.subject.text(text)[0]

    def encode_chat(self, name: str) -> list[int]:
        return self._scored(name)[0]

    def answers(self, name: str) -> list[int]:
        return [int(m) for m in self._scored(name)[1]]

    def refusal(self) -> str:
        try:
            self.subject.scorer.continuations([self.subject.pair("a", texts.BEYOND_TEXT)])
        except AxlearnError as error:
            return str(error)
        return ""

    def _scored(self, name: str) -> Any:
        scorer = _Recorder(self.subject.scorer.model)
        item = {"messages": texts.CHATS[name][0], "tools": texts.tools_of(name)}
        chat(attrs.evolve(self.subject, scorer=scorer), Data("chat", [item], ["row 1"]))
        return scorer.rows[0]


@contextlib.contextmanager
def captured(owner: Any, method: str) -> Iterator[None]:
    """End a call of an engine or a model with the request that reaches it."""

    def capture(self: Any, request: Any, **options: Any) -> Any:
        raise Captured(getattr(request, "prompt", request), getattr(request, "sampling", options))

    with mock.patch.object(owner, method, capture):
        yield


class Harness(Evaluation):
    """The model class for lm-evaluation-harness."""

    name, reads, clock = "harness", "prompt", "now"

    @functools.cached_property
    def model(self) -> Any:
        """What the harness calls."""
        from support.text_matrix.harness import harness_model

        return harness_model(self.directory)

    @functools.cached_property
    def subject(self) -> Any:
        return self.model.subject

    def encode(self, text: str, special: str = "text") -> list[int]:
        with captured(ServingEngine, "add"):
            try:
                self.model.generate_until([SimpleNamespace(args=(text, {"max_gen_toks": 2}))])
            except Captured as request:
                return request.prompt
        raise AssertionError("no request")

    def encode_chat(self, name: str) -> list[int]:
        return self.encode(self.model.apply_chat_template(texts.CHATS[name][0][:-1]))

    def refusal(self) -> str:
        try:
            self.model.generate_until([SimpleNamespace(args=(texts.BEYOND_TEXT, {"max_gen_toks": 2}))])
        except AxlearnError as error:
            return super().refusal() and str(error)  # of likelihoods, and of texts that are written
        return ""

    def write(self, text: str) -> str:
        options = {"max_gen_toks": texts.MAX_TOKENS, "do_sample": False}
        return self.model.generate_until([SimpleNamespace(args=(text, options))])[0]
