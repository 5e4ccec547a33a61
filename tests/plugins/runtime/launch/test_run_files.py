"""Run files on their way to other machines."""

import pytest

import axlearn_core as ax
from axlearn_core.config import parse
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_plugins_runtime.launch.run_files import read_document


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ax.resolve(
        "quickstart", set={"input.tokenizer.builtin": None, "input.tokenizer.path": "run:files/t/t.json"}
    )
    (tmp_path / "files/t").mkdir(parents=True)
    (tmp_path / "files/t/t.json").touch()
    (tmp_path / "config.yaml").write_text(write(config.config, registry()))
    return tmp_path


def test_the_config_of_a_run_names_its_files_by_absolute_paths(run):
    sent = parse(read_document("config.yaml"), "sent").data
    assert sent["input"]["tokenizer"]["path"] == str(run / "files/t/t.json")
    stored = parse((run / "config.yaml").read_text(), "kept").data
    assert {k: v for k, v in sent.items() if k != "input"} == {k: v for k, v in stored.items() if k != "input"}


def test_a_run_file_is_sent_as_it_is(run):
    text = "experiment: quickstart  # run:files/t\n"
    (run / "run.yaml").write_text(text)
    assert read_document("run.yaml") == text
