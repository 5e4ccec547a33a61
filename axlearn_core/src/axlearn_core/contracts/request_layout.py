"""The contract of the function `read_layout`, which a plugin registers in the entry-point group `axlearn.functions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from axlearn_core.config import Node


class RequestLayout(Protocol):
    """How a training lies on a machine, apart from what it computes: `--layout FILE`, as `read_layout(FILE)` returns it."""

    def apply(self, request: Any) -> Any:
        """A `Request` with the layout beside what it says itself, and without `layout`; its own settings come later.

        Raises:
            RequestError: the request is for another machine.
        """
        ...

    def check(self, before: Node[Any], after: Node[Any]) -> None:
        """Compares the config without the layout and with it.

        Raises:
            RequestError: it is a layout of another model, or changes what is computed.
        """
        ...
