"""Errors in the format of the OpenAI API."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from axlearn_core.errors import counted, nearest

T = TypeVar("T", bound=BaseModel)

_MESSAGE_LENGTH = 2000
_WITHOUT_VALUE = frozenset(
    {
        "missing",
        "none_required",
        "value_error",
        "context_length_exceeded",
        "too_many_fields",
        "too_many_entries",
        "invalid_json_schema",
        "invalid_function_parameters",
        "invalid_arguments",
        "invalid_tools",
        "unsupported_content",
        "unsupported_item",
    }
)
"""Types of validation errors whose message does not need the value."""
_REPHRASED = (
    (r"Field required", "is required"),
    (r"Input should be null", "is not supported; remove it"),
    (r"(?:Input|String|List|Dictionary) should (.*?)(?: after validation, not \d+)?", r"should \1"),
)
"""Pydantic's messages, and the same as the end of a sentence that begins with the field's path."""
_OUTPUT_LIMITS = ("max_tokens", "max_output_tokens")
_FORMATS = ("response_format", "text.format", "output_config.format")
_EFFORTS = ("reasoning_effort", "reasoning.effort", "output_config.effort")
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
    "prompt": ("messages", "input"),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "inputs": ("input", "messages", "prompt"),
    "content": ("prompt",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "repeat_penalty": ("repetition_penalty",),
    "logprobs": ("top_logprobs",),
    **dict.fromkeys((*_OUTPUT_LIMITS, "max_completion_tokens", "max_new_tokens", "n_predict"), _OUTPUT_LIMITS),
    **dict.fromkeys(("response_format", "output_format", "format"), _FORMATS),
    **dict.fromkeys(("reasoning_effort", "reasoning", "thinking", "effort"), _EFFORTS),
}
"""Fields of other APIs -> the fields with the same purpose, one for each of this server's APIs."""
_SIMILAR = 0.78
"""Similarity from which a field is taken for the misspelled one."""
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        message: Description of the error and how to fix it.
        param: Path of the invalid field.
        code: Machine-readable error code, such as `model_not_found`.
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= _MESSAGE_LENGTH else message[:_MESSAGE_LENGTH] + "..."
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def draining_error() -> ApiError:
    """Return the error for a request that arrives while the server finishes the running ones."""
    headers = {"retry-after": "5", "connection": "close"}
    return ApiError(503, "the server is stopping", code="draining", headers=headers)


def unexpected_error() -> ApiError:
    """Return the error for an exception that the server does not expect."""
    return ApiError(500, "internal server error; see the server's log", code="internal_error")


def parse_body(model: type[T], body: bytes, *, context: int | None = None) -> T:
    """Parse and validate a JSON request.

    Args:
        model: Model of the request.
        body: JSON text.
        context: Maximum number of tokens in a prompt. Longer lists of token ids are rejected before they are validated.

    Raises:
        ApiError: 400. The message names the first invalid field and counts the rest.
    """
    try:
        return model.model_validate_json(body, context={"context": context})
    except ValidationError as error:
        raise _describe(error, model) from None


def _describe(error: ValidationError, model: type[BaseModel]) -> ApiError:
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        is_deep = reason.startswith("recursion limit exceeded")
        message = (
            "the arrays and objects of the body are nested too deeply" if is_deep else f"the body is not JSON: {reason}"
        )
        return ApiError(400, message, code="invalid_json")
    # A value that fits no branch of a union causes one error per branch. Report the branch with matching types or the deepest path.
    # A wrong `type` explains the other errors of an object.
    field = first["loc"][:1]
    alternatives = [p for p in problems if p["loc"][:1] == field]
    first = max(
        alternatives, key=lambda p: (not p["type"].endswith("_type"), _depth(p["loc"]), p["loc"][-1:] == ("type",))
    )
    if first["type"] == "missing":  # a field with another name explains why it is missing
        renamed = (p for p in problems if p["type"] == "extra_forbidden" and _means(p["loc"], first["loc"], model))
        first = next(renamed, first)
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"unknown field {param!r}{_hint(first['loc'], model)}"
    else:
        reasons = dict.fromkeys(p["msg"] for p in alternatives if _path(p["loc"]) == param)
        message = _sentence("" if _place(first) else param, reasons)
        if first["type"] not in _WITHOUT_VALUE:
            message += f"; got {_truncate_json(first.get('input'))}"
    param = _path((*first["loc"], *_place(first)))
    other_fields = len({p["loc"][:1] for p in problems} - {field, first["loc"][:1]})
    if other_fields:
        message += f" (and {counted(other_fields, 'more wrong field')})"
    return ApiError(400, message, param=param or None, code=first["type"])


