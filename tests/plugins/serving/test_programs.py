"""Exported programs of a server: loading without compilation, and rejection of others' programs."""

import json
import os
import shutil
import subprocess
import sys
import threading

import httpx
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.config import Configurable, node
from axlearn_core.errors import RequestError
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_serving.programs import BackgroundLoader, ProgramsError, find_run_programs, identity
from axlearn_plugins_serving.runner import ModelRunner

SIZES = {"runner.max_rows": 2, "runner.max_context": 64, "runner.row_buckets": (), "runner.chunk_buckets": ()}
SET = ["--set", "serving.runner.max_rows=2", "--set", "serving.runner.max_context=64"]
SET += ["--set", "serving.runner.row_buckets=[]", "--set", "serving.runner.chunk_buckets=[]"]
MODEL = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "evaluators": {}}
MODEL["model.decoder.layer.attention.num_heads"] = MODEL["model.decoder.layer.attention.num_kv_heads"] = (
    2  # of 16 numbers
)
ATTENTION = "axlearn_plugins_transformer.kernels.paged_attention:PagedAttentionOp"


def environment():
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"]}
    return os.environ | flags | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def axlearn(*words):
    command = [sys.executable, "-m", "axlearn_core", *map(str, words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    settings = MODEL | {"input.sequence_length": 32, "input.batch_size": 8}
    ax.train("quickstart", run_dir=directory, steps=1, set=settings)
    exported = axlearn("plan", directory, "--serve", "--export", directory / "programs", *SET)
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith("11 programs in "), exported.stdout
    return directory


def served(uri, *words, sizes=SET):
    """Serve one request and return the counters, the standard error and the exit code."""
    command = [sys.executable, "-m", "axlearn_core", "serve", str(uri), "--port", "0", *sizes, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen(command, **pipes) as process:
        try:
            line = process.stdout.readline()
            if not line:
                return None, process.communicate()[1], process.returncode
            url = line.split()[-1]
            body = {"prompt": "def ", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            stats = httpx.get(f"{url}/stats").json()
            metrics = httpx.get(f"{url}/metrics").text
            process.terminate()
            errors = process.communicate()[1]
        finally:
            process.kill()
    return stats | {"text": answer["choices"][0]["text"], "metrics": metrics}, errors, process.returncode


@pytest.mark.slow
def test_a_server_with_programs_compiles_nothing(run_dir, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(run_dir, bare, ignore=shutil.ignore_patterns("programs"))
    compiled, _, code = served(bare)
    assert code == 0
    assert compiled["start_compilations"] > 0
    assert compiled["compilations"] == 0
    for loaded, errors, code in (served(run_dir), served(bare, "--programs", run_dir / "programs")):
        assert code == 0, errors
        assert loaded["start_compilations"] == loaded["compilations"] == 0, errors
        assert "axlearn_start_compilations 0.0" in loaded["metrics"]
        assert loaded["text"] == compiled["text"]


@pytest.mark.slow
def test_programs_name_their_kernels(run_dir):
    """Kernels register what programs call, but without tracing nothing else imports their modules."""
    index = json.loads((run_dir / "programs" / "executables.json").read_text())
    kernels = {function["function"]: function["kernels"] for function in index["functions"]}
    attends = "xla-split" if library.unavailable_reason else "native"
    assert [ATTENTION, attends] in kernels["serve"]
    assert kernels["serve_weights"] == []


@pytest.mark.slow
def test_programs_of_other_settings(run_dir):
    other = [*SET, "--set", "serving.runner.max_rows=3"]
    nothing, errors, code = served(run_dir, "--programs", run_dir / "programs", sizes=other)
    assert (nothing, code) == (None, 2)
    assert "was exported with a different identity: runner.max_rows" in errors
    assert 'got: "2"' in errors
    assert "fix: export again" in errors
    stats, errors, code = served(run_dir, sizes=other)  # the run's own programs, which the user did not name
    assert stats["start_compilations"] > 0
    assert "warning: compiling: " in errors


@pytest.mark.slow
def test_programs_of_another_model(run_dir, tmp_path):
    settings = MODEL | {"model.decoder.num_layers": 2, "input.sequence_length": 32, "input.batch_size": 8}
    ax.train("quickstart", run_dir=tmp_path / "other", steps=1, set=settings)
    nothing, errors, code = served(tmp_path / "other", "--programs", run_dir / "programs")
    assert (nothing, code) == (None, 2)
    assert "a different identity: model.decoder.num_layers" in errors


def refused(run_dir, tmp_path, **changes):
    """Return the error of opening the model with a changed index of programs."""
    copy = tmp_path / "programs"
    shutil.copytree(run_dir / "programs", copy)
    path = copy / "executables.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {k: v(index[k]) if callable(v) else v for k, v in changes.items()}))
    script = (
        "import sys; from pathlib import Path\n"
        "from axlearn_plugins_serving.open_engine import open_engine\n"
        "from axlearn_plugins_serving.engine_devices import set_up_devices\n"
        "from axlearn_plugins_serving.engine import ServingEngine\n"
        "from axlearn_core.config import patch\n"
        f"config = patch(ServingEngine.Config(), {SIZES!r})\n"
        "set_up_devices(config, owns_cores=True)\n"
        "open_engine(sys.argv[1], config=config, programs=Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(run_dir), str(copy)]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert process.returncode == 1
    return process.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"jax": "0.1"}, "exported with a different version of JAX"),
        ({"cpu": "x86_64 0123"}, "exported with a different kind of CPU"),
        ({"devices": [["tpu", "TPU v6e", 0, []]]}, "exported with a different machine"),
        ({"identity": lambda i: i | {"code of axlearn_core": "0"}}, "a different identity: code of axlearn_core"),
        ({"functions": lambda f: [e for e in f if "rows=2" not in e["bucket"]]}, "has no program serve of the shape"),
        ({"functions": lambda f: [e | {"sha256": "0"} for e in f]}, "is damaged"),
        ({"functions": lambda f: [e | {"kernels": [[ATTENTION, "fast"]]} for e in f]}, "uses the kernel 'fast'"),
    ],
    ids=["jax", "cpu", "machine", "code", "missing", "damaged", "kernel"],
)
def test_programs_that_do_not_fit(run_dir, tmp_path, changes, says):
    assert says in refused(run_dir, tmp_path, **changes)


class Unpackaged(Configurable):
    """A layer of a script, whose code has neither a version nor a hash."""

    @node
    class Config(Configurable.Config["Unpackaged"]):
        size: int = 1


def test_a_model_with_code_that_is_not_installed_has_no_programs():
    with pytest.raises(ProgramsError, match="its config has code that is not installed"):
        identity(None, {"runner": ModelRunner.Config(), "model": Unpackaged.Config()})


def test_what_is_not_begun_is_not_loaded_once_the_runner_is_closed():
    began, go_on, loaded = threading.Event(), threading.Event(), []

    class SlowProgram:
        def compile(self, name, bucket):
            began.set()
            assert go_on.wait(60)
            loaded.append((name, bucket))

    loading = BackgroundLoader(SlowProgram(), {"first": [None], "second": [1, 2]})
    assert began.wait(60)
    loading.stop()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("load-programs"):
            thread.join(60)
    assert loaded == [("first", None)]


def plan(*words):
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


def test_requests_that_cannot_be_exported(tmp_path):
    message = plan("quickstart", "--serve", "--export", tmp_path)
    assert (message.exit_code, "exists" in message.stderr) == (2, True)
    nothing = plan("quickstart", "--serve", "--export", tmp_path / "new")
    assert nothing.exit_code == 2
    assert "'quickstart' is not a model directory" in nothing.stderr
    alone = plan("quickstart", "--export", tmp_path / "new")
    assert alone.exit_code == 2
    assert "--export is an option of `axlearn plan serve`" in alone.stderr


def test_programs_that_others_may_write_are_refused(tmp_path):
    run = tmp_path / "run"
    (run / "programs").mkdir(parents=True)
    assert find_run_programs(run) is None
    (run / "config.yaml").touch()
    (run / "programs" / "executables.json").touch(mode=0o600)
    (run / "programs").chmod(0o755)
    assert find_run_programs(run) == run / "programs"
    (run / "programs").chmod(0o777)
    with pytest.raises(RequestError, match="not safe to load"):
        find_run_programs(run)


def test_a_directory_in_hugging_face_format_brings_no_programs(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "config.json").touch()
    (tmp_path / "programs" / "executables.json").touch()
    assert find_run_programs(tmp_path) is None
