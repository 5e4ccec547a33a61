"""Modules under their earlier names: the same objects, and a warning that says the new name."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHIMS = {path.stem: path for path in ROOT.glob("plugins/*/src/axlearn_plugins_*.py")}
NEW = {name: path.read_text("utf-8").split('redirect(__name__, "')[1].split('"')[0] for name, path in SHIMS.items()}


@pytest.fixture(autouse=True)
def fresh():
    """Nobody imported an earlier name before the test; nobody meets what the test imported after it."""
    finders = sys.meta_path[:]
    yield
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.split(".")[0] in SHIMS]:
        del sys.modules[name]


def test_there_are_earlier_names():
    assert {"axlearn_plugins_text", "axlearn_plugins_llama", "axlearn_plugins_features"} <= set(SHIMS)


@pytest.mark.parametrize("old", SHIMS)
def test_an_earlier_name_warns_and_gives_the_module(old):
    with pytest.warns(DeprecationWarning, match=f"{old} moved to {NEW[old]}"):
        module = importlib.import_module(old)
    assert module is sys.modules[NEW[old]]
    assert module.__spec__.name == NEW[old]


def test_a_module_below_an_earlier_name_is_the_module_itself():
    with pytest.warns(DeprecationWarning, match="axlearn_plugins_text moved"):
        from axlearn_plugins_text.tokenizers import ByteTokenizer
    import axlearn_plugins_transformer.text.tokenizers as tokenizers

    assert ByteTokenizer is tokenizers.ByteTokenizer
    assert tokenizers.__spec__.name == "axlearn_plugins_transformer.text.tokenizers"
    assert sys.modules["axlearn_plugins_text.tokenizers"] is tokenizers
    with pytest.raises(ModuleNotFoundError, match="axlearn_plugins_text moved to axlearn_plugins_transformer"):
        import axlearn_plugins_text.nothing_here  # noqa: F401


def test_a_plugin_written_for_the_earlier_layout_works_and_is_told():
    """In a process of its own, where nothing else has imported the modules yet."""
    code = (
        "import axlearn_plugins_llama.experiments as old\n"
        "import axlearn_plugins_models.llama.experiments as new\n"
        "assert old is new and old.quickstart().max_steps == new.quickstart().max_steps\n"
    )
    result = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert "axlearn_plugins_llama moved to axlearn_plugins_models.llama" in result.stderr
