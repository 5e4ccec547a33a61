"""`ConstraintFailure`: why a request's constraint ended it."""

import attrs

from axlearn_core.errors import RequestError


@attrs.frozen
class ConstraintFailure:
    """Why a constraint ended its request.

    Attributes:
        message: Error message for the client.
        request_wrong: Whether the request is the cause.
    """

    message: str
    request_wrong: bool = False


def describe_failure(error: Exception) -> ConstraintFailure:
    """Describe an exception of a constraint's method."""
    if isinstance(error, RequestError):
        return ConstraintFailure(str(error), request_wrong=True)
    return ConstraintFailure(f"the constraint failed: {error}")
