"""Input files that cannot be read: each reader refuses them in one line, with the file and a line of it."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.files import InputError
from runner.script.conversation_reader import read_conversations
from runner.traces.trace_reader import read_trace

CHAT = json.dumps([{"role": "user", "content": "Hello"}]).encode() + b"\n"
ROW = b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n'
READERS = [pytest.param(read_conversations, CHAT, id="conversations"), pytest.param(read_trace, ROW, id="trace")]
Reader = Callable[..., Any]


def damaged(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def packed(record: bytes) -> bytes:
    """200 records that do not compress, in one member of gzip."""
    return gzip.compress(record * 200, compresslevel=0)


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda record: packed(record)[:-2000], r":1\d\d: cannot be read \(Compressed file ended"),
    "without an end": (lambda record: gzip.compress(record * 3)[:-8], r":4: cannot be read \(Compressed file ended"),
    "with a header alone": (lambda record: gzip.compress(record)[:12], r":1: cannot be read \(Compressed file ended"),
    "with a wrong sum": (lambda record: damaged(gzip.compress(record * 3), -6), r":4: cannot be read \(CRC check"),
    "damaged": (lambda record: damaged(gzip.compress(record * 3), 12), r":\d: cannot be read \("),
    "with junk behind it": (lambda record: gzip.compress(record) + b"junk", r":2: cannot be read \(Not a gzipped file"),
    "of an unknown method": (lambda record: b"\x1f\x8b\x07" + record, r":1: cannot be read \(Unknown compression"),
    "of NULs": (lambda record: bytes(100), r":1: not JSON"),
    "with NULs": (lambda record: record + bytes(9) + b"\n" + record, r":2: not JSON \(Expecting value at column 1\)"),
    "of UTF-16": (lambda record: record.decode().encode("utf-16"), r":1: (byte 0xff at offset 0|not JSON)"),
    "of UTF-16 without a mark": (lambda record: record.decode().encode("utf-16-le"), r":1: not JSON"),
    "of Latin-1": (lambda record: record + b'{"a": "\xe9"}\n', r":2: byte 0xe9 at offset \d+ is not UTF-8"),
    "that breaks off": (lambda record: record + record[:-3], r":2: not JSON \(Expecting"),
    "empty": (lambda record: b"", r": the file is empty"),
    "blank": (lambda record: b"\xef\xbb\xbf \r\n", r": the file is empty"),
    "that unpacks to nothing": (lambda record: gzip.compress(b""), r": the file is empty"),
}  # fmt: skip


@pytest.mark.parametrize(("read", "record"), READERS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_named_with_its_line(
    name: str, read: Reader, record: bytes, tmp_path: Path
) -> None:
    content_of, wanted = FILES[name]
    path = tmp_path / "input.jsonl.gz"
    path.write_bytes(content_of(record))
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}{wanted}") as raised:
        read(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("read", "record"), READERS)
def test_what_the_system_refuses_is_named_with_the_reason(
    read: Reader, record: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, loop, below = tmp_path / "a.jsonl", tmp_path / "loop.jsonl", tmp_path / "below"
    file.write_bytes(record)
    loop.symlink_to(loop)
    for path, reason in (
        (file / "b", "Not a directory"),
        (tmp_path / "none", "No such file or directory"),
        (loop, "Too many levels of symbolic links"),
        (tmp_path / ("x" * 5000), "File name too long"),
        (tmp_path / "a\0b", "embedded null byte"),
    ):
        with pytest.raises(InputError, match=rf"^{re.escape(str(path))}(:1)?: cannot be read \({reason}\); wanted"):
            read(path)
    below.mkdir()
    (below / "up").symlink_to(tmp_path)
    read(tmp_path)

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        if str(path) == str(refused):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *_, **__)

    # Root may read everything, so the system's answer is made up.
    refused, real = below, os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=rf"^{re.escape(str(below))}: cannot be read \(Permission denied\); wanted"):
        read(tmp_path)
    refused, real = file, Path.open
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=rf"^{re.escape(str(file))}: cannot be read \(Permission denied\); wanted"):
        read(file)
