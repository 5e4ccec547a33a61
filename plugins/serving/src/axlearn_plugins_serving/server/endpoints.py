"""Endpoints that do not generate text: models, health, metrics, tokens and the page."""

import functools
import importlib.resources
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from prometheus_client import generate_latest
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.chat import chat_conversation
from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.http import read_json
from axlearn_plugins_serving.server.logprobs import spell
from axlearn_plugins_serving.server.openapi import document, package_version
from axlearn_plugins_serving.server.schemas import DetokenizeRequest, TokenizeRequest
from axlearn_plugins_serving.server.service import Service

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_PART = 16_384
"""Number of token ids to encode at a time."""


async def models(request: HttpRequest) -> Response:
    """List the model and its adapters."""
    service: Service = request.app.state.service
    return JSONResponse(
        {
            "object": "list",
            "data": [_model(service, name) for name in (service.name, *service.aliases, *service.adapters)],
        }
    )


async def model(request: HttpRequest) -> Response:
    """Describe a model or an adapter."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.adapter(name)
    return JSONResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    engine = service.thread.engine
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "axlearn",
        "max_model_len": engine.max_context,
        "vocab_size": engine.vocab_size,
        "parent": service.name if service.adapter(name) is not None else None,
    }


async def health(request: HttpRequest) -> Response:
    """Return 200 if the server accepts requests, else 503."""
    service: Service = request.app.state.service
    return JSONResponse({"status": service.state}, 200 if service.state == "ok" else 503)


async def version(request: HttpRequest) -> Response:
    """Return the version of this package."""
    return JSONResponse({"version": package_version()})


async def load(request: HttpRequest) -> Response:
    """Return the number of unfinished requests, for load balancers."""
    service: Service = request.app.state.service
    return JSONResponse({"server_load": service.thread.active})


async def metrics(request: HttpRequest) -> Response:
    """Return metrics for Prometheus."""
    service: Service = request.app.state.service
    return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


async def statistics(request: HttpRequest) -> Response:
    """Return the state and the counters of the engine, for the page."""
    service: Service = request.app.state.service
    engine = attrs.asdict(service.thread.statistics)
    starting = {"start_compilations": service.start_compilations}
    return JSONResponse({"model": service.name, "state": service.state, **starting, **engine})


async def tokenize(request: HttpRequest) -> Response:
    """Return the token ids of a text or a conversation."""
    service: Service = request.app.state.service
    body = await read_json(TokenizeRequest, request)
    service.adapter(body.model)
    if body.prompt is not None:
        with_special = body.add_special_tokens is not False
        (tokens,) = await service.encode([body.prompt], limited=False, with_special=with_special)
    else:
        conversation = chat_conversation(body)
        tokens = (await service.render(conversation, len(await request.body()), limited=False)).tokens
    context = service.thread.engine.max_context
    grammars = service.grammars if body.return_token_strs else None
    return await service.text_pool.run(lambda: _tokens_response(tokens, context, grammars), len(tokens))


def _tokens_response(tokens: Sequence[int], context: int, grammars: Grammars | None) -> Response:
    """Build the response of `/tokenize` in parts.

    A single call to the JSON encoder would block other threads. `grammars` spells the tokens if the client wants their text.
    """
    fields = f'"tokens":[{_join_parts(tokens, str)}],"count":{len(tokens)},"max_model_len":{context}'
    if grammars is not None:
        fields += f',"token_strs":[{_join_parts(tokens, lambda token: json.dumps(spell(grammars, token)))}]'
    return Response(f"{{{fields}}}", media_type="application/json")


def _join_parts(tokens: Sequence[int], encode: Callable[[int], str]) -> str:
    return ",".join(",".join(map(encode, tokens[i : i + _PART])) for i in range(0, len(tokens), _PART))


async def detokenize(request: HttpRequest) -> Response:
    """Decode token ids to text."""
    service: Service = request.app.state.service
    body = await read_json(DetokenizeRequest, request)
    service.adapter(body.model)
    limit = service.tokenizer.vocab_size

    def decode() -> Response:
        for i, token in enumerate(body.tokens):
            if token >= limit:
                raise ApiError(400, f"tokens[{i}]: {token} is not below {limit}", param=f"tokens[{i}]")
        return JSONResponse({"prompt": service.text.spell(body.tokens)})

    return await service.text_pool.run(decode, len(body.tokens))


async def openapi(request: HttpRequest) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(document(request.app.state.limits.root_path))


async def page(request: HttpRequest) -> Response:
    """Return the page for chatting and for monitoring the engine."""
    headers = {"content-security-policy": _POLICY, "x-frame-options": "DENY", "x-content-type-options": "nosniff"}
    return HTMLResponse(_page(), headers=headers)


@functools.cache
def _page() -> str:
    return importlib.resources.files("axlearn_plugins_serving.server").joinpath("page.html").read_text("utf-8")
