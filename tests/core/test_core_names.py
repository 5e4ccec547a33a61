"""`import axlearn_core as ax`: the short list, each name the real thing."""

import importlib

import pytest

import axlearn_core as ax


def test_the_list_is_the_promise():
    promised = (
        "resolve compose train load open_weights replace_config patch diff node Node REQUIRED interface configure "
        "Layer Feature serve render"
    )
    assert sorted(ax.__all__) == sorted([*promised.split(), "hookimpl"])
    assert set(ax.__all__) <= set(dir(ax))


@pytest.mark.parametrize("name", sorted(set(ax.__all__) - {"REQUIRED"}))
def test_each_name_is_there(name):
    assert callable(getattr(ax, name))


def test_no_other_name():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ax.trian  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["train", "compose"])
def test_a_subpackage_with_the_name_of_a_function_is_called(name, monkeypatch):
    package = importlib.import_module(f"axlearn_core.{name}")
    monkeypatch.setattr(package, name, lambda *args, **kwargs: (args, kwargs))
    assert getattr(ax, name)(1, key=2) == ((1,), {"key": 2})
    assert getattr(ax, name) is package  # so that `import axlearn_core.train.step as step` finds its way through it
