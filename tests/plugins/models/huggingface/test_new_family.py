"""`axlearn plugins new --family` writes a package whose family is found by name and passes its own tests."""

import os
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_plugins_models.huggingface.family import families
from axlearn_plugins_models.huggingface.new_family import describe_family


def write(*words):
    return CliRunner().invoke(cli, ["plugins", "new", *words])


def install(package, site):
    """Make a folder with the package's sources and metadata, as an installer does."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    requires = "".join(f"Requires-Dist: {r}\n" for r in project["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n{requires}")
    groups = project["entry-points"].items()
    points = "".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for g, entries in groups)
    (info / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(package / "src"), str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}


@pytest.mark.slow
def test_a_family_begins_as_a_copy_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = write("--family", "olmo_9", "--like", "llama")
    assert result.exit_code == 0, result.stderr
    package = tmp_path / "axlearn-plugins-olmo-9"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["dependencies"][1:] == ["axlearn-plugins-models>=0.1,<0.2"]
    assert project["entry-points"] == {
        "axlearn.components": {"huggingface-olmo_9": "axlearn_plugins_olmo_9.huggingface:Olmo9"},
        "axlearn.experiments": {"olmo-9-toy": "axlearn_plugins_olmo_9.experiments:toy"},
    }
    source = (package / "src/axlearn_plugins_olmo_9/huggingface.py").read_text()
    assert "class Olmo9(Llama):" in source
    assert '    architectures: ClassVar = ("Olmo9ForCausalLM",)\n' in source
    sizes = {}
    exec((package / "src/axlearn_plugins_olmo_9/experiments.py").read_text(), sizes)
    assert sizes["CONFIG_JSON"].items() >= {"model_type": "olmo_9", "hidden_size": 32, "num_hidden_layers": 2}.items()
    assert '"model.layers.1.self_attn.k_proj.weight": (16, 32),\n' in (package / "tests/test_family.py").read_text()
    again = write("--family", "olmo_9")
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--family", "Olmo9"), "is not a valid name of a family"),
        (("--family", "olmo__9"), "is not a valid name of a family"),
        (("--family", "llama"), "the name 'huggingface-llama' is already used by"),
        (("--family", "olmo9", "--like", "lama"), "unknown Hugging Face model_type 'lama'"),
        (("--family", "olmo9", "--like", "vit"), "'vit' does not read text"),
        (("my-gate", "--family", "olmo9"), "pass either NAME or --family MODEL_TYPE"),
        ((), "pass either NAME or --family MODEL_TYPE"),
        (("my-gate", "--like", "llama"), "--like requires --family"),
        (("--family", "olmo9", "--path", "file/x"), "cannot be written"),
    ],
)
def test_a_request_that_cannot_be_is_refused(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = write(*words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


NOT_SHRUNK = {"bamba", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid", "hunyuan_v1_moe", "kimi_linear", "nemotron_h"}
"""Families of which no tiny model is made, because their sizes depend on one another in ways of their own."""


@pytest.mark.parametrize("like", sorted(NOT_SHRUNK))
@pytest.mark.slow
def test_a_family_without_a_tiny_model_is_refused(like):
    with pytest.raises(RequestError, match=f"a tiny {like} can be made"):
        describe_family(like)


@pytest.mark.slow
@pytest.mark.parametrize("like", sorted({*families()} - NOT_SHRUNK - {"vit"}))
def test_every_family_of_text_can_be_begun_with(like):
    description = describe_family(like)
    assert len(description["tensors"]) > 10
    assert max(max(shape, default=0) for shape in description["tensors"].values()) <= 2048


@pytest.mark.slow
@pytest.mark.parametrize("like", ["llama", "gemma2", "mixtral"])
def test_its_own_tests_pass(like, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write("--family", "olmo_9", "--like", like).exit_code == 0
    package = tmp_path / "axlearn-plugins-olmo-9"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = install(package, tmp_path / "site")
    process = subprocess.run(command, cwd=package, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]
