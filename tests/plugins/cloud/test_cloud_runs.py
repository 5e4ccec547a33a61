"""Training with checkpoints in a bucket, through faults and kills. Every wrong bucket raises one clear error."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.checkpoint import ShardedCheckpointer, open_storage
from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.cli.main import cli
from axlearn_core.errors import CheckpointError, RequestError, WorkError
from axlearn_core.run import open_weights
from axlearn_plugins_cloud import gcs
from axlearn_plugins_cloud import object_storage as retries
from axlearn_plugins_cloud import s3 as client
from axlearn_plugins_runtime.job.holder import Holder
from support import api_runs

LIKE = {f"w{i}": jnp.zeros((64, 256), jnp.int32) for i in range(4)}


def state(step):
    return {name: jnp.full((64, 256), step, jnp.int32) for name in LIKE}


def checkpointer(uri, **fields):
    return ShardedCheckpointer.Config(uri=uri, **fields).build(directory="unused")


def train(run, uri, *, steps=4, **settings):
    chosen = {"checkpointer.every_steps": 2, "checkpointer.uri": uri, **settings}
    return api_runs.train(run, steps=steps, **chosen)


@pytest.fixture
def fast(monkeypatch):
    """Use short timeouts, so that the tests are fast."""
    monkeypatch.setattr(client, "READ_SECONDS", 0.4)
    monkeypatch.setattr(gcs, "TIMEOUT", (10.0, 0.4))
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 0.1)


@pytest.mark.fast_cases("memory")
@pytest.mark.parametrize("store", ["s3", "gs", "memory"])
def test_a_run_is_saved_listed_resumed_pruned_and_read(store, tmp_path, request, capsys):
    bucket = {"s3": lambda: request.getfixturevalue("s3")[0], "gs": lambda: request.getfixturevalue("gs")}.get(
        store, lambda: "memory://bucket"
    )()
    uri = f"{bucket}/runs/toy [1]"
    train(tmp_path / "whole", None, steps=8)
    train(tmp_path / "run", uri, steps=5, **{"checkpointer.keep_last": 2})
    assert Checkpoints(open_storage(uri), uri).steps() == [4, 5]
    train(tmp_path / "run", uri, steps=8, **{"checkpointer.keep_last": 2})
    assert api_runs.losses(tmp_path / "run") == api_runs.losses(tmp_path / "whole")
    files = [f.path for f in open_storage(uri).list()]
    assert {f.partition("/")[0] for f in files} == {"6", "8"}  # pruned, and not in use any more
    for place in (uri, str(tmp_path / "run")):
        listed = CliRunner().invoke(cli, ["checkpoint", "list", place, "--json"])
        assert [row["step"] for row in json.loads(listed.stdout)] == [6, 8], listed.output
        assert all(row["state"] == "complete" for row in json.loads(listed.stdout))
        weights = open_weights(place)
        local = open_weights(tmp_path / "whole")
        for path, value in weights.read().items():
            assert (value == local.read(path)[path]).all()
    verified = CliRunner().invoke(cli, ["checkpoint", "inspect", uri, "--verify"])
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_two_trainers_of_one_bucket(s3, tmp_path):
    uri = f"{s3[0]}/run"
    holders = Holder(open_storage(uri), uri, "id")
    with pytest.raises(CheckpointError, match=rf"{uri} is in use by another trainer: process {os.getpid()} on "):
        train(tmp_path / "run", uri)
    assert not (tmp_path / "run").exists()
    holders.release()
    train(tmp_path / "run", uri, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "faulty_gs"])
def test_every_save_is_complete_or_absent_through_faults(store, fast, request):
    """Set `AXLEARN_SAVES=50` to test more saves."""
    count = int(os.environ.get("AXLEARN_SAVES", "15"))
    bucket, faults = request.getfixturevalue(store)
    uri = f"{bucket}/run"
    faults.failing, faults.hanging, faults.seconds = 0.2, 0.1, 1.0
    writer, records, ended = checkpointer(uri, keep_last=None, max_failed_saves=100), [], threading.Event()

    def read():  # a reader sees whole checkpoints only, at any moment
        reader = checkpointer(uri)
        while not ended.is_set():
            if (step := reader.latest_step()) is not None:
                got, _ = reader.restore(step, LIKE)
                assert all((x == step).all() for x in got.values())
                records.append(step)

    errors = []
    thread = threading.Thread(target=lambda: errors.append(catch(read)))
    thread.start()
    saved = [step for step in range(1, count + 1) if writer.save(step, state(step))]
    try:
        writer.wait()
    finally:
        ended.set()
        thread.join()
        faults.failing = faults.hanging = 0.0
    assert errors == [None]
    assert faults.counts["late"] > 5
    assert faults.counts["503"] > 20
    assert records == sorted(records)
    assert len(set(records)) > 3
    steps = writer.steps()
    print(
        f"{store}: {len(steps)} of {count} saves complete, {len(records)} restores of a reader, faults {dict(faults.counts)}"
    )
    assert set(steps) <= set(saved)
    assert len(steps) >= count - 1
    for step in steps:
        writer.place.verify(step)
        got, _ = writer.restore(step, LIKE)
        assert all((x == step).all() for x in got.values())
    writer.close()


def catch(call):
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.slow
def test_a_reader_during_a_save_sees_the_older_one(s3):
    uri, faults = f"{s3[0]}/run", s3[1]
    writer, reader = checkpointer(uri), checkpointer(uri)
    writer.save(1, state(1))
    writer.wait()
    records = []

    def observe(environ):
        if (
            environ["REQUEST_METHOD"] == "PUT"
            and "/2/" in environ["PATH_INFO"]
            and threading.current_thread() not in busy
        ):
            busy.add(threading.current_thread())
            records.append((environ["PATH_INFO"].rpartition("/2/")[2], reader.steps()))
            got, _ = reader.restore(1, LIKE)
            assert all((x == 1).all() for x in got.values())
            busy.discard(threading.current_thread())

    busy = set()
    faults.observe = observe
    writer.save(2, state(2))
    writer.wait()
    faults.observe = None
    assert len(records) >= 5
    assert {tuple(steps) for _, steps in records} == {(1,)}
    assert records[-1][0] == "manifest.json"
    assert reader.steps() == [1, 2]
    writer.close()
    reader.close()


@pytest.mark.parametrize("store", ["s3", "faulty_gs"])
def test_a_store_that_goes_away_loses_nothing(store, fast, monkeypatch, request):
    monkeypatch.setattr(retries, "ATTEMPTS", 3)
    bucket, faults = request.getfixturevalue(store)
    uri = f"{bucket}/run"
    one = checkpointer(uri, max_failed_saves=0)
    one.save(1, state(1))
    one.wait()
    faults.failing = 1.0
    with pytest.raises(WorkError, match=r"step 2 could not be written to (s3|gs)://[^$]*3 attempts"):
        one.save(2, state(2))
    faults.failing = 0.0
    assert one.steps() == [1]
    assert one.save(3, state(3))
    one.wait()
    assert one.steps() == [1, 3]
    one.close()


def test_foreign_files_next_to_checkpoints_stay(s3):
    uri = f"{s3[0]}/run"
    storage = open_storage(uri)
    for path in ("2024/notes.txt", "5/mine.txt", "notes"):
        storage.write(path, [b"mine"])
    one = checkpointer(uri, keep_last=1, max_failed_saves=0)
    one.run = "ours"
    for step in (1, 2, 3):
        one.save(step, state(step))
    one.wait()
    with pytest.raises(WorkError, match=r"5 contains files that do not belong to this run, such as 5/mine.txt"):
        one.save(5, state(5))
    assert one.steps() == [3]
    assert {f.path for f in storage.list() if not f.path.startswith("3/")} == {"2024/notes.txt", "5/mine.txt", "notes"}
    one.close()


WRITER = """
import sys, jax.numpy as jnp
from axlearn_core.checkpoint import ShardedCheckpointer
one = ShardedCheckpointer.Config(keep_last=2, uri=sys.argv[1]).build(directory="unused")
one.run = "ours"
first = (one.latest_step() or 0) + 1
print("ready", flush=True)
for step in range(first, first + 10_000):
    one.save(step, {f"w{i}": jnp.full((64, 256), step, jnp.int32) for i in range(4)})
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_saves(s3, tmp_path):
    uri, cut_off, newest = f"{s3[0]}/run", 0, 0
    reader = checkpointer(uri)

    def unfinished():
        folders = {f.path.partition("/")[0] for f in reader.place.storage.list()}
        return folders - {str(s) for s in reader.steps()}

    for kill in range(6):
        leftovers = unfinished()
        env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, uri], stdout=subprocess.PIPE, text=True, env=env
        ) as process:
            assert process.stdout.readline() == "ready\n"
            while process.poll() is None and not unfinished() - leftovers:
                time.sleep(0.005)
            time.sleep(0.01 * kill)
            process.send_signal(signal.SIGKILL)
        cut_off += bool(unfinished())
        steps = reader.steps()
        for step in steps:
            got, _ = reader.restore(step, LIKE)
            assert all((x == step).all() for x in got.values())
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert cut_off, "no save was interrupted, so the test proves nothing"
    again = checkpointer(uri, keep_last=2)
    again.run = "ours"
    again.save(newest + 1, state(newest + 1))
    again.close()
    assert {f.path.partition("/")[0] for f in reader.place.storage.list()} == {str(s) for s in reader.steps()}


