"""Routes from text to tokens that load a whole model: Python, `axlearn generate`, servers, imports and exports."""

import asyncio
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx

import axlearn_core as ax
from axlearn_core.errors import AxlearnError
from axlearn_plugins_models.huggingface.import_export import export_run
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.server.app import create_app
from axlearn_plugins_serving.server.command import _config, _open, serve
from axlearn_plugins_transformer.text.text_stream import write_text
from support.text_matrix import reference as texts
from support.text_matrix.routes import DPO, Captured, Distillation, Evaluation, Harness, Route, Training, captured

SMALL = ("max_rows=2", "row_buckets=[]", "chunk_buckets=[]", "block_size=16", "max_step_tokens=128")


_WORDS = ["a-model", "--tool-parser", "none", *(word for s in SMALL for word in ("--set", f"serving.runner.{s}"))]
_OPTIONS = serve.make_context("serve", _WORDS).params
"""Options of `axlearn serve`. Templates of the matrix have a format of calls that no parser reads."""


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
        """Return the request that reaches the model."""
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
        """Return the request for a prompt that a template rendered."""
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
    """The server of the model directory, over HTTP."""

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
        """Return the answers to all questions; the server only runs meanwhile."""
        with mock.patch("axlearn_plugins_serving.runner.ModelRunner.warm_up"):
            service = _open(str(self.uri()), _OPTIONS, _config(_OPTIONS, ()))
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
        """Return the exported run."""
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


ROUTES = (
    Training,
    DPO,
    Distillation,
    Evaluation,
    Harness,
    Generate,
    Serve,
    ServeRun,
    Load,
    Import,
    Export,
    ExportTuned,
)
