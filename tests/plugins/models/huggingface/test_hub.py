"""Models that are opened by their name on the hub: downloads, the cache, and errors."""

import json
import os
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_plugins_models.huggingface.hub import HubName, locate_model, parse_name
from support.hub_server import COMMITS, serve_hub
from support.paths import HF_FIXTURES

NEEDED = {
    "config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "chat_template.jinja", "additional_chat_templates/rag.jinja", "LICENSE",
}  # fmt: skip
UNUSED = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "original/params.json", "original/consolidated.00.pth",
    "model.gguf", "consolidated.safetensors", "model-00003-of-00003.safetensors", "onnx/model.onnx", ".gitattributes",
)  # fmt: skip
MORE = {n: f"{n}\n" for n in (*UNUSED, "chat_template.jinja", "additional_chat_templates/rag.jinja", "LICENSE")}


@pytest.fixture(scope="module")
def hub():
    with serve_hub() as hub:
        model = HF_FIXTURES / "llama3"
        hub.add("org/tiny", model, files=MORE)
        hub.add("org/tiny", model, "v1", files={"LICENSE": "old"})
        hub.add("org/gated", model)
        hub.gated.add("org/gated")
        hub.repositories["org/pickled"] = {"main": {"config.json": b"{}", "a.bin": b"", "b.bin": b"", "x.gguf": b""}}
        hub.repositories["org/empty"] = {"main": {"README.md": b""}}
        for repository in hub.repositories.values():
            for files in repository.values():
                files.pop("expected.safetensors", None)
        yield hub


