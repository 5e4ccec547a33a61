"""Private names of qwix that this plugin uses.

`qwix._src.core.dot_general_qt` and `ragged_dot_qt`: what qwix's `QtProvider` calls. The provider tells weights from activations by
the frames of the caller and by shapes, which errs where a batch has the shape of a weight; here it is known which is which.
qwix 0.1.8 and later 0.1 versions; not needed once they have public names.
"""

import importlib
from typing import Any


def quantized_products() -> tuple[Any, Any]:
    """(the module of `dot_general_qt`, that of `ragged_dot_qt`); raises what importing them raises."""
    core = "qwix._src.core"
    return importlib.import_module(f"{core}.dot_general_qt"), importlib.import_module(f"{core}.ragged_dot_qt")
