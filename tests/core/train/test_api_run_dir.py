"""Names of runs, changes with which a run may continue, and runs that older versions named."""

import json

import pytest

from axlearn_core.config import patch
from axlearn_core.config.kinds import get_kind
from axlearn_core.errors import CheckpointError, ConfigError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import record
from axlearn_core.run.record import RunDir, short_hash
from axlearn_core.train import api

REASON = "dropout draws random numbers"
EXECUTION = [
    "remat",
    "scan",
    "sequence-parallel",
    "context-parallel",
    "offload-optimizer",
]


def config(*features, **settings):
    return resolve("quickstart", with_=features, set=settings).config


@pytest.fixture
def draws(monkeypatch):
    monkeypatch.setattr(record, "batch_dependence", lambda config: (REASON,))


def check(tmp_path, new, old=None, **options):
    return RunDir.check(tmp_path, new, old or config(), allow_drift=options.pop("allow_drift", False), **options)


@pytest.mark.parametrize("feature", EXECUTION)
def test_a_run_goes_on_with_another_execution_and_keeps_its_name(feature, tmp_path):
    actual = check(tmp_path, config(feature))
    assert actual.resumes
    assert all(note.startswith("changed since the run started: ") for note in actual.notes)
    assert actual.notes
    assert short_hash(config(feature)) == short_hash(config())


@pytest.mark.parametrize(
    "settings",
    [{"input.batch_size": 16}, {"learner.optimizer.learning_rate.peak": 0.001}, {"input.source.chunk_bytes": 9}],
)
def test_a_run_that_only_has_weights_may_be_trained_in_any_way(settings, tmp_path):
    assert check(tmp_path, config(**settings), untrained=True).resumes
    with pytest.raises(CheckpointError, match="with a different config"):
        check(tmp_path, config(**settings))


@pytest.mark.parametrize("settings", [{"model.decoder.num_layers": 2}, {"input.tokenizer": {"type": "byte-tokenizer"}}])
def test_what_gives_weights_their_meaning_stays(settings, tmp_path):
    with pytest.raises(CheckpointError, match="with a different config"):
        check(tmp_path, config(**settings), untrained=True)


@pytest.mark.parametrize(
    ("lock", "untrained"),
    [
        ({"made_from": "a"}, True),
        ({"imported_from": "a"}, True),
        ({"made_from": "a", "versions": {}}, False),
        ({}, False),
    ],
)
def test_the_lock_tells_whether_a_run_was_trained(lock, untrained):
    assert record.is_untrained(lock) is untrained


@pytest.mark.parametrize("feature", ["gradient-accumulation:steps=2", "pipeline:microbatches=2"])
def test_microbatches_are_free_where_nothing_draws(feature, tmp_path):
    assert check(tmp_path, config(feature)).resumes
    assert short_hash(config(feature)) == short_hash(config())


@pytest.mark.parametrize("feature", ["gradient-accumulation:steps=2", "pipeline:microbatches=2"])
@pytest.mark.usefixtures("draws")
def test_microbatches_are_mathematics_where_something_draws(feature, tmp_path):
    with pytest.raises(CheckpointError, match=f"different microbatches: {REASON}") as error:
        check(tmp_path, config(feature))
    assert error.value.exit_code == 2
    assert "scan" not in str(error.value)
    assert check(tmp_path, config(feature), allow_drift=True).resumes
    assert short_hash(config(feature)) != short_hash(config())
    assert check(tmp_path, config("remat")).resumes  # other execution is free


@pytest.mark.usefixtures("draws")
def test_naming_a_run_with_default_microbatches_does_not_build_the_model(monkeypatch):
    monkeypatch.setattr(record, "batch_dependence", lambda config: pytest.fail("asked"))
    short_hash(config())


def test_a_model_says_what_depends_on_its_batch():
    assert record.batch_dependence(config()) == ()
    reasons = record.batch_dependence(config("dropout:rate=0.1"))
    assert any(reason.endswith("dropout draws random numbers") for reason in reasons)
    routed = record.batch_dependence(config("moe:num_experts=4"))
    assert routed == ("decoder.layer.feed_forward.router balances its load over the batch",)


@pytest.mark.parametrize(
    "settings",
    [
        {"model.decoder.layer.norm.eps": 0.01},
        {"model.dtype": "bfloat16"},
        {"learner.ema_decay": 0.9},
        {"input.batch_size": 4},
        {"seed": 1},
    ],
)
def test_other_mathematics_is_refused_and_named(settings, tmp_path):
    (path,) = settings
    with pytest.raises(CheckpointError) as error:
        check(tmp_path, config(**settings))
    assert path in str(error.value)
    assert short_hash(config(**settings)) != short_hash(config())


