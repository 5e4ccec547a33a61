"""The compiled step is kept in the run directory, and loaded by whoever continues the run."""

import hashlib
import json
import re
import subprocess
import sys

import jax
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.loop import TrainLoop
from axlearn_plugins_runtime.job import compiled_step
from axlearn_plugins_runtime.job.compiled_step import _seals, check_seal, identity
from support import cli_runs

LOADED = "note: loaded the compiled step from "


@pytest.fixture(autouse=True)
def without_cache(monkeypatch):
    """XLA for CPU keeps only what it compiled itself."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")


def train(run, steps, *more, settings=()):
    """Trains in a process of its own; returns standard error."""
    return cli_runs.axlearn(*cli_runs.arguments(run, steps=steps, more=more, settings=settings), fresh=True).stderr


@pytest.fixture
def run(tmp_path):
    """Three steps of six."""
    folder = tmp_path / "run"
    assert LOADED not in train(folder, 3)
    return folder


def lock(run):
    return json.loads((run / "run.lock.json").read_text())


@pytest.mark.slow
def test_a_continued_run_loads_it_and_is_an_uninterrupted_one(run, tmp_path):
    before = lock(run)
    # The learning rate does not depend on it, so that only the identity tells the two programs apart.
    assert LOADED not in train(run, 6)
    assert LOADED in train(run, 6, "--restart")
    train(tmp_path / "alone", 6)
    assert cli_runs.losses(run) == cli_runs.losses(tmp_path / "alone")
    assert {n: lock(run)[n] for n in ("kernels", "hlo_fingerprint")} == {
        n: before[n] for n in ("kernels", "hlo_fingerprint")
    }
    assert cli_runs.metrics(run)[-1].keys() == cli_runs.metrics(tmp_path / "alone")[-1].keys()
    assert not list((run / "compiled").glob("*.tries"))
    assert len([p for p in (run / "compiled").iterdir() if p.is_dir()]) == 2


@pytest.mark.slow
def test_a_killed_run_goes_on_with_it(tmp_path):
    run, alone = tmp_path / "run", tmp_path / "alone"
    process = cli_runs.start(*cli_runs.arguments(run, steps=60))
    directory = run / "compiled"
    assert cli_runs.kill_when(
        process, lambda: any(directory.glob("*/executables.json")) and len(cli_runs.logged(run)) > 5
    )
    process.communicate()
    assert LOADED in train(run, 60)
    train(alone, 60)
    assert cli_runs.losses(run) == cli_runs.losses(alone)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["damaged", "writable", "tries", "foreign", "unsigned"])
def test_invalid_files_are_reported_and_compiled_again(run, what, monkeypatch, tmp_path):
    (folder,) = [p for p in (run / "compiled").iterdir() if p.is_dir()]
    (file,) = folder.glob("*.executable")
    tries = folder.with_suffix(".tries")
    if what == "damaged":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elif what == "writable":
        file.chmod(0o666)
    elif what == "tries":
        tries.write_bytes(b"...")
    elif what == "unsigned":
        folder.with_suffix(".seal").unlink()
    else:  # a run directory of somebody else, with the very same versions
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    text = train(run, 3, "--restart")
    reasons = {
        "damaged": f"{file} is damaged: its hash does not match executables.json",
        "writable": f"{file} may be written by other users: owner 0, mode 666",
        "tries": "3 attempts loaded it without finishing a step, so it was removed",
        "foreign": "it is not signed by this user or by this job's supervisor",
        "unsigned": "its signature cannot be read: ",
    }
    assert f"note: the compiled step in {folder} was not loaded: {reasons[what]}" in text
    assert LOADED not in text
    assert len(cli_runs.logged(run)) == 3
    assert LOADED in train(run, 3, "--restart")  # it was compiled and kept anew
    assert not tries.exists()


class Local(TrainLoop):
    """Code that has neither a version nor a hash."""


def test_an_identity_is_of_config_flags_and_code(monkeypatch):
    settings = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 16, "max_steps": 3}
    config = resolve("quickstart", target="none", set=settings).config
    program = compose(config, jax.devices()[:1])
    whole = identity(program)
    assert whole == identity(compose(config, jax.devices()[:1]))
    assert whole["config.model.decoder.hidden_dim"] == "16"
    assert "code of axlearn_core" in whole
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    assert identity(program) != whole
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert identity(compose(config, jax.devices()[:2])) != whole
    assert identity(compose(patch(config, {"loop": Local.Config()}), jax.devices()[:1])) is None


def test_a_seal_is_of_the_user_or_of_a_supervisor(tmp_path, monkeypatch):
    folder = tmp_path / "abc"
    folder.mkdir()
    (folder / "executables.json").write_text("{}")

    def keep(home, job):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        monkeypatch.setenv("AXLEARN_JOB", job)

    keep("mine", "0" * 32)
    folder.with_suffix(".seal").write_text(json.dumps(_seals(folder)))
    check_seal(folder)
    keep("mine", "1" * 32)
    check_seal(folder)  # the user's own
    keep("theirs", "0" * 32)
    check_seal(folder)  # the supervisor's
    for job in ("1" * 32, "", "slurm-7"):
        keep("theirs", job)
        with pytest.raises(RequestError, match="not signed by this user"):
            check_seal(folder)
    keep("mine", "")
    (folder / "executables.json").write_text("{ }")
    with pytest.raises(RequestError, match="not signed by this user"):
        check_seal(folder)
    assert (tmp_path / "mine/axlearn/key").stat().st_mode & 0o777 == 0o600


class Unloaded:
    """A program that must not be handed the files of somebody else."""

    def __init__(self):
        self.discarded = 0

    def load(self, folder, identity):
        raise AssertionError("executables without a signature are code of somebody else")

    def discard(self, name, batch):
        self.discarded += 1


@pytest.mark.parametrize("seal", ["missing", "of another user", "of other files", "empty"])
def test_files_without_a_seal_are_never_loaded(seal, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("AXLEARN_JOB", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setattr(compiled_step, "identity", lambda program: {"config.seed": "0"})
    program = Unloaded()
    step = compiled_step.CompiledStep(tmp_path / "run", program)
    name = hashlib.sha256(json.dumps({"config.seed": "0"}, sort_keys=True).encode()).hexdigest()[:16]
    folder = tmp_path / "run/compiled" / name
    folder.mkdir(parents=True)
    (folder / "executables.json").write_text("{}")
    for path in (folder, folder / "executables.json"):
        path.chmod(0o700)
    seals = {
        "missing": None,
        "of another user": {"user": "0" * 64},
        "of other files": _seals(folder),
        "empty": {},
    }[seal]
    if seals is not None:
        folder.with_suffix(".seal").write_text(json.dumps(seals))
    if seal == "of other files":
        (folder / "executables.json").write_text('{"functions": []}')
    assert step.load({}) is False
    assert program.discarded == 1
    assert step.facts == {}
    reason = "signature cannot be read" if seal == "missing" else "not signed by this user"
    assert re.search(f"was not loaded: .*{reason}", capfd.readouterr().err)


@pytest.mark.slow
def test_loading_that_never_ends_ends_the_process_for_its_supervisor():
    script = (
        "import time\nfrom axlearn_plugins_runtime.job.compiled_step import time_limit\n"
        "with time_limit(60, 'it was not loaded within'): pass\n"
        "with time_limit(0.3, 'it was not loaded within'): time.sleep(60)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert process.returncode == 75
    assert "it was not loaded within 0.3 s: exiting with code 75" in process.stderr
    assert 'File "<string>", line 4' in process.stderr
