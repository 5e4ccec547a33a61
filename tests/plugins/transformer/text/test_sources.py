"""Files of every format, their errors, splits, mixtures and the standard library."""

import builtins
import json
import os
import pickle
import sys
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_transformer.text import Files, Mixture, StandardLibrary
from axlearn_plugins_transformer.text.data_files import DataFile, list_files
from axlearn_plugins_transformer.text.records import FileRecords
from axlearn_plugins_transformer.text.sources import describe, is_held_out, standard_library_files


def texts(source, split="train"):
    return [d.text for p in source.parts(split) for i in range(len(p.records)) for d in p.records[i]]


def files(*paths, **settings):
    return Files.Config(paths=tuple(map(str, paths)), **settings).build()


def write_parquet(path, rows, **kwargs):
    pyarrow.parquet.write_table(pyarrow.table(rows), path, **kwargs)


def test_the_three_formats_give_their_documents_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("line one\nline two\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x\\ny"}\n\n{"text": "é", "n": 1}')
    write_parquet(tmp_path / "c.parquet", {"text": ["p", "q", None, "r"], "n": [1, 2, 3, 4]}, row_group_size=3)
    source = files(tmp_path / "*")
    assert texts(source) == ["line one\nline two\n", "x\ny", "é", "p", "q", "r"]
    assert [source.parts("train")[0].records.name(i) for i in (2, 3)] == [
        f"{tmp_path / 'c.parquet'}",
        f"{tmp_path / 'c.parquet'}#1",
    ]


