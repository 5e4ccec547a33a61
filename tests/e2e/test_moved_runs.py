"""A run is a folder: it is moved, what it was made of is deleted, and every command still works."""

import json
import shutil
from pathlib import Path

import pytest

import axlearn_core as ax
import axlearn_plugins_transformer.text as text
from axlearn_core.errors import CheckpointError, ConfigError, RequestError
from axlearn_core.run import Run, open_weights
from axlearn_core.train.api import default_run_dir
from axlearn_plugins_finetune.conversion.convert import convert_run
from axlearn_plugins_finetune.lora.merge import export_run as export_adapters
from axlearn_plugins_finetune.lora.merge import merge_run
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_quantization.store import quantize_run
from support import api_runs
from support.paths import HF_FIXTURES

TOKENIZER = Path(text.__file__).parent / "python-2k.json"
SETTINGS = {
    **api_runs.SMALL,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
    "trackers": [{"type": "jsonl"}],
    "log_every_steps": 1,
}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer of the user, with a template beside it."""
    file = tmp_path / "mine" / "tokenizer.json"
    file.parent.mkdir()
    shutil.copyfile(TOKENIZER, file)
    (file.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return file


def train(run, tokenizer, *, steps, experiment="quickstart", **more):
    settings = {**SETTINGS, "input.tokenizer": {"type": "tokenizer-json", "path": str(tokenizer)}, **more}
    return ax.train(experiment, set=settings, steps=steps, run_dir=run)


def go_on(run, *, steps, **options):
    return ax.train(run / "config.yaml", steps=steps, run_dir=run, **options)


def texts_with(folder, *needles):
    """(file, line) of the text files of a run that have one of some strings in them."""
    matches = []
    for file in (p for p in folder.rglob("*") if p.is_file()):
        content = file.read_bytes()
        if b"\0" not in content[:4096]:
            lines = content.decode("utf-8", "replace").splitlines()
            matches += [(file.name, line) for line in lines if any(needle in line for needle in needles)]
    return matches


@pytest.mark.slow
def test_a_trained_run_goes_on_where_it_is_moved_to(tmp_path, tokenizer, capfd, monkeypatch):
    train(tmp_path / "run", tokenizer, steps=1)
    texts = [row for row in texts_with(tmp_path / "run", str(tmp_path)) if not row[1].lstrip().startswith('"by":')]
    assert texts == []  # but for who set it, in the user's words
    for file in ("config.yaml", "checkpoints/1/config.yaml"):
        assert "path: run:files/input.tokenizer/tokenizer.json" in (tmp_path / "run" / file).read_text()
    run = (tmp_path / "run").rename(tmp_path / "moved")
    train(run, tokenizer, steps=2)  # the file is still there, and is the same setting
    tokenizer.parent.rename(tmp_path / "elsewhere")
    capfd.readouterr()
    train(run, tokenizer, steps=3)
    assert f"{tokenizer} does not exist; using the run's copy, {run}/files/" in capfd.readouterr().err
    go_on(run, steps=4)
    losses = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [1, 2, 3, 4]
    for place in (run, run / "checkpoints", "moved"):
        assert isinstance(open_weights(place).tokenizer.decode([5]), str)
    assert (run / "files/input.tokenizer/tokenizer_config.json").is_file()


@pytest.mark.slow
def test_another_tokenizer_is_refused_by_its_path(tmp_path, tokenizer):
    train(tmp_path / "run", tokenizer, steps=1)
    data = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(data))  # other bytes
    with pytest.raises(
        CheckpointError, match=r"contains a run with a different config[\s\S]*input.tokenizer.path: .*run/files/"
    ):
        train(tmp_path / "run", tokenizer, steps=2)
    tokenizer.unlink()
    with pytest.raises(ConfigError, match=r"input.tokenizer.path: cannot be read: No such file[\s\S]*fix"):
        train(tmp_path / "other", tokenizer, steps=1)
    assert not (tmp_path / "other").exists()


def test_a_run_without_its_files_is_one_clear_error(tmp_path, tokenizer):
    train(tmp_path / "run", tokenizer, steps=1)
    shutil.rmtree(tmp_path / "run/files")
    with pytest.raises(
        CheckpointError, match=r"run/config.yaml refers to files that its run does not have[\s\S]*fix: copy"
    ):
        open_weights(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"input.tokenizer.path: refers to a file of a run, but the run does not have it[\s\S]*fix: copy",
    ):
        go_on(tmp_path / "run", steps=2)


@pytest.mark.slow
def test_a_copied_config_gets_the_same_run_name_from_any_folder(tmp_path, tokenizer):
    train(tmp_path / "run", tokenizer, steps=1)
    first, _ = default_run_dir("x", ax.resolve(tmp_path / "run/config.yaml").config)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert default_run_dir("x", ax.resolve(tmp_path / "moved/config.yaml").config)[0] == first
    file = tmp_path / "base.yaml"
    file.write_text("experiment: moved/config.yaml\nset: {max_steps: 1}\n")
    config = ax.resolve(file).config
    assert config.input.tokenizer.path == str(tmp_path / "moved/files/input.tokenizer/tokenizer.json")


def test_checkpoints_kept_elsewhere_bring_the_files(tmp_path, tokenizer):
    uri = f"file://{tmp_path}/kept"
    train(tmp_path / "run", tokenizer, steps=1, **{"checkpointer.uri": uri})
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tokenizer.parent)
    (tmp_path / "kept").rename(tmp_path / "kept2")
    assert open_weights(tmp_path / "kept2").tokenizer.encode("def")


@pytest.mark.slow
def test_a_run_of_an_earlier_version(tmp_path, tokenizer, caplog):
    """Its config has absolute paths, and its files lie beside it or nowhere."""
    run = tmp_path / "run"
    train(run, tokenizer, steps=1)
    shutil.rmtree(run / "files")
    for file in (run / "config.yaml", run / "checkpoints/1/config.yaml"):
        file.write_text(file.read_text().replace("run:files/input.tokenizer/tokenizer.json", str(tokenizer)))
    manifest = run / "checkpoints/1/manifest.json"  # of a version that kept no config in checkpoints
    (run / "checkpoints/1/config.yaml").unlink()
    data = json.loads(manifest.read_text())
    del data["files"]["config.yaml"]
    from axlearn_core.checkpoint.manifest import _digest

    body = {k: v for k, v in data.items() if k != "sha256"}
    manifest.write_text(json.dumps({"sha256": _digest(body), **body}))
    assert open_weights(run).tokenizer
    assert f"is a file outside the run: {tokenizer}" in caplog.text
    train(run, tokenizer, steps=2)  # it is made portable
    assert "path: run:files/" in (run / "config.yaml").read_text()
    shutil.rmtree(run / "files")
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("run:files/input.tokenizer/tokenizer.json", "/gone/tokenizer.json")
    )
    (run / "huggingface").mkdir()
    tokenizer.rename(run / "huggingface/tokenizer.json")
    assert Run(run).config.input.tokenizer.path == str(run / "huggingface/tokenizer.json")
    assert "using the run's copy of tokenizer.json" in caplog.text


@pytest.fixture
def imported(tmp_path):
    """(a run that was imported, its model directory)."""
    directory = tmp_path / "model"
    shutil.copytree(HF_FIXTURES / "llama3", directory)
    (directory / "expected.safetensors").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    (tmp_path / "data.txt").write_text("w1 w2 w3 " * 100)
    source = "input.source={type: files, paths: data.txt}"
    import_run(directory, tmp_path / "base", set=["model.decoder.stack.mode=unrolled", "evaluators={}", source])
    return tmp_path / "base", directory


MADE = {
    "imported": lambda run, out: shutil.copytree(run, out),
    "converted": lambda run, out: convert_run(run, out, set=["seed=1"]),
    "lora": lambda run, out: convert_run(run, out, with_=[f"lora:rank=2,base={run.name}"]),
    "upcycled": lambda run, out: convert_run(run, out, with_=["moe:num_experts=2,top_k=1"]),
    "quantized": lambda run, out: quantize_run(run, out, storage="int8"),
    "merged": lambda run, out: (
        convert_run(run, out.with_name("adapted"), with_=["lora:rank=2"]),
        merge_run(out.with_name("adapted"), out),
        shutil.rmtree(out.with_name("adapted")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_a_run_made_of_another_does_not_need_it(kind, imported, tmp_path):
    base, directory = imported
    MADE[kind](base, tmp_path / "out")
    texts = texts_with(tmp_path / "out", str(tmp_path))
    assert {line.strip().partition(":")[0] for _, line in texts} <= {'"imported_from"', '"made_from"', '"by"'}
    assert all("tokenizer.json" not in line for _, line in texts)
    shutil.rmtree(base)
    shutil.rmtree(directory)
    run = (tmp_path / "out").rename(tmp_path / "moved")
    assert Run(run).config.loop == Run(run).config.loop.__class__()  # nothing to begin with but its own weights
    loaded = ax.load(run)
    assert loaded.generate("w1 w2", max_tokens=2) == ax.load(run / "checkpoints").generate("w1 w2", max_tokens=2)
    files = {p.name for p in (run / "files/input.tokenizer").iterdir()}
    assert files == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    if kind in ("imported", "merged", "converted"):
        export_run(run, tmp_path / "exported")
        assert (tmp_path / "exported/tokenizer.json").is_file()


@pytest.mark.slow
def test_exported_adapters_name_the_base_that_they_need(imported, tmp_path):
    base, _ = imported
    convert_run(base, tmp_path / "adapted", with_=["lora:rank=2"])
    export_adapters(tmp_path / "adapted", tmp_path / "adapters")
    with pytest.raises(
        CheckpointError, match=r"does not name the run that its adapters were trained on\n    fix: name it"
    ):
        open_weights(tmp_path / "adapters")
    base.rename(tmp_path / "base2")
    assert open_weights(f"{tmp_path}/adapters?base={tmp_path}/base2").tokenizer
    with pytest.raises(CheckpointError, match=r"the base of the adapters in .* cannot be opened[\s\S]*\?base=RUN_DIR"):
        open_weights(f"{tmp_path}/adapters?base={base}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    ["lora:rank=2,base={base}", "distill:teacher={base},base={base}"],
)
def test_a_run_that_has_begun_goes_on_without_its_base(feature, tmp_path, tokenizer):
    train(tmp_path / "base", tokenizer, steps=1)
    settings = {**SETTINGS, "input.tokenizer": {"type": "tokenizer-json", "path": str(tokenizer)}}
    use = feature.format(base=tmp_path / "base")
    ax.train("quickstart", with_=[use], set=settings, steps=1, run_dir=tmp_path / "tuned")
    shutil.rmtree(tmp_path / "base")
    run = (tmp_path / "tuned").rename(tmp_path / "moved")
    go_on(run, steps=2)
    assert ax.load(run).step == 2
    with pytest.raises(RequestError, match="a run that has started continues without it"):
        ax.train("quickstart", with_=[use], set=settings, steps=3, run_dir=run)