def _place(problem: ErrorDetails) -> tuple[int | str, ...]:
    """Return the path inside the value that the error's sentence names, or nothing; see `field_error`."""
    return problem.get("ctx", {}).get("place", ())


def _hint(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return what to send instead of an unknown field, or nothing."""
    name = str(location[-1])[:64]
    if len(location) == 1 and (other := _other_name(name, model)):
        return f"; send {other} instead"
    close = next(filter(None, (_similar_field(name, part) for part in _models_at(location[:-1], model))), None)
    return f"; did you mean {close}?" if close else ""


def _models_at(location: tuple[int | str, ...], model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the models of the object at a location. Indices are not fields. Tags choose a branch of a union."""
    branches: list[tuple[str, type[BaseModel]]] = [("", model)]
    for part in location:
        fields = [field for _, m in branches for name, field in m.model_fields.items() if part in (name, field.alias)]
        branches = [branch for field in fields for branch in _branches(field.annotation)] if fields else branches
        branches = [(kind, m) for kind, m in branches if kind == part] or branches
    return [m for _, m in branches]


def _branches(annotation: Any, kind: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models in a type, such as those of a list of a union, each with its tag or an empty string."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield kind, annotation
    parts = get_args(annotation)
    kind = next((part.tag for part in parts if isinstance(part, Tag)), kind)
    for part in parts:
        yield from _branches(part, kind)


def _means(unknown: tuple[int | str, ...], missing: tuple[int | str, ...], model: type[BaseModel]) -> bool:
    """Return whether an unknown field stands for a missing one of the same object."""
    if unknown[:-1] != missing[:-1]:
        return False
    name, expected = str(unknown[-1])[:64], str(missing[-1])
    if len(unknown) == 1 and (other := _other_name(name, model)):
        return other == expected
    return any(_similar_field(name, part) == expected for part in _models_at(unknown[:-1], model))


def _other_name(name: str, model: type[BaseModel]) -> str | None:
    """Return the path of the field with the purpose of another API's field, or None."""
    paths = _OTHER_NAMES.get(name, ())
    return next((path for path in paths if path.partition(".")[0] in model.model_fields), None)


def _similar_field(name: str, model: type[BaseModel]) -> str | None:
    """Return the field whose name is spelled almost like `name`, or None. Case and underscores do not matter."""
    names = [field.alias or own for own, field in model.model_fields.items()]
    fields = {_plain(field): field for field in names if field != name}
    return next((fields[plain] for plain in nearest(_plain(name), fields, 1, cutoff=_SIMILAR)), None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _sentence(param: str, reasons: Iterable[str]) -> str:
    """Return a sentence about a field from pydantic's reasons, one for each form that its value may have."""
    texts = [reason.removeprefix("Value error, ") for reason in reasons]
    phrases = [_rephrase(text) for text in texts]
    if phrases == texts:
        return f"{param}: {' or '.join(texts)}" if param else " or ".join(texts)
    start = next(s for s in ("should be ", "should ", "") if all(phrase.startswith(s) for phrase in phrases))
    return f"{param or 'the body'} {start}{' or '.join(phrase.removeprefix(start) for phrase in phrases)}"


def _rephrase(text: str) -> str:
    for pattern, phrase in _REPHRASED:
        if match := re.fullmatch(pattern, text, re.DOTALL):
            return match.expand(phrase)
    return text


def _path(location: tuple[int | str, ...]) -> str:
    """Return a path such as `messages[0].content`.

    The path omits pydantic's names for the branches of a union.
    """
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "list"):
            text += f".{part}" if text else part
        elif not text:
            text = part[:64]
    return text[:200]


def _depth(location: tuple[int | str, ...]) -> int:
    path = _path(location)
    return path.count(".") + path.count("[")


def _truncate_json(value: Any) -> str:
    """Return the beginning of a value as JSON, without encoding the rest."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value[:81] if isinstance(value, str) else value):
        text += piece[:81]
        if len(text) > 80:
            return text[:77] + "..."
    return text
