"""Base classes for request bodies."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

_MAX_UNKNOWN = 64


def tag(kind: str) -> str:
    """Return the tag of a kind of object in a union. It cannot be a field's name, so paths in errors omit it."""
    return f"<{kind}>"


def read_tag(value: Any) -> str:
    """Return the tag of an object by its field `type`."""
    fields = dict(value) if isinstance(value, BaseModel) else value
    return tag(str(fields.get("type") if isinstance(fields, dict) else None))


def choose_by_type(*kinds: str) -> Discriminator:
    """Return a discriminator between the models of these kinds, each annotated with `Tag(tag(kind))`."""
    message = f"Input should have the type {', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
    return Discriminator(read_tag, custom_error_type="unknown_type", custom_error_message=message)


def field_error(name: str, message: str) -> PydanticCustomError:
    """Return the error of a validator of a whole model for one of its fields.

    Args:
        name: Name of the field.
        message: A sentence that names the field.
    """
    return PydanticCustomError("value_error", "{message}", {"message": message, "place": (name,)})


class Body(BaseModel):
    """A request body with strict types, finite numbers and no unknown fields.

    Null fields count as absent, and so do empty lists in unknown fields.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def _aliases(cls) -> frozenset[str]:
        return frozenset(field.alias for field in cls.model_fields.values() if field.alias)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        present = {
            name: value
            for name, value in fields.items()
            if value is not None and (value != [] or name in cls.model_fields or name in cls._aliases())
        }
        if len(present) > len(cls.model_fields) + _MAX_UNKNOWN:
            raise PydanticCustomError(
                "too_many_fields", "{count} fields, most of them unknown", {"count": len(present)}
            )
        return present


class TemplatePart(Body):
    """A part of a request that the chat template reads.

    Templates may write these parts as JSON, so the order of the fields affects the tokens.
    """

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_fields(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        part = handler(fields)
        if isinstance(fields, dict):
            part._sent = {name: value for name, value in fields.items() if value is not None}
        return part

    @property
    def sent(self) -> dict[str, Any]:
        """The non-null fields in the order in which the client sent them."""
        return self._sent