def refused(arguments, *expected):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2, result.output
    for text in expected:
        assert text in result.stderr, result.stderr


@pytest.mark.fast_cases(
    "environment4-s3://-expected4",
    "environment6-s3://bucket/../run-expected6",
    "environment7-simplecache::s3://bucket/run-expected7",
)
@pytest.mark.parametrize(
    ("environment", "uri", "expected"),
    [
        ({}, "s3://no-such-bucket-here/run", ("NoSuchBucket", "create the bucket, or correct its name")),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, None, ("no credentials for S3", "AWS_PROFILE")),
        ({"AWS_PROFILE": "nobody"}, None, ("nobody", "an existing profile")),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, None, ("attempts", "the endpoint wrong")),
        ({}, "s3://", ("names no bucket", "SCHEME://BUCKET/PATH")),
        ({}, "s3://user:secret@host/run", ("has credentials", "***@host")),
        ({}, "s3://bucket/../run", ("`..` part",)),
        ({}, "simplecache::s3://bucket/run", ("chains file systems",)),
        ({}, "ftp://bucket/run", ("the scheme 'ftp' is unknown", "cloud")),
    ],
)
def test_wrong_buckets_are_refused_before_training(s3, fast, monkeypatch, tmp_path, environment, uri, expected):
    monkeypatch.setattr(retries, "ATTEMPTS", 3)
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    run = tmp_path / "run"
    refused(
        ["train", "quickstart", "--run-dir", str(run), "--set", f"checkpointer.uri={uri or s3[0] + '/run'}"], *expected
    )
    assert not run.exists()


