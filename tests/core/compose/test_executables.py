"""Compiled functions as files."""

import json
import subprocess
import sys

import numpy as np
import pytest

from axlearn_core.compose import compose, executables
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import resolve
from support import cli_runs

SET = {s.partition("=")[0]: json.loads(s.partition("=")[2]) for s in cli_runs.SETTINGS if s[-1].isdigit()}

SCRIPT = """
import json, sys
import numpy as np
import jax
from axlearn_core.compose import compose
from axlearn_core.plugins.resolve import resolve

directory, verb, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
program = compose(resolve("quickstart", target="none", set=settings).config)
shapes = program.config.input.batch_shapes()
batch = program.put({n: np.zeros(s, d) + np.arange(s[-1]).astype(d) % 7 for n, (s, d) in shapes.items()})
if verb == "load":
    print(sorted(program.load(directory)))
    compiled, lowered = jax.stages.Lowered.compile, []
    jax.stages.Lowered.compile = lambda self, *args, **kwargs: lowered.append(self) or compiled(self, *args, **kwargs)
else:
    program.compile_all([("init", None), ("train", batch)])
    program.export(directory, {"init": [None], "train": [batch]})
state = program.compile("init")(jax.random.key(3))
for _ in range(2):
    state, scalars = program.train_step(state, batch)
print(scalars["loss"].item().hex())
print(len(lowered) if verb == "load" else "exported")
"""


@pytest.fixture(scope="module")
def program():
    """A small model on two of the devices."""
    import jax

    config = resolve("quickstart", target="none", set=SET | {"input.batch_size": 4}).config
    return compose(config, jax.devices()[:2])


@pytest.fixture(scope="module")
def exported(program, tmp_path_factory):
    """Its `init`, exported."""
    directory = tmp_path_factory.mktemp("export") / "executables"
    program.export(directory, {"init": [None]})
    return directory


def run(directory, verb, **settings):
    words = [sys.executable, "-c", SCRIPT, str(directory), verb, json.dumps(SET | settings)]
    return subprocess.run(words, env=cli_runs.environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_another_process_loads_what_one_compiled(tmp_path):
    first = run(tmp_path / "step", "export")
    assert first.returncode == 0, first.stderr
    second = run(tmp_path / "step", "load")
    assert second.returncode == 0, second.stderr
    names, loss, compiled = second.stdout.splitlines()
    assert names == "['init', 'train']"
    assert loss == first.stdout.splitlines()[0]
    assert compiled == "0"
    other = run(tmp_path / "step", "load", **{"learner.optimizer.weight_decay": 0.5})  # of the step, not of the state
    assert other.returncode == 1
    assert "the program of train changed" in other.stderr
    assert "fix: export again" in other.stderr


@pytest.mark.slow
def test_what_the_compilation_cache_had_is_exported_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    first, second = (run(tmp_path / name, "export") for name in ("first", "second"))
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    loaded = run(tmp_path / "second", "load")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.splitlines()[1:] == [first.stdout.splitlines()[0], "0"]


@pytest.mark.slow
def test_several_devices(program, exported):
    import jax

    again = compose(program.config, jax.devices()[:2])
    assert again.load(exported) == ["init"]
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), again.init(1), program.init(1))
    assert all(jax.tree.leaves(equal))


def test_other_devices_refuse_it(program, exported):
    import jax

    other = compose(program.config, jax.devices()[2:4])
    with pytest.raises(RequestError, match="exported with a different machine"):
        other.load(exported)


@pytest.mark.parametrize("name", ["jax", "jaxlib", "compiler", "cpu", "format"])
def test_another_version_refuses_it(program, exported, tmp_path, name):
    index = json.loads((exported / "executables.json").read_text())
    (tmp_path / "executables.json").write_text(json.dumps({**index, name: "0.1"}))
    with pytest.raises(RequestError, match=r'got: "0.1"'):
        program.load(tmp_path)


def test_damage_is_an_error_and_no_code_is_read(program, exported, tmp_path):
    index = (exported / "executables.json").read_text()
    with pytest.raises(RequestError, match="is not an export"):
        program.load(tmp_path)
    (tmp_path / "executables.json").write_text(index[:-40])
    with pytest.raises(RequestError, match="is damaged"):
        program.load(tmp_path)
    (tmp_path / "executables.json").write_text(index)
    (tmp_path / "init-0.executable").write_bytes(b"\x80\x04.")
    again = compose(program.config, list(program.layout.mesh.devices.flat))
    again.load(tmp_path)
    with pytest.raises(RequestError, match=r"init-0\.executable is damaged"):
        again.init(1)


def test_what_cannot_be_exported_is_refused_before_anything_is_written(program, exported, tmp_path):
    with pytest.raises(RequestError, match="exists"):
        program.export(exported, {"init": [None]})
    with pytest.raises(RequestError, match="did you mean: train"):
        program.export(tmp_path / "new", {"trian": [None]})
    assert not (tmp_path / "new").exists()


def test_the_export_of_another_program_is_not_loaded(tmp_path):
    entry = executables.Executable(function="f", bucket="", program="a" * 64, file="f.executable", sha256="")
    with pytest.raises(RequestError, match=r"the program of f changed\n    got: a{16}\n    expected: b{16}"):
        executables.load(tmp_path, entry, "b" * 64, np.array([]))