def test_state_in_another_dtype_is_refused_and_its_place_is_free(tmp_path):
    old = config("offload-optimizer")
    with pytest.raises(CheckpointError, match=r"learner\.state_dtype: None -> 'bfloat16'"):
        check(tmp_path, config("offload-optimizer", "optimizer-precision"), old)
    assert check(tmp_path, config(), old).resumes


def test_more_steps_are_free_and_no_execution(tmp_path):
    assert check(tmp_path, config(max_steps=7)).resumes
    assert short_hash(config(max_steps=7)) == short_hash(config())
    assert get_kind(config(), "max_steps") == "duration"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """`runs(name, config, hash=None)` leaves what an earlier version, or with a hash this one, wrote of a run."""
    monkeypatch.chdir(tmp_path)

    def make(name, tree, digest=None):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(resolve(tree).to_yaml())
        (folder / "run.lock.json").write_text(json.dumps({"hash": digest} if digest else {"experiment": "quickstart"}))
        return folder.relative_to(tmp_path)

    return make


def test_a_run_that_an_earlier_version_named_is_continued(runs):
    old = runs("quickstart-0123abcd", config(max_steps=3))
    runs("quickstart-11111111", config(seed=1))
    runs("quickstart-mine", config())  # somebody's own name
    path, (note,) = api.default_run_dir("quickstart", config("remat"))
    assert path == old
    assert f"this version would name it runs/quickstart-{short_hash(config())}" in note
    assert api.default_run_dir("quickstart", config(seed=2)) == (
        old.parent / f"quickstart-{short_hash(config(seed=2))}",
        (),
    )


def test_once_continued_it_is_found_by_what_it_recorded(runs, monkeypatch):
    old = runs("quickstart-0123abcd", config(), digest=short_hash(config()))
    other = runs("quickstart-11111111", config(), digest="11111111")
    (other / "config.yaml").unlink()
    (old / "config.yaml").write_text("damaged: [")  # nobody reads it
    assert api.default_run_dir("quickstart", config())[0] == old


def test_the_directory_of_todays_name_goes_before_earlier_ones(runs):
    runs("quickstart-0123abcd", config())
    new = runs(f"quickstart-{short_hash(config())}", config())
    assert api.default_run_dir("quickstart", config()) == (new, ())


def test_several_earlier_runs_are_named(runs):
    runs("quickstart-0123abcd", config())
    runs("quickstart-4567cdef", patch(config(), {"evaluators": {}}))
    with pytest.raises(RequestError, match=r"quickstart-0123abcd, runs/quickstart-4567cdef\n    fix: .*--run-dir"):
        api.default_run_dir("quickstart", config())


def test_a_config_that_cannot_be_read_is_no_earlier_run(runs):
    folder = runs("quickstart-0123abcd", config())
    (folder / "config.yaml").write_text("resolved: true\ntype: gone\n")
    assert api.default_run_dir("quickstart", config())[0] != folder


def test_a_supervisor_may_have_been_in_the_directory_before_the_run(tmp_path):
    (tmp_path / "processes.jsonl").write_text("{}\n")
    (tmp_path / "launch").mkdir()
    assert not RunDir.check(tmp_path, None, None, allow_drift=False).resumes  # type: ignore[arg-type]
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RequestError, match=r"not a run.*\n.*got: thesis.tex"):
        RunDir.check(tmp_path, None, None, allow_drift=False)  # type: ignore[arg-type]


def test_a_run_of_a_config_is_named_after_its_experiment(runs, tmp_path):
    tree = patch(config(), {"seed": 3})
    assert tree.name == "quickstart"
    assert resolve(tree, set={"max_steps": 7}).title == "quickstart"
    (tmp_path / "config.yaml").write_text(resolve(tree).to_yaml())
    read = resolve(tmp_path / "config.yaml")
    assert (read.title, read.config.name, read.config == tree) == ("quickstart", "quickstart", True)
    assert resolve("quickstart", set={"name": "mine"}).title == "mine"
    assert short_hash(resolve("quickstart", set={"name": "mine"}).config) == short_hash(config())


def test_a_config_without_a_name_has_the_name_of_its_file(tmp_path):
    tree = patch(config(), {"name": ""})
    assert resolve(tree).title == "config"
    (tmp_path / "mine.yaml").write_text(resolve(tree).to_yaml())
    assert resolve(tmp_path / "mine.yaml").title == "mine"


@pytest.mark.parametrize("name", ["a/b", "..", " ", "a\x1bb"])
def test_a_name_that_cannot_be_a_folder_is_refused(name):
    with pytest.raises(ConfigError, match="name: "):
        resolve("quickstart", set={"name": name}).check()


def test_a_run_that_an_earlier_version_named_config_is_continued(runs):
    old = runs("config-0123abcd", config(seed=3))
    path, (note,) = api.default_run_dir("quickstart", config(seed=3))
    assert path == old
    assert f"this version would name it runs/quickstart-{short_hash(config(seed=3))}" in note