def test_a_region_or_right_that_lacks_is_named(s3, monkeypatch):
    storage = open_storage(f"{s3[0]}/run")
    for code, status, fix in (
        ("AccessDenied", 403, "may list, read and write"),
        ("PermanentRedirect", 301, "AWS_REGION"),
    ):
        error = client.errors.ClientError(
            {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}},
            "ListObjectsV2",
        )

        def fail(error=error, **fields):
            raise error

        monkeypatch.setattr(storage.objects.client, "list_objects_v2", fail)
        with pytest.raises(
            ax.errors.StorageError if hasattr(ax, "errors") else WorkError, match=rf"{code}: said[^$]*{fix}"
        ):
            storage.list()


def test_credentials_come_from_the_usual_chain(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (tmp_path / "aws-credentials").write_text("[team]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "aws-config").write_text("[profile team]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    storage = open_storage(f"{s3[0]}/run")
    storage.write("a", [b"1"])
    assert storage.read("a") == b"1"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("http://user:secret@host/run", "no plugin supports checkpoints at 'http://***@host/run'"),
        ("gcs://bucket/run", "the scheme 'gcs' is unknown"),
        ("simplecache::s3://bucket/run", "chains file systems of fsspec"),
        ("s3://key:secret@host/run", "has credentials or a port instead of a bucket"),
    ],
)
def test_a_check_of_the_config_refuses_what_nothing_stores(uri, expected):
    for words in (["config", "check"], ["launch", "--on", "local", "--dry-run"]):
        result = CliRunner().invoke(cli, [*words, "quickstart", "--steps", "3", "--set", f"checkpointer.uri={uri}"])
        assert result.exit_code == 2, words
        text = result.output + str(result.exception)
        assert "checkpointer.uri: " in text
        assert expected in text
        assert "secret" not in text


def test_chains_are_refused(s3):
    with pytest.raises(RequestError, match="chains file systems"):
        open_storage("simplecache::s3://bucket/run")
