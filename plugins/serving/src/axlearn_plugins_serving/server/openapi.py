"""The OpenAPI document, built from the models of requests and responses."""

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic.json_schema import models_json_schema

from axlearn_plugins_serving.server import anthropic_schemas, schemas
from axlearn_plugins_serving.server import response_schemas as responses

_ERRORS = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "A web page from another site sent the request.",
    "404": "Unknown model or path, or the path is off.",
    "405": "The path does not support the method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "421": "The server does not answer to this host name.",
    "431": "The request line and headers are too large.",
    "429": "Too many requests are waiting; retry after `Retry-After` seconds.",
    "500": "The engine failed.",
    "503": "The server is stopping or has failed.",
}
_BODIES = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.ResponseRequest,
    schemas.ResponseInputTokens,
    anthropic_schemas.MessagesRequest,
    anthropic_schemas.MessageTokensRequest,
    schemas.EmbeddingRequest,
    schemas.LoadAdapterRequest,
    schemas.UnloadAdapterRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
)
_ANSWERS = (
    responses.Completion,
    responses.ChatCompletion,
    responses.Response,
    responses.DeletedResponse,
    responses.InputItems,
    responses.InputTokens,
    responses.MessageAnswer,
    responses.MessageTokens,
    responses.MessageErrorBody,
    responses.Embeddings,
    responses.Tokens,
    responses.Text,
    responses.Models,
    responses.Model,
    responses.Health,
    responses.Version,
    responses.Load,
    responses.Sleeping,
    responses.EngineStatistics,
    responses.ErrorBody,
)
_POSTS = {
    "/v1/completions": ("Continue prompts", schemas.CompletionRequest, responses.Completion),
    "/v1/chat/completions": ("Answer a conversation", schemas.ChatRequest, responses.ChatCompletion),
    "/v1/responses": ("Answer a text or a conversation", schemas.ResponseRequest, responses.Response),
    "/v1/responses/input_tokens": (
        "Count the tokens of a response's input",
        schemas.ResponseInputTokens,
        responses.InputTokens,
    ),
    "/v1/messages": (
        "Answer a conversation in Anthropic's API",
        anthropic_schemas.MessagesRequest,
        responses.MessageAnswer,
    ),
    "/v1/messages/count_tokens": (
        "Count the tokens of a conversation",
        anthropic_schemas.MessageTokensRequest,
        responses.MessageTokens,
    ),
    "/v1/embeddings": ("Compute the embeddings of texts", schemas.EmbeddingRequest, responses.Embeddings),
    "/tokenize": ("Return the token ids of a text", schemas.TokenizeRequest, responses.Tokens),
    "/detokenize": ("Return the text of token ids", schemas.DetokenizeRequest, responses.Text),
}
_TEXT_POSTS = {
    "/v1/load_lora_adapter": ("Load an adapter", schemas.LoadAdapterRequest),
    "/v1/unload_lora_adapter": ("Unload an adapter", schemas.UnloadAdapterRequest),
}
"""Paths that answer with text -> their summary and body."""
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STREAMS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})


@functools.cache
def document(root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `root_path` is the prefix that a proxy puts before the paths."""
    modes: Any = [(m, "validation") for m in (*_BODIES, *_ANSWERS)]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    paths = {path: {"post": _post(path, *parts)} for path, parts in _POSTS.items()}
    paths |= {path: {"post": _text_post(*parts)} for path, parts in _TEXT_POSTS.items()}
    health = _get("Check whether the server accepts requests", responses.Health, health=True)
    paths |= {
        "/v1/models": {"get": _get("List the models", responses.Models)},
        "/v1/models/{name}": {"get": _get("Describe a model", responses.Model) | {"parameters": [_NAME]}},
        "/v1/responses/{id}": {
            "get": _get("Return a stored response", responses.Response) | {"parameters": [_ID]},
            "delete": _get("Remove a stored response", responses.DeletedResponse) | {"parameters": [_ID]},
        },
        "/v1/responses/{id}/input_items": {
            "get": _get("List the items of a stored response's input", responses.InputItems) | {"parameters": [_ID]}
        },
        "/v1/responses/{id}/cancel": {
            "post": _get("Cancel a background response", responses.Response) | {"parameters": [_ID]}
        },
        "/sleep": {"post": _plain("Free the memory of the devices", "text/plain") | {"parameters": [_LEVEL]}},
        "/wake_up": {"post": _plain("Accept requests again", "text/plain")},
        "/is_sleeping": {"get": _get("Tell whether the server sleeps", responses.Sleeping)},
        "/health": {"get": health},
        "/ping": {"get": health, "post": health},
        "/version": {"get": _get("Return the version", responses.Version)},
        "/load": {"get": _get("Return the number of unfinished requests", responses.Load)},
        "/stats": {"get": _get("Return the state and counters of the engine", responses.EngineStatistics)},
        "/metrics": {"get": _plain("Return metrics for Prometheus", "text/plain")},
        "/openapi.json": {"get": _plain("Return this document", "application/json")},
        "/": {"get": _plain("Chat and monitoring page", "text/html")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "axlearn serve", "version": package_version(), "summary": "An OpenAI-compatible API."},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_LEVEL = {"name": "level", "in": "query", "required": False, "schema": {"enum": ["1", "2"]}}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _reference(model: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def _errors(path: str = "") -> dict[str, Any]:
    body = responses.MessageErrorBody if path.startswith("/v1/messages") else responses.ErrorBody
    content = {"application/json": _reference(body)}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}


def _post(path: str, summary: str, body: type, answer: type) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": _reference(answer)}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": _EVENT}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": _reference(body)}},
        "responses": {"200": {"description": "Success.", "content": content}, **_errors(path)},
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


def _text_post(summary: str, body: type) -> dict[str, Any]:
    content = {"application/json": _reference(body)}
    return _plain(summary, "text/plain") | {"requestBody": {"required": True, "content": content}}


def package_version() -> str:
    """Return the version of this package, or 0 if it is not installed."""
    try:
        return version("axlearn-plugins-serving")
    except PackageNotFoundError:
        return "0"
