"""`POST /v1/embeddings`."""

import base64
import json
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from axlearn_plugins_serving.contracts import Request
from axlearn_plugins_serving.engine_capabilities import NormalizesEmbeddings
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.engine_thread import EngineFailedError, EngineStoppingError, Outputs
from axlearn_plugins_serving.server.http import read_json, respond
from axlearn_plugins_serving.server.prompt_job import output_error
from axlearn_plugins_serving.server.schemas import EmbeddingRequest
from axlearn_plugins_serving.server.service import Service, engine_errors


async def embeddings(request: HttpRequest) -> Response:
    """Compute the embeddings of texts."""
    service: Service = request.app.state.service
    body = await read_json(EmbeddingRequest, request)
    adapter = service.adapter(body.model)
    texts: Any = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else body.input
    prompts = await service.encode(texts, param="input", new_tokens=0) if isinstance(texts[0], str) else texts
    service.check_accepting()
    service.check_prompts(prompts, "input", 0)
    requests = [
        Request(
            id=service.new_id("embedding"),
            prompt=tuple(prompt),
            priority=body.priority,
            client=body.user or "",
            adapter=adapter,
            embeds=True,
        )
        for prompt in prompts
    ]
    with engine_errors():
        outputs = await service.thread.add(requests, bounded=False)
    job = _Texts(service, body, requests, outputs)
    return await respond(request, job.answer(), job)


@attrs.define
class _Texts:
    """The texts of a request."""

    service: Service
    body: EmbeddingRequest
    requests: Sequence[Request]
    outputs: Outputs
    began: float = attrs.field(factory=time.monotonic)

    async def answer(self) -> Response:
        """Return the response. Many numbers are encoded in a thread, one embedding at a time."""
        arrays: dict[str, np.ndarray] = {}
        while len(arrays) < len(self.requests):
            try:
                outputs = await self.outputs.get()
            except EngineFailedError as error:
                status = 503 if isinstance(error, EngineStoppingError) else 500
                raise ApiError(status, str(error), code="engine_error") from None
            for output in outputs:
                if output.embedding is None:
                    raise output_error(output)
                arrays[output.id] = self._scale(output.embedding)
        count = sum(len(request.prompt) for request in self.requests)
        self.service.metrics.request_seconds.observe(time.monotonic() - self.began)
        self.service.metrics.prompt_length.observe(count)
        embeddings = [arrays[request.id] for request in self.requests]
        size = sum(embedding.size for embedding in embeddings)
        return await self.service.text_pool.run(lambda: self._response(embeddings, count), size)

    def _response(self, embeddings: Sequence[np.ndarray], count: int) -> Response:
        data = [
            json.dumps({"object": "embedding", "index": index, "embedding": self._encode(embedding)})
            for index, embedding in enumerate(embeddings)
        ]
        rest = {"model": self.body.model or self.service.name, "usage": {"prompt_tokens": count, "total_tokens": count}}
        body = f'{{"object": "list", "data": [{", ".join(data)}], {json.dumps(rest)[1:]}'
        return Response(body, media_type="application/json")

    def close(self) -> None:
        """Abort the texts that have not been computed."""
        self.service.thread.abort(self.outputs.ids)

    def _scale(self, embedding: np.ndarray) -> np.ndarray:
        """Return the requested number of dimensions, scaled to length 1 if the engine is configured that way."""
        size = self.body.dimensions or embedding.size
        if size > embedding.size:
            message = f"dimensions: {size} is more than {embedding.size}, the width of the model"
            raise ApiError(400, message, param="dimensions")
        embedding = embedding[:size]
        engine = self.service.thread.engine
        if isinstance(engine, NormalizesEmbeddings) and engine.normalizes_embeddings:
            embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        return embedding.astype(np.float32)

    def _encode(self, embedding: np.ndarray) -> list[float] | str:
        if self.body.encoding_format == "float":
            return embedding.tolist()
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
