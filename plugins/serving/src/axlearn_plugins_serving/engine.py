"""The engine: requests in, steps of a runner, tokens out."""

from typing import Any

from axlearn_core.config import Configurable, Node, node, setting


class ServingEngine(Configurable):
    """Continues many prompts at once with one model; see `axlearn_plugins_serving.contracts.Engine`."""

    @node
    class Config(Configurable.Config["ServingEngine"]):
        """Sizes and parts of an engine.

        Attributes:
            runner: computes the steps; offered `weights`.
            max_waiting: requests that may wait; more are refused.
        """

        runner: Node[Any] | None = None
        max_waiting: int = setting(default=1024, ge=1)

    def __init__(self, cfg: Config, *, weights: Any, end_tokens: frozenset[int] = frozenset()):
        raise NotImplementedError
