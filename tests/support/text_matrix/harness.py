"""Model class for lm-evaluation-harness, with a stand-in for its base class if `lm_eval` is not installed."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class _LM:
    """What `lm_eval.api.model.LM` gives the adapter."""

    def __init__(self) -> None:
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)


def harness_model(directory: Path) -> Any:
    """Return the model of a directory, like the harness builds it."""
    if importlib.util.find_spec("lm_eval") is None and "lm_eval" not in sys.modules:
        parents = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
        parents["lm_eval.api.model"].LM = _LM  # type: ignore[attr-defined]
        added = {**parents}
        sys.modules.update(added)
        try:
            from axlearn_plugins_tools.evaluation.harness import AxlearnLM
        finally:
            for name in added:
                del sys.modules[name]
    else:
        from axlearn_plugins_tools.evaluation.harness import AxlearnLM
    return AxlearnLM(directory)