@pytest.fixture
def cache(hub, tmp_path, monkeypatch):
    """An empty cache and folder; huggingface_hub reads the environment when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    hub.downloads.clear()
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name-1.5_x@refs/pr/1", HubName("org/name-1.5_x", "refs/pr/1")),
        ("name", None),
        ("runs/mine", None),
        ("org/name/more", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("../name", None),
        ("gs://org/name", None),
        ("org/name@", None),
        ("org/name?base=x", None),
    ],
)
def test_a_name_is_never_a_local_path(uri, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert parse_name(uri) == name


def test_a_local_directory_wins(tmp_path, monkeypatch, cache, hub):
    (tmp_path / "work/org/tiny").mkdir(parents=True)
    result = CliRunner().invoke(cli, ["checkpoint", "import-hf", "org/tiny", "run"])
    assert (result.exit_code, result.stderr.splitlines()[0]) == (2, "error: org/tiny has no config.json")
    assert locate_model("org/tiny").origin == "org/tiny"
    assert not hub.downloads


def test_only_needed_files_are_downloaded_and_the_commit_is_recorded(cache, hub):
    result = CliRunner().invoke(cli, ["checkpoint", "import-hf", "org/tiny", "run"])
    assert result.exit_code == 0, result.stderr
    assert {file for file, _ in hub.downloads} == NEEDED
    with open("run/run.lock.json") as file:
        assert json.load(file)["imported_from"] == f"org/tiny@{COMMITS['main']}"
    before = len(hub.downloads)
    directory = locate_model("org/tiny").path  # the cache has it
    assert len(hub.downloads) == before
    assert {f.relative_to(directory).as_posix() for f in directory.rglob("*") if f.is_file()} == NEEDED


def test_a_revision_is_downloaded_and_read_offline_again(cache, hub, monkeypatch, capsys):
    place = locate_model("org/tiny@v1")
    assert place.origin == f"org/tiny@{COMMITS['v1']}"
    assert (place.path / "LICENSE").read_text() == "old"
    hub.downloads.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_model("org/tiny@v1") == place
    assert locate_model(place.origin) == place
    assert ax.open_weights("org/tiny@v1").experiment.model.vocab_size == 96
    assert not hub.downloads
    assert f"using the cached commit {COMMITS['v1']}" in capsys.readouterr().err
    (place.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RequestError, match="names missing shards: model-00002"):
        ax.open_weights("org/tiny@v1")
    (place.path / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="not a complete model in the cache"):
        ax.open_weights("org/tiny@v1")


def test_a_cache_is_used_if_the_hub_is_down(cache, hub, monkeypatch):
    place = locate_model("org/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert locate_model("org/tiny") == place


def test_a_token_opens_a_gated_repository(cache, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (locate_model("org/gated").path / "config.json").is_file()


ERRORS = {
    "missing": ("org/nothing", [
        "org/nothing is not a local directory, and there is no such repository at http://127.0.0.1", "HF_TOKEN"
    ]),
    "revision": ("org/tiny@v9", ["org/tiny@v9: the repository has no revision 'v9'"]),
    "gated": ("org/gated", ["org/gated: the hub denied access to this repository (HTTP 401)", "/org/gated, then set HF_TOKEN"]),
    "forbidden": ("org/gated", ["(HTTP 403)", "request access at http://127.0.0.1"]),
    "pickled": ("org/pickled", ["org/pickled has neither model.safetensors nor", "got: 2 x *.bin, 1 x *.gguf"]),
    "empty": ("org/empty", ["got: no weights"]),
    "invalid": ("org/a..b", ["org/a..b is neither a local directory nor a valid repository name"]),
    "offline": ("org/tiny", ["not a complete model in the cache", "HF_HUB_OFFLINE is set", "fix: unset HF_HUB_OFFLINE"]),
    "unreachable": ("org/tiny", ["http://127.0.0.1:9 cannot be reached", "check the connection and HF_ENDPOINT"]),
    "uninstalled": ("org/tiny", ["requires huggingface_hub, which is not installed", "axlearn-plugins-models[hub]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_one_error_says_what_failed_and_what_to_do(name, cache, monkeypatch):
    uri, expected = ERRORS[name]
    if name == "forbidden":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
    if name == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if name == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    if name == "uninstalled":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = CliRunner().invoke(cli, ["checkpoint", "import-hf", uri, "run"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert all(text in result.stderr for text in expected), result.stderr
    assert not os.path.exists("run")


def test_blobs_that_repositories_share_are_read(cache):
    place = locate_model("org/tiny")
    file = place.path / "config.json"
    blob = file.resolve()
    shared = cache / "blobs/12"
    shared.parent.mkdir()
    shared.write_bytes(blob.read_bytes())
    blob.unlink()
    blob.symlink_to(shared)
    with pytest.raises(RequestError, match="is a link to a file outside its directory"):
        ax.open_weights(place.path)
    (cache / "blobs/.huggingface-shared-blobs").write_text("1")
    assert ax.open_weights(place.path).config.vocab_size == 96


@pytest.mark.slow
def test_commands_read_the_environment(hub, tmp_path):
    def call(*words, code=0, **env):
        command = [sys.executable, "-m", "axlearn_core", *words]
        process = subprocess.run(command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True)
        assert process.returncode == code, process.stderr
        return process.stdout if code == 0 else process.stderr

    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    words = ("generate", "org/gated", "--prompt", "w1 w2", "--max-tokens", "3")
    assert "denied access" in call(*words, code=2, **home)
    text = call(*words, **home, HF_TOKEN=hub.token)
    assert call(*words, **home | {"HF_HUB_OFFLINE": "1"}) == text
    assert (tmp_path / "home/hub/models--org--gated").is_dir()
    assert "HF_HUB_OFFLINE is set" in call("serve", "org/tiny", code=2, **home | {"HF_HUB_OFFLINE": "1"})


@pytest.mark.slow
def test_a_server_opens_a_model_by_its_name(hub, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    sizes = ["runner.max_rows=2", "runner.block_size=16", "runner.row_buckets=[]", "runner.chunk_buckets=[]"]
    words = ["serve", "org/tiny@v1", "--port", "0", *(word for size in sizes for word in ("--set", f"serving.{size}"))]
    request = {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0}
    expected = ax.load(HF_FIXTURES / "llama3").generate("w1 w2", max_tokens=3, temperature=0.0)
    process = subprocess.Popen(
        [sys.executable, "-m", "axlearn_core", *words], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line, line
        url = line.split()[-1]
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "org/tiny"
        response = httpx.post(f"{url}/v1/completions", json={"model": model["id"], **request}, timeout=60).json()
        assert response["choices"][0]["text"] == expected
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
