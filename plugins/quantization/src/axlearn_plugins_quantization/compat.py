"""Private names of qwix that this plugin uses.

qwix's `QtProvider` calls `qwix._src.core.dot_general_qt` and `ragged_dot_qt`. The provider uses call frames and shapes to guess
whether an operand is a weight or an activation, and fails if a batch has the shape of a weight. This plugin knows which operand
is which, so it calls these functions directly. The names exist in qwix 0.1.8 and later 0.1 versions. Remove this module once
qwix exposes public names for these functions.
"""

import importlib
from typing import Any


def quantized_products() -> tuple[Any, Any]:
    """Import the modules of `dot_general_qt` and `ragged_dot_qt`. Import errors propagate."""
    core = "qwix._src.core"
    return importlib.import_module(f"{core}.dot_general_qt"), importlib.import_module(f"{core}.ragged_dot_qt")
