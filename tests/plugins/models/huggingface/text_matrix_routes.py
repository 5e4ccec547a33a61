"""The ways from text to tokens, each by the entry that users call, as functions of one interface."""

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import numpy as np
import text_matrix_reference as texts

import axlearn_core as ax
from axlearn_core.errors import AxlearnError
from axlearn_plugins_models.huggingface.runs import export_run, import_run
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.server.app import create_app
from axlearn_plugins_serving.server.command import _open
from axlearn_plugins_serving.settings import engine_config
from axlearn_plugins_tools.evaluation.data import Data
from axlearn_plugins_tools.evaluation.evaluate import chat
from axlearn_plugins_tools.evaluation.subjects import subject_in
from axlearn_plugins_transformer.text.processor import text_processor
from axlearn_plugins_transformer.text.writing import write_text

SMALL = {"runner.max_rows": 2, "runner.row_buckets": (), "runner.chunk_buckets": (), "runner.block_size": 16}
LIMIT = 128  # tokens of a row


class Captured(Exception):  # noqa: N818  # it ends a call that has shown what it was asked for
    """The request that reached a model."""

    def __init__(self, prompt: Sequence[int], options: Any = None):
        super().__init__()
        self.prompt, self.options = list(prompt), options


class Route:
    """One way from text to tokens.

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
        """What the model writes greedily after a text."""
        raise NotImplementedError

    def refusal(self) -> str:
        """The error for a text with a token that the model has no row for."""
        try:
            self.encode(texts.BEYOND_TEXT, "parse")
        except AxlearnError as error:
            return str(error)
        return ""

    @functools.cached_property
    def config(self) -> Any:
        """The config of the experiment that the route uses."""
        raise NotImplementedError

    @functools.cached_property
    def text(self) -> Any:
        """The text processor of the route."""
        return text_processor(self.config)

    def end_tokens(self) -> list[int]:
        """The ids that end an output."""
        return sorted(self.text.end_tokens)

    def dtype(self) -> str:
        """What the model is computed in."""
        return str(self.config.model.dtype)

    def context_length(self) -> int | None:
        """The tokens that the model was made for."""
        return self.text.context_length

    def sampling(self) -> dict[str, float]:
        """The defaults of requests."""
        return dict(self.text.sampling)

    def run(self) -> Path:
        """A run that was imported from the directory."""
        run = self.folder / "run"
        if not run.exists():
            import_run(self.directory, run, set=["model.decoder.stack.mode=unrolled"])
        return run


class Training(Route):
    """Rows of the input of a training that stands on an imported run."""

    name, reads, clock = "training", "document", "fixed"
    features: Mapping[str, Any] = {}  # noqa: RUF012

    def resolve(self, features: Mapping[str, Any], **settings: Any) -> Any:
        """The config of a training."""
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
        return self._pair(text[:-1], text[-1], special)[0]

    def encode_chat(self, name: str) -> list[int]:
        return self._pair(*self._parts(name), "parse")[0][:-1]  # without the end of the document

    def answers(self, name: str) -> list[int]:
        return self._pair(*self._parts(name), "parse")[1][:-1]

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
        rows = []

        def scorer(texts: Any, **_: Any) -> Any:
            rows.extend(texts)
            return [SimpleNamespace(log_likelihood=-1.0, tokens=1) for _ in texts]

        subject = SimpleNamespace(processor=self.text, tokenizer=self.text.tokenizer, scorer=scorer)
        item = {"messages": texts.CHATS[name][0], "tools": texts.tools_of(name)}
        chat(subject, Data("chat", [item], ["row 1"]))  # type: ignore[arg-type]
        return rows[0]


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
        from text_matrix_harness import harness_model

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

    def write(self, text: str) -> str:
        options = {"max_gen_toks": texts.MAX_TOKENS, "do_sample": False}
        return self.model.generate_until([SimpleNamespace(args=(text, options))])[0]


class Load(Route):
    """`ax.load` of the model directory."""

    name = "ax.load"

    @functools.cached_property
    def loaded(self) -> Any:
        """The model."""
        return ax.load(self.directory)

    @functools.cached_property
    def config(self) -> Any:
        return self.loaded.config

    def ask(self, text: str) -> Captured:
        """The request that reaches the model."""
        with captured(type(self.loaded.model), "generate"):
            try:
                self.loaded.generate(text, max_tokens=2)
            except Captured as request:
                return request
        raise AssertionError("no request")

    def encode(self, text: str, special: str = "text") -> list[int]:
        return self.ask(text).prompt

    def encode_chat(self, name: str) -> list[int]:
        return self.text.encode_chat(texts.CHATS[name][0][:-1], tools=texts.tools_of(name))

    def write(self, text: str) -> str:
        return self.loaded.generate(text, max_tokens=texts.MAX_TOKENS, temperature=0.0)

    def refusal(self) -> str:
        try:
            self.loaded.generate(texts.BEYOND_TEXT, max_tokens=2)
        except AxlearnError as error:
            return str(error)
        return ""


class Generate(Load):
    """`axlearn generate` of the model directory."""

    name = "generate"

    def ask(self, text: str) -> Captured:
        with captured(ServingEngine, "add"):
            try:
                list(write_text(self.loaded, text, max_tokens=2))
            except Captured as request:
                return request
        raise AssertionError("no request")

    def encode_chat(self, name: str) -> list[int]:
        """Of a prompt that a template rendered."""
        messages = texts.CHATS[name][0][:-1]
        return self.encode(self.text.template.render(messages, prompt=True, tools=texts.tools_of(name)).text)

    def write(self, text: str) -> str:
        return "".join(write_text(self.loaded, text, max_tokens=texts.MAX_TOKENS, temperature=0.0))

    def sampling(self) -> dict[str, float]:
        options = self.ask("a").options
        return {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}

    def refusal(self) -> str:
        try:
            list(write_text(self.loaded, texts.BEYOND_TEXT, max_tokens=2))
        except AxlearnError as error:
            return str(error)
        return ""


class Serve(Route):
    """The server of the model directory, by HTTP."""

    name = "serve directory"

    def uri(self) -> Path:
        """What is served."""
        return self.directory

    @functools.cached_property
    def config(self) -> Any:
        return SimpleNamespace(model=self.results["model"])

    @functools.cached_property
    def text(self) -> Any:
        return self.results["text"]

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """The answers to all questions; the server is open only while they are asked."""
        with mock.patch("axlearn_plugins_serving.runner.ModelRunner.warm_up", lambda self: None):
            service = _open(str(self.uri()), None, None, engine_config(list(SMALL.items()), None), None, None, None)
        engine, prompts = service.thread.engine, []
        add = engine.add

        def record(request: Any) -> None:
            prompts.append(request)
            add(request)

        engine.add = record
        model = engine.runner.program.functional.describe().cfg
        return {"text": service.text, "model": model, **asyncio.run(self._ask_all(service, prompts))}

    async def _ask_all(self, service: Any, requests: list[Any]) -> dict[str, Any]:
        service.thread.start()
        transport = httpx.ASGITransport(create_app(service))
        reference, results = self.reference, {}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:

            async def post(path: str, **body: Any) -> Any:
                return (await client.post(path, json=body)).json()

            for text in (reference["text"], reference["bos token"] + reference["text"], texts.SPELLED):
                await post("/v1/completions", prompt=text, max_tokens=1, temperature=0)
                results[text] = [list(requests[-1].prompt), (await post("/tokenize", prompt=text))["tokens"]]
            for name, (messages, _) in texts.CHATS.items():
                body = {"messages": messages[:-1], "tools": texts.tools_of(name)}
                await post("/v1/chat/completions", **body, max_tokens=1, temperature=0)
                results[name] = [list(requests[-1].prompt), (await post("/tokenize", **body)).get("tokens")]
            await post("/v1/completions", prompt="a", max_tokens=1)
            results["sampling"] = requests[-1].sampling
            body = {"prompt": reference["text"], "max_tokens": texts.MAX_TOKENS, "temperature": 0}
            results["written"] = (await post("/v1/completions", **body))["choices"][0]["text"]
            answer = await post("/v1/completions", prompt=texts.BEYOND_TEXT, max_tokens=1)
            results["refusal"] = answer.get("error", {}).get("message", "")
            results["context"] = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        await service.thread.stop()
        return results

    def encode(self, text: str, special: str = "text") -> list[int]:
        return self._agreed(text)

    def encode_chat(self, name: str) -> list[int]:
        return self._agreed(name)

    def _agreed(self, key: str) -> list[int]:
        """The ids that the engine got, if `/tokenize` gives the same."""
        own, tokenized = self.results[key]
        return own if own == tokenized else [*own, "but /tokenize gives", tokenized]  # type: ignore[list-item]

    def write(self, text: str) -> str:
        return self.results["written"]

    def refusal(self) -> str:
        return self.results["refusal"]

    def context_length(self) -> int | None:
        return self.results["context"]

    def sampling(self) -> dict[str, float]:
        return {name: getattr(self.results["sampling"], name) for name in ("temperature", "top_k", "top_p")}


class ServeRun(Serve):
    """The server of an imported run."""

    name = "serve run"

    def uri(self) -> Path:
        return self.run()


class Import(Load):
    """The run that an import writes, opened again."""

    name = "import"

    @functools.cached_property
    def loaded(self) -> Any:
        return ax.load(self.run())


class Export(Load):
    """The model directory that an export of an imported run writes, opened again."""

    name = "export"

    @functools.cached_property
    def exported(self) -> Path:
        """The directory."""
        out = self.folder / self.name
        export_run(self.source(), out)
        return out

    def source(self) -> Path:
        """The run that is exported."""
        return self.run()

    @functools.cached_property
    def loaded(self) -> Any:
        return ax.load(self.exported)


class ExportTuned(Export):
    """The same of a run that learned conversations for a step."""

    name = "export of a tuned run"

    def source(self) -> Path:
        data, run = self.folder / "talks.jsonl", self.folder / "tuned"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        data.write_text((json.dumps({"messages": messages}) + "\n") * 8)
        settings = {
            "loop": {"type": "start-from-run", "run_dir": str(self.run())},
            "evaluators": {},
            "trackers": [],
            "input.batch_size": 8,
            "input.sequence_length": 32,
            "learner.optimizer.learning_rate": 0.0,
        }
        options = {"with_": {"chat": {"data": str(data)}}, "set": settings, "steps": 1}
        ax.train(self.run() / "config.yaml", run_dir=run, **options)
        return run


ROUTES = (Training, DPO, Distillation, Evaluation, Harness, Generate, Serve, ServeRun, Load, Import, Export, ExportTuned)
