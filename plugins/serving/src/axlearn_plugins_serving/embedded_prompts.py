"""`EmbeddedPrompts`: the embeddings of an engine's prompts with extras.

This module does not import JAX.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

from axlearn_plugins_serving.engine_capabilities import TakesExtras
from axlearn_plugins_serving.scheduler import Part

MOST = 8
"""Number of prompts whose embeddings are kept for other requests, such as other samples of the same prompt."""


class EmbeddedPrompts:
    """Computes the embeddings of prompts, and keeps those that were used last."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._kept: OrderedDict[Any, np.ndarray] = OrderedDict()

    def read(self, part: Part) -> np.ndarray | str:
        """Return the embeddings of the prompt's tokens in a part of a step, [N, D], or why they cannot be computed."""
        request, key = part.state.request, (part.state.extras_digest, part.state.request.prompt)
        if key not in self._kept:
            assert isinstance(self._runner, TakesExtras)
            try:
                self._kept[key] = self._runner.embed_prompt(request.prompt, request.extras)
            except Exception as error:  # such as too little memory; other requests go on
                lines = str(error).splitlines() or [""]
                return f"the embeddings of the prompt cannot be computed: {type(error).__name__}: {lines[0]}"
            if len(self._kept) > MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][part.start : part.start + part.count]

    def clear(self) -> None:
        """Forget all embeddings, because the weights change."""
        self._kept.clear()
