"""Properties of everything that is installed, from any distribution."""

import pytest

from axlearn_core.config import flatten
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_tools.doctor.examine import examine

EXPERIMENTS = [entry.name for entry in registry().entries("experiments")]
FEATURES = [entry.name for entry in registry().entries("features")]
COMPONENTS = [entry.name for entry in registry().entries("components")]


@pytest.mark.fast_cases("llama2-70b", "llama2-7b", "llama3-8b", "mistral-7b", "quickstart", "vit-b16", "vit-tiny")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_goes_to_yaml_and_back(name, tmp_path):
    resolved = resolve(name)
    file = tmp_path / f"{name}.yaml"
    file.write_text(resolved.to_yaml())
    again = resolve(file)
    assert flatten(again.config) == flatten(resolved.config)
    assert again.config == resolved.config
    assert hash(again.config) == hash(resolved.config)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_says_what_it_does(name):
    cls = registry().feature(name)
    assert "__doc__" in vars(cls)
    assert len(cls.__doc__ or "") > 20


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_loads_and_finds_its_name(name):
    cls = registry().component(name)
    assert registry().component(registry().get_name(cls)) is cls


def test_the_doctor_finds_nothing():
    assert [f for f in examine(registry()) if f.status != "ok"] == []
