"""Optional attributes are accessed through capability protocols, not by name with `getattr`."""

import ast
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.style

LIBRARY = "what a version of a library has"
ALLOWED = {
    "axlearn_core/src/axlearn_core/compose/devices.py": "JAX's devices, which have other attributes on each platform",
    "axlearn_core/src/axlearn_core/config/flat.py": "names of any callable",
    "axlearn_core/src/axlearn_core/config/node.py": "type parameters of any class",
    "axlearn_core/src/axlearn_core/config/tree.py": "the Config of any class",
    "axlearn_core/src/axlearn_core/contracts/arrays.py": "the home of what an array is",
    "axlearn_core/src/axlearn_core/nn/module_checks.py": "attributes of any object",
    "axlearn_plugins_gpu/src/axlearn_plugins_gpu/compat.py": LIBRARY,
    "axlearn_plugins_tpu/src/axlearn_plugins_tpu/kernels/cross_entropy.py": LIBRARY,
    "plugins/cloud/src/axlearn_plugins_cloud/filesystem.py": "errors of any file system of fsspec",
    "plugins/models/src/axlearn_plugins_models/bridges/linen_layer.py": "any module of Linen",
    "plugins/serving/src/axlearn_plugins_serving/server/memory_return.py": "functions of the C library",
}
"""Owner of the attributes that a file may access by name. Only for foreign objects, and for the single helper of a check."""

NOT_YET = {
    "plugins/orbax/src/axlearn_plugins_orbax/transfer.py": {"strerror"},
    "plugins/orbax/src/axlearn_plugins_orbax/trees.py": {"dtype", "shape"},
    "plugins/orbax/src/axlearn_plugins_orbax/weights.py": {"input", "tokenizer"},
}
"""Names that a file still accesses and that will become capabilities. Do not add to this list."""

FEW = 75
"""All calls of `getattr` and `hasattr` in the sources."""


def shipped():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split() if "src" in Path(path).parts and (ROOT / path).exists()]


def uses(source):
    """Return the line and the literal name (or None) of each call of `getattr` and `hasattr`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            yield node.lineno, name.value if isinstance(name, ast.Constant) else None


def test_uses_are_found():
    source = (
        "a = getattr(x, 'name', None)\nb = hasattr(x, name)\nc = x.getattr('name')\nd = getattr(getattr(x, 'y'), z)\n"
    )
    assert {*uses(source)} == {(1, "name"), (2, None), (4, "y"), (4, None)}


def test_optional_attributes_of_our_own_parts_are_capabilities():
    named = {}
    for path in shipped():
        for _, name in uses((ROOT / path).read_text("utf-8")):
            if name is not None:
                named.setdefault(path, set()).add(name)
    unexpected = {path: names - NOT_YET.get(path, set()) for path, names in named.items() if path not in ALLOWED}
    message = "ask by a protocol of contracts/capabilities.py or contracts/text.py, or through contracts/experiment.py"
    assert {path: names for path, names in unexpected.items() if names} == {}, message
    assert ALLOWED.keys() | NOT_YET.keys() <= named.keys(), "no longer needed here"


def test_few_attributes_are_asked_for_by_name():
    counts = {path: len([*uses((ROOT / path).read_text("utf-8"))]) for path in shipped()}
    assert sum(counts.values()) <= FEW, sorted(counts.items(), key=lambda item: -item[1])[:20]
