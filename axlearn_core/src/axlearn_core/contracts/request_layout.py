"""Protocol for the result of `read_layout`, a function that a plugin registers in the `axlearn.functions` group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from axlearn_core.config import Node


class RequestLayout(Protocol):
    """Layout of a training run on a machine (`--layout FILE`). It changes how the run executes, but not what it computes."""

    def apply(self, request: Any) -> Any:
        """Return a `Request` that has the settings of the layout instead of `layout`. The request's own settings override them.

        Raises:
            RequestError: If the request is for a different machine.
        """
        ...

    def check(self, before: Node[Any], after: Node[Any]) -> None:
        """Compare the configs with and without the layout.

        Raises:
            RequestError: If the layout is for a different model, or if it changes what the run computes.
        """
        ...
