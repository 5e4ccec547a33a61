"""The OpenAPI document, built from the models of requests and responses."""

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic.json_schema import models_json_schema

from axlearn_plugins_serving.server import response_schemas as responses
from axlearn_plugins_serving.server import schemas

_ERRORS = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "Unknown model or path.",
    "405": "The path does not support the method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "421": "The server does not answer to this host name.",
    "429": "Too many requests are waiting; retry after `Retry-After` seconds.",
    "500": "The engine failed.",
    "503": "The server is stopping or has failed.",
}
_BODIES = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.ResponseRequest,
    schemas.EmbeddingRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
)
_ANSWERS = (
    responses.Completion,
    responses.ChatCompletion,
    responses.Response,
    responses.Embeddings,
    responses.Tokens,
    responses.Text,
    responses.Models,
    responses.Model,
    responses.Health,
    responses.EngineStatistics,
    responses.ErrorBody,
)
_POSTS = {
    "/v1/completions": ("Continue prompts", schemas.CompletionRequest, responses.Completion),
    "/v1/chat/completions": ("Answer a conversation", schemas.ChatRequest, responses.ChatCompletion),
    "/v1/responses": ("Answer a text or a conversation", schemas.ResponseRequest, responses.Response),
    "/v1/embeddings": ("Compute the embeddings of texts", schemas.EmbeddingRequest, responses.Embeddings),
    "/tokenize": ("Return the token ids of a text", schemas.TokenizeRequest, responses.Tokens),
    "/detokenize": ("Return the text of token ids", schemas.DetokenizeRequest, responses.Text),
}
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STREAMS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})


@functools.cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    modes: Any = [(m, "validation") for m in (*_BODIES, *_ANSWERS)]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    paths = {path: {"post": _post(path, *parts)} for path, parts in _POSTS.items()}
    paths |= {
        "/v1/models": {"get": _get("List the models", responses.Models)},
        "/v1/models/{name}": {"get": _get("Describe a model", responses.Model) | {"parameters": [_NAME]}},
        "/health": {"get": _get("Check whether the server accepts requests", responses.Health, health=True)},
        "/stats": {"get": _get("Return the state and counters of the engine", responses.EngineStatistics)},
        "/metrics": {"get": _plain("Return metrics for Prometheus", "text/plain")},
        "/openapi.json": {"get": _plain("Return this document", "application/json")},
        "/": {"get": _plain("Chat and monitoring page", "text/html")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "axlearn serve", "version": _version(), "summary": "An OpenAI-compatible API."},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _reference(model: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def _errors() -> dict[str, Any]:
    content = {"application/json": _reference(responses.ErrorBody)}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}


def _post(path: str, summary: str, body: type, answer: type) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": _reference(answer)}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": _EVENT}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": _reference(body)}},
        "responses": {"200": {"description": "Success.", "content": content}, **_errors()},
    }


def _get(summary: str, answer: type, *, health: bool = False) -> dict[str, Any]:
    content = {"application/json": _reference(answer)}
    errors = _errors()
    if health:
        errors["503"] = {"description": "The server does not accept requests.", "content": content}
    return {"summary": summary, "responses": {"200": {"description": "Success.", "content": content}, **errors}}


def _plain(summary: str, kind: str) -> dict[str, Any]:
    schema = {"schema": {"type": "object"} if kind == "application/json" else {"type": "string"}}
    return {
        "summary": summary,
        "responses": {"200": {"description": "Success.", "content": {kind: schema}}, **_errors()},
    }


def _version() -> str:
    try:
        return version("axlearn-plugins-serving")
    except PackageNotFoundError:
        return "0"
