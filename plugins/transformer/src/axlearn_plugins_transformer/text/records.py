"""Records: pieces of data files that Grain reads in random order.

Each record contains a few documents.

Text and JSONL files are split into byte chunks at line ends, Parquet files into row groups. A huge file is therefore
shuffled and sharded like many small files. Building a pipeline only requires file names and sizes.
"""

import codecs
import json
import os
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol, runtime_checkable

import attrs
import numpy as np

from axlearn_core.errors import InputError, nearest
from axlearn_plugins_transformer.text.data_files import is_url, open_data, open_file
from axlearn_plugins_transformer.text.fingerprint import DataFile


@attrs.frozen
class Document:
    """A piece of text.

    Attributes:
        text: The text.
        ends: Whether the document ends here, so that an end-of-document token follows.
    """

    text: str
    ends: bool = True


class Records(Protocol):
    """Random access to records, as Grain requires.

    Instances are pickled into worker processes.

    Records that know their size also have `num_bytes`, the size in bytes before compression. Small data is read
    differently.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Sequence[Document]:
        """Return the documents of a record in order. The sequence may be empty."""
        ...

    def name(self, index: int) -> str:
        """Return the location of a record, for use in messages."""
        ...


@runtime_checkable
class HasRecordBytes(Protocol):
    """Records that know their total size.

    Attributes:
        num_bytes: Size of all records, before compression.
    """

    num_bytes: int


@runtime_checkable
class HasRecordSizes(Protocol):
    """Records that know the size of each record.

    Attributes:
        sizes: Size of each record, in bytes.
    """

    sizes: Sequence[int]


@runtime_checkable
class LocatesText(Protocol):
    """Records that know the positions of their documents in the files."""

    def locate(self, index: int, document: Document, skipped: int) -> str:
        """Return the file that contains a document, and its position in the file.

        Args:
            index: Index of the record.
            document: A document of the record.
            skipped: Number of bytes of its text before the position to locate.
        """
        ...


LINE_BYTES = 1 << 24
"""Default limit on a JSONL line, in bytes. Tokenizing a line takes about a hundred times its size in memory."""

SCANNED_BYTES = 1 << 28

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}


def find_format(path: str) -> str:
    """Return the format of a file by its suffix. The default is text."""
    return FORMATS.get(os.path.splitext(path)[1].lower(), "text")


@attrs.frozen(eq=False)
class FileRecords:
    """The records of text, JSONL and Parquet files.

    Record `i` is part `parts[i]` of file `owners[i]`.

    Attributes:
        files: The files.
        formats: Format of each file.
        text_field: Field of JSONL and Parquet rows that contains the text.
        chunk_bytes: Size of a chunk.
        owners: Index of each record's file.
        parts: Index of each record within its file.
        line_bytes: Limit on a JSONL line, in bytes.
        num_bytes: Size of all records, before compression.
    """

    files: tuple[DataFile, ...]
    formats: tuple[str, ...]
    text_field: str
    chunk_bytes: int
    owners: np.ndarray
    parts: np.ndarray
    line_bytes: int = LINE_BYTES
    num_bytes: int = 0

    @classmethod
    def from_files(
        cls,
        files: Sequence[DataFile],
        *,
        format: str = "auto",
        text_field: str = "text",
        chunk_bytes: int | None = None,
        line_bytes: int = LINE_BYTES,
        keep: Callable[[DataFile, int], bool] = lambda file, part: True,
    ) -> "FileRecords":
        """Return the records of `files` for which `keep(file, part)` is True."""
        formats = tuple(find_format(f.path) if format == "auto" else format for f in files)
        # Scale the chunks with the amount of data, so that small data has enough chunks to hold some out.
        size = chunk_bytes or min(1 << 20, max(1 << 14, sum(f.size for f in files) // 64))
        keys: list[tuple[int, int]] = []
        num_bytes = 0
        for i, (file, kind) in enumerate(zip(files, formats, strict=True)):
            sizes = _row_group_sizes(file) if kind == "parquet" else _chunk_sizes(file.size, size)
            numbers = [part for part in range(len(sizes)) if keep(file, part)]
            keys += [(i, part) for part in numbers]
            num_bytes += sum(sizes[part] for part in numbers)
        owners, parts = np.array(keys, np.int32).reshape(-1, 2).T.copy()
        return cls(tuple(files), formats, text_field, size, owners, parts, line_bytes, num_bytes)

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: Any) -> Sequence[Document]:
        owner, part = int(self.owners[index]), int(self.parts[index])
        file, kind = self.files[owner], self.formats[owner]
        if kind == "parquet":
            return self._row_group(file, part)
        start, raw = self._read_chunk(file, part, kind)
        if kind == "jsonl":
            return self._json_lines(file, start, raw)
        return (Document(decode(file, start, raw), ends=start + len(raw) >= file.size),)

    def _read_chunk(self, file: DataFile, part: int, kind: str) -> tuple[int, bytes]:
        """Return the offset and the bytes of a chunk, which begins and ends with a line if possible."""
        with open_data(file) as handle:
            ends = (part * self.chunk_bytes, (part + 1) * self.chunk_bytes)
            limit = self.line_bytes if kind == "jsonl" else None
            start, stop = (_line_start(handle, offset, file, limit) for offset in ends)
            handle.seek(start)
            return start, handle.read(stop - start)

    def name(self, index: int) -> str:
        """Return the file name, with `#part` if the file has several parts."""
        file, part = self.files[int(self.owners[index])], int(self.parts[index])
        return f"{file.name}#{part}" if part or file.size > self.chunk_bytes else file.name

    def locate(self, index: int, document: Document, skipped: int) -> str:
        """Return the file and the line, the row, or the byte of a document; see `LocatesText`."""
        owner, part = int(self.owners[index]), int(self.parts[index])
        file, kind = self.files[owner], self.formats[owner]
        if kind == "parquet":
            texts = [d.text for d in self._row_group(file, part)]
            row = texts.index(document.text) if document.text in texts else 0
            return f"{file.name}: row {row} of row group {part}"
        start, raw = self._read_chunk(file, part, kind)
        if kind == "text":
            begin = raw.find(document.text.encode())
            return f"{file.name}: byte {start + max(begin, 0) + skipped}"
        lines = raw.splitlines(keepends=True)
        matching = [
            i for i, line in enumerate(lines) if line.strip() and document.text in json.loads(line)[self.text_field]
        ]
        return f"{file.name}: the line at byte {start + sum(map(len, lines[: matching[0] if matching else 0]))}"

    def with_lines(self) -> "FileRecords":
        """Drop the chunks of JSONL files in which no line begins.

        They do not contain a document. Data of more than 256 MiB is not scanned. It has so many records that shards
        seldom read the same one.
        """
        if self.num_bytes > SCANNED_BYTES or "jsonl" not in self.formats:
            return self
        keep = np.ones(len(self), bool)
        for i, (file, kind) in enumerate(zip(self.files, self.formats, strict=True)):
            if kind == "jsonl":
                keep[self.owners == i] = self._have_lines(file, self.parts[self.owners == i])
        return attrs.evolve(self, owners=self.owners[keep], parts=self.parts[keep])

    def _have_lines(self, file: DataFile, parts: np.ndarray) -> list[bool]:
        with open_data(file) as handle:
            start, answers = 0, []
            for part in parts.tolist():
                ends = []
                for offset in (part * self.chunk_bytes, (part + 1) * self.chunk_bytes):
                    if offset > start:  # do not read to the end of the same line again
                        start = _line_start(handle, offset, file, self.line_bytes)
                    ends.append(start)
                answers.append(ends[0] < ends[1])
        return answers

    def _json_lines(self, file: DataFile, start: int, raw: bytes) -> list[Document]:
        documents = []
        for line in raw.splitlines(keepends=True):
            if line.strip():
                location = f"{file.name}: the line at byte {start}"
                if len(line) > self.line_bytes:
                    raise long_line(location, self.line_bytes)
                try:
                    row = json.loads(decode(file, start, line))
                except json.JSONDecodeError as error:
                    raise InputError(
                        f"{location} is not JSON: {error.msg}\n    expected: one object per line"
                    ) from None
                except ValueError as error:  # integers with thousands of digits
                    raise InputError(f"{location} has a number that is too long: {error}") from None
                except RecursionError:
                    raise InputError(f"{location} is nested too deeply\n    expected: one object per line") from None
                documents.append(Document(self._text(row, location)))
            start += len(line)
        return documents

    def _row_group(self, file: DataFile, part: int) -> list[Document]:
        parquet, field = _open_parquet(file), self.text_field
        names = parquet.schema_arrow.names
        if field not in names:
            self._text(dict.fromkeys(names), file.name)
        column = parquet.read_row_group(part, columns=[field]).column(0)
        if (longest := _longest_text(column)) > self.line_bytes:
            raise InputError(
                f"{file.name}: a text of row group {part} has {longest:,} bytes\n    expected: at most {self.line_bytes:,}\n"
                "    fix: split the document, or raise max_line_bytes of the source"
            )
        return [Document(self._text({field: v}, file.name)) for v in column.to_pylist() if v is not None]

    def _text(self, row: Any, location: str) -> str:
        if isinstance(row, dict) and isinstance(row.get(self.text_field), str):
            return row[self.text_field]
        if not isinstance(row, dict):
            raise InputError(f"{location} is a {type(row).__name__}\n    expected: one JSON object per line")
        if self.text_field in row:
            raise InputError(
                f"{location} has no text in the field {self.text_field!r}\n"
                f"    got: {type(row[self.text_field]).__name__}\n    expected: a string"
            )
        close = nearest(self.text_field, row)
        raise InputError(
            f"{location} has no text in the field {self.text_field!r}; its fields: {', '.join(row)}"
            + (f"\n    did you mean: {', '.join(close)}?" if close else "")
            + "\n    fix: set text_field of the source to the field with the text"
        )


def _longest_text(column: Any) -> int:
    """Return the size in bytes of the longest text in an Arrow column.

    Returns 0 for other types.
    """
    import pyarrow.types
    from pyarrow.compute import call_function

    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return 0
    return call_function("max", [call_function("binary_length", [column])]).as_py() or 0


def _chunk_sizes(size: int, chunk: int) -> Sequence[int]:
    return [min(chunk, size - start) for start in range(0, size, chunk)]


def _row_group_sizes(file: DataFile) -> Sequence[int]:
    metadata = _open_parquet(file).metadata
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def _open_parquet(file: DataFile) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"cannot read {file.name}: Parquet files require pyarrow, which is not installed\n"
            "    fix: pip install 'axlearn-plugins-transformer[parquet]'"
        ) from None
    with open_data(file):  # checks that the file has not changed since it was listed
        pass
    try:
        return pyarrow.parquet.ParquetFile(open_file(file.path) if is_url(file.path) else file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file.name} is not a readable Parquet file: {error}") from None


def check_head(file: DataFile) -> None:
    """Raise InputError if the beginning of a file that should be text is binary."""
    with open_data(file) as handle:
        head = handle.read(4096)
    decode(file, 0, head, final=len(head) == file.size)


def decode(file: DataFile, offset: int, raw: bytes, final: bool = True) -> str:
    """Decode bytes that begin at `offset` in a file.

    Raise InputError if they are binary or not UTF-8.
    """
    bad, reason = raw.find(b"\0"), "is binary"
    try:
        text = codecs.utf_8_decode(raw, "strict", final)[0]
    except UnicodeDecodeError as error:
        bad, reason, text = error.start, "is not UTF-8 text", ""
    if bad >= 0:
        raise InputError(
            f"the data file {file.name} {reason}: byte 0x{raw[bad]:02x} at offset {offset + bad}\n"
            "    expected: text, JSONL or Parquet files"
        )
    return text.removeprefix("\ufeff") if offset == 0 else text


def long_line(location: str, limit: int) -> InputError:
    """Return the error for a line that exceeds the limit."""
    return InputError(
        f"{location} is longer than {limit:,} bytes\n    expected: one object per line\n"
        "    fix: split the document, or raise max_line_bytes of the source"
    )


def _line_start(handle: IO[bytes], offset: int, file: DataFile, line_bytes: int | None) -> int:
    """Return the first line start at or after `offset`.

    In text without nearby line ends, return the first character start.

    `line_bytes` is the limit on a line, or None for text.
    """
    size, lines_only = file.size, line_bytes is not None
    if offset <= 0 or offset >= size:
        return min(max(offset, 0), size)
    position = offset - 1
    handle.seek(position)
    while block := handle.read(1 << 16):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        if not lines_only:
            near = block[1:5]
            return offset + next((i for i, byte in enumerate(near) if byte & 0xC0 != 0x80), len(near))
        position += len(block)
        if line_bytes is not None and position - offset > line_bytes:
            raise long_line(f"{file.name}: the line around byte {offset}", line_bytes)
    return size
