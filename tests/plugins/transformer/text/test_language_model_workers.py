"""Workers and threads of the stream: equal batches, original errors, and shutdown."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text import (
    ByteTokenizer,
    Files,
    LanguageModelInput,
)
from support.text_inputs import config, equal, take, through_json


@pytest.mark.fast_cases("small-1")
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_worker_processes_give_the_same_stream_and_end(corpus, workers, either_size):
    cfg, many = config(corpus), config(corpus, workers=workers)
    one, other = cfg.build(seed=3).train(), many.build(seed=3).train()
    try:
        assert equal(take(one, 9), take(other, 9))
        state = through_json(other.get_state())
        assert state == through_json(one.get_state())
        assert other.describe_position().facts() == one.describe_position().facts()
        expected = take(one, 20)
        other.set_state(state)
        assert equal(take(other, 20), expected)
        one.set_state(state)
        assert equal(take(one, 20), expected)
        assert len(multiprocessing.active_children()) == workers
    finally:
        one.close()
        other.close()
    assert not multiprocessing.active_children()
    with pytest.raises(StopIteration):
        next(other)


@pytest.mark.slow
def test_an_error_in_a_worker_arrives_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 5000 + b"\xff")
    source = Files.Config(paths=str(tmp_path / "a.txt"), chunk_bytes=1000)
    cfg = LanguageModelInput.Config(
        batch_size=1, sequence_length=500, source=source, tokenizer=ByteTokenizer.Config(), shuffle=False, workers=1
    )
    iterator = cfg.build().train()
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: byte 0xff at offset 25000"):
        take(iterator, 60)
    iterator.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_workers_end_with_a_killed_parent_and_take_no_device(corpus):
    script = textwrap.dedent(f"""
        import multiprocessing, time
        from axlearn_plugins_transformer.text import *
        if __name__ == "__main__":
            source = Files.Config(paths={str(corpus / "*.jsonl")!r})
            cfg = LanguageModelInput.Config(batch_size=2, sequence_length=8, source=source,
                                            tokenizer=ByteTokenizer.Config(), workers=2)
            stream = cfg.build().train()
            next(stream)
            print(*[p.pid for p in multiprocessing.active_children()], flush=True)
            time.sleep(600)
    """)
    path = corpus / "parent.py"
    path.write_text(script)
    parent = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(p) for p in parent.stdout.readline().split()]
    assert len(workers) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(map(alive, workers)):
        time.sleep(0.2)
    assert not any(map(alive, workers))


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


ORPHAN = """
    import multiprocessing
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    def work(folder):
        from axlearn_plugins_transformer.text.pipeline import start_worker

        os.kill(os.getppid(), signal.SIGKILL)
        while os.getppid() == int(Path(folder, "parent").read_text()):
            time.sleep(0.01)
        start_worker(str(Path(folder, "worker")), 0, 1)
        time.sleep(600)

    if __name__ == "__main__":
        Path(sys.argv[1], "parent").write_text(str(os.getpid()))
        multiprocessing.get_context("spawn").Process(target=work, args=sys.argv[1:]).start()
        time.sleep(600)
"""


@pytest.mark.slow
def test_a_worker_ends_if_its_parent_was_killed_while_it_started(tmp_path):
    script, pid_file = tmp_path / "orphan.py", tmp_path / "worker"
    script.write_text(textwrap.dedent(ORPHAN))
    # The worker keeps the pipe open until it ends.
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE) as process:
        process.wait(60)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
            raise
    assert pid_file.exists()


def test_threads_end_when_a_stream_is_closed_dropped_or_exhausted(corpus):
    def grain_threads():
        return [t for t in threading.enumerate() if t.name.startswith("grain")]

    source = config(corpus).build()
    closed, dropped, exhausted = source.train(), source.train(), source.evaluation()
    next(closed)
    next(dropped)
    list(exhausted)
    assert grain_threads()
    closed.close()
    closed.close()
    del dropped
    gc.collect()
    assert not grain_threads()
    assert list(exhausted) == []


def test_records_without_text_are_passed_over_and_no_shard_waits_forever(tmp_path, as_large):
    (tmp_path / "a.jsonl").write_text("\n" * 500 + '{"text": ""}\n' * 20 + '{"text": "only this"}\n' + "\n" * 500)
    cfg = LanguageModelInput.Config(
        batch_size=4,
        sequence_length=10,
        source=Files.Config(paths=str(tmp_path / "a.jsonl"), chunk_bytes=50),
        tokenizer=ByteTokenizer.Config(),
    )
    iterator = cfg.build().train()
    batch = next(iterator)
    assert [bytes(row.tolist()[:9]) for row in batch["targets"]] == [b"only this"] * 4
    iterator.close()
    unshuffled = LanguageModelInput.Config(
        batch_size=13,  # equal to the number of records, so most shards always read a record without text
        sequence_length=10,
        source=Files.Config(paths=str(tmp_path / "a.jsonl"), chunk_bytes=-(-1281 // 13)),
        tokenizer=ByteTokenizer.Config(),
        shuffle=False,
    )
    source = unshuffled.build()
    assert len(source.source.parts("train")[0].records) == 13
    with pytest.raises(InputError, match=r"a data shard finds no text in .*a\.jsonl"):
        next(source.train())
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n' * 20)
    with pytest.raises(InputError, match=r"b\.jsonl and the records after it do not contain text"):
        LanguageModelInput.Config(
            batch_size=4,
            sequence_length=10,
            source=Files.Config(paths=str(tmp_path / "b.jsonl")),
            tokenizer=ByteTokenizer.Config(),
        ).build().train()
