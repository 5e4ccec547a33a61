"""The index of names, generated from pyproject files."""

import json

import pytest

from axlearn_index.build import collect_names, write_index

POINTS = """
[project]
name = "{name}"

[project.entry-points."axlearn.features"]
{feature} = "module:Feature"

[project.entry-points."axlearn.plugins"]
{name} = "module"

[tool.axlearn.index]
features = ["more-{feature}"]
targets = ["{name}-chip"]
"""


@pytest.fixture
def distribution(tmp_path):
    def make(name, feature):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pyproject.toml").write_text(POINTS.format(name=name, feature=feature))
        return folder

    return make


def test_entry_points_and_the_index_table_are_joined(distribution, tmp_path):
    folders = [distribution("two", "wide"), distribution("one", "long")]
    names = {
        "features": {"long": "one", "more-long": "one", "more-wide": "two", "wide": "two"},
        "targets": {"one-chip": "one", "two-chip": "two"},
    }
    assert collect_names(folders) == names
    write_index(tmp_path / "index.json", folders)
    assert json.loads((tmp_path / "index.json").read_text()) == names


def test_a_name_of_two_distributions_is_an_error(distribution):
    folders = [distribution("one", "long"), distribution("two", "long")]
    with pytest.raises(ValueError, match="features: one and two both declare 'long'"):
        collect_names(folders)