def test_globs_descend_sort_and_pass_over_empty_files(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("z.txt", "sub/a.txt", "sub/deep/b.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    assert texts(files(tmp_path / "**" / "*.txt", tmp_path / "z.txt")) == ["sub/a.txt", "sub/deep/b.txt", "z.txt"]
    (tmp_path / "odd[1].txt").write_text("brackets")
    assert texts(files(tmp_path / "odd[1].txt")) == ["brackets"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
@pytest.mark.parametrize(
    "text", ["one\ntwo\n\nthree three three\nfour", "no line ends at all: é漢字🎉" * 9, "\n\n\n", "é\n" * 20]
)
def test_chunks_of_text_join_to_the_file(tmp_path, text, size):
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    source = files(tmp_path / "t.txt", chunk_bytes=size)
    records = source.parts("train")[0].records
    documents = [d for i in range(len(records)) for d in records[i] if d.text]
    assert "".join(d.text for d in documents) == text
    assert [d.ends for d in documents] == [False] * (len(documents) - 1) + [True]
    assert (len(documents) > 1) == (size < len(text.encode()))


@pytest.mark.parametrize("size", [1, 5, 13, 64, 10_000])
def test_chunks_of_json_lines_keep_lines_whole(tmp_path, size):
    rows = [{"text": "x" * n} for n in (1, 40, 0, 3, 200, 2)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert texts(files(tmp_path / "t.jsonl", chunk_bytes=size)) == [r["text"] for r in rows]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "t.txt").write_bytes("\ufeffhello\ufeff".encode())
    assert texts(files(tmp_path / "t.txt")) == ["hello\ufeff"]


def bad(tmp_path: Path, name: str, content: bytes) -> Path:
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", b"", "is empty"),
        ("image.txt", b"\x89PNG\r\n\x1a\n\0\0", "is not UTF-8 text: byte 0x89 at offset 0"),
        ("zero.txt", b"abc\0def", "is binary: byte 0x00 at offset 3"),
        ("latin.jsonl", '{"text": "é"}'.encode("latin-1"), "is not UTF-8 text: byte 0xe9 at offset 10"),
        ("not.parquet", b"PAR1 and more that is not a footer", "is not a readable Parquet file"),
        ("bad.jsonl", b'{"text": "a"}\n{oops}\n', "the line at byte 14 is not JSON"),
        ("list.json", b'[{"text": "a"}]', "the line at byte 0 is a list"),
        ("field.jsonl", b'{"texts": "a"}\n', "did you mean: texts?"),
        ("number.jsonl", b'{"text": 3}\n', "has no text in the field 'text'"),
    ],
)
def test_bad_files_are_one_error_that_names_file_and_reason(tmp_path, name, content, reason):
    path = bad(tmp_path, name, content)
    with pytest.raises(InputError) as error:
        texts(files(path))
    assert name in str(error.value)
    assert reason in str(error.value)
    assert error.value.exit_code == 2


def test_binary_data_beyond_the_first_bytes_is_found_when_read(tmp_path):
    path = bad(tmp_path, "late.txt", b"fine\n" * 2000 + b"\xff\xfe")
    source = files(path)
    with pytest.raises(InputError, match=r"late\.txt is not UTF-8 text: byte 0xff at offset 10000"):
        texts(source)


def test_a_character_cut_by_the_first_look_is_no_error(tmp_path):
    (tmp_path / "t.txt").write_text("a" * 4095 + "é" * 10, encoding="utf-8")
    assert len(texts(files(tmp_path / "t.txt"))[0]) == 4105


def test_a_pipe_is_not_data(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(InputError, match=r"pipe\.txt' is not a regular file"):
        files(tmp_path / "pipe.txt")


def test_missing_files_hint_at_what_is_there(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(InputError, match=r"no data file matches .*corpsu\.txt'\n.*did you mean: .*corpus\.txt"):
        files(tmp_path / "corpsu.txt")
    with pytest.raises(InputError, match="no data file matches"):
        files(tmp_path / "*.md")
    with pytest.raises(InputError, match="does not exist"):
        files(tmp_path / "nowhere" / "x.txt")
    with pytest.raises(InputError, match="is a directory"):
        files(tmp_path)


def test_unreadable_files_say_why(tmp_path, monkeypatch):
    path = bad(tmp_path, "t.txt", b"text")
    real = builtins.open

    def refuse(file, *args, **kwargs):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(InputError, match=r"cannot read the data file .*t\.txt: Permission denied"):
        files(path)


def test_parquet_columns_are_checked(tmp_path):
    write_parquet(tmp_path / "t.parquet", {"content": ["a"]})
    with pytest.raises(InputError, match="no text in the field 'text'; its fields: content"):
        texts(files(tmp_path / "t.parquet"))
    assert texts(files(tmp_path / "t.parquet", text_field="content")) == ["a"]


def test_missing_extras_are_named(tmp_path, monkeypatch):
    write_parquet(tmp_path / "t.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"axlearn-plugins-transformer\[parquet\]"):
        texts(files(tmp_path / "t.parquet"))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match=r"axlearn-plugins-transformer\[remote\]"):
        files("memory://bucket/a.txt")


def test_remote_files_of_every_kind(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe("/bucket/a.txt", b"alpha\n")
    fs.pipe("/bucket/b.jsonl", b'{"text": "beta"}\n')
    write_parquet(tmp_path / "c.parquet", {"text": ["gamma"]})
    fs.pipe("/bucket/c.parquet", (tmp_path / "c.parquet").read_bytes())
    try:
        assert texts(files("memory://bucket/*")) == ["alpha\n", "beta", "gamma"]
        assert texts(files("memory://bucket/a.txt")) == ["alpha\n"]
        with pytest.raises(InputError, match=r"no data file matches 'memory://bucket/x\.txt'"):
            files("memory://bucket/x.txt")
        with pytest.raises(InputError, match="has the protocol 'nope', which is not allowed for data"):
            files("nope://bucket/x.txt")
    finally:
        fs.rm("/bucket", recursive=True)


def test_held_out_files_and_held_out_chunks(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"{name} {i}\n" for i in range(1000)))
    apart = files(tmp_path / "a.txt", validation_paths=str(tmp_path / "b.txt"))
    assert texts(apart, "validation")[0].startswith("b.txt 0")
    assert not files(tmp_path / "a.txt").parts("validation")
    share = files(tmp_path / "*.txt", validation_fraction=0.3, chunk_bytes=100)
    train, held_out = texts(share), texts(share, "validation")
    assert sorted("".join(train + held_out).splitlines()) == sorted(
        f"{n} {i}" for n in ("a.txt", "b.txt") for i in range(1000)
    )
    assert 0.2 < len(held_out) / len(train + held_out) < 0.4
    with pytest.raises(InputError, match="in both"):
        files(tmp_path / "a.txt", validation_paths=str(tmp_path / "a.txt"))


def test_config_problems():
    with pytest.raises(ConfigError, match="does not name data files"):
        check(Files.Config())
    with pytest.raises(ConfigError, match="validation_fraction"):
        check(Files.Config(paths="a", validation_paths="b", validation_fraction=0.1))
    one = Files.Config(paths="a")
    with pytest.raises(ConfigError, match="must have one weight per source"):
        check(Mixture.Config(sources={"a": one}, weights={"b": 1.0}))
    with pytest.raises(ConfigError, match=r"weights\.a: must be positive"):
        check(Mixture.Config(sources={"a": one}, weights={"a": -1.0}))


def test_mixtures_multiply_weights(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    leaf = {name: Files.Config(paths=str(tmp_path / f"{name}.txt")) for name in "abc"}
    inner = Mixture.Config(sources={"b": leaf["b"], "c": leaf["c"]}, weights={"b": 1.0, "c": 3.0})
    mixed = Mixture.Config(sources={"a": leaf["a"], "rest": inner}, weights={"a": 6.0, "rest": 2.0}).build()
    assert [p.weight for p in mixed.parts("train")] == pytest.approx([0.75, 0.0625, 0.1875])
    assert mixed.parts("validation") == ()


def test_the_standard_library_split_is_stable_and_disjoint():
    listed = standard_library_files()
    assert listed == standard_library_files()
    names = {f.name for f in listed}
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not any({"test", "tests", "site-packages", "encodings"} & set(n.split("/")) for n in names)
    source = StandardLibrary.Config().build()
    train, held_out = ({f.name for f in p.files} for s in ("train", "validation") for p in source.parts(s))
    assert train | held_out == names
    assert not train & held_out
    assert 0.02 < len(held_out) / len(names) < 0.09
    # These hashes define the split. If they change, earlier runs have another held-out set.
    assert [n for n in ("os.py", "ast.py", "traceback.py", "io.py", "re/_parser.py") if is_held_out(n, 0.05)] == [
        "traceback.py"
    ]
    assert all(f.path.endswith(".py") and Path(f.path).read_text("utf-8") is not None for f in listed[:50])


def test_facts_depend_on_names_sizes_and_splits_only(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa")
    (tmp_path / "b.txt").write_text("bb")
    path = str(tmp_path / "*.txt")
    first = describe(Files.Config(paths=path).build())
    assert (first["files"], first["bytes"]) == (2, 6)
    assert describe(Files.Config(paths=path).build()) == first
    split = describe(Files.Config(paths=path, validation_fraction=0.5).build())
    assert (split["files"], split["bytes"]) == (2, 6)
    (tmp_path / "b.txt").write_text("bbb")
    assert describe(Files.Config(paths=path).build())["hash"] != first["hash"]


def test_records_and_configs_pickle(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa")
    cfg = Files.Config(paths=str(tmp_path / "a.txt"))
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    records = pickle.loads(pickle.dumps(cfg.build().parts("train")[0].records))
    assert records[0][0].text == "aaaa"


def test_chunk_size_follows_the_amount_of_data():
    def size(total):
        return FileRecords.from_files([DataFile("x.txt", "x.txt", total)]).chunk_bytes

    assert [size(100), size(64 << 15), size(1 << 40)] == [1 << 14, 1 << 15, 1 << 20]
    assert list_files(()) == ()
