"""`radixcache store`: list, check and tidy what lies on disk; and `replay --disk`, which puts it there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from radixcache.stores.disk_store import DiskStore
from radixcache.stores.files import scan
from tests.stores.made import MODEL, chain, checkpoint

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with a block of 40 tokens, one of 20 behind it, and a checkpoint at their end."""
    path = tmp_path / "store"
    with DiskStore(path, budget_bytes=1 << 20, min_free_bytes=0) as store:
        first, second = chain(range(60), step=40)
        assert all(map(store.put, (first, second, checkpoint(second))))
    return path


def test_ls_adds_up_tokens_files_and_bytes_by_model_and_namespace(command: Command, folder: Path) -> None:
    code, output, _ = command("store", "ls", folder)
    assert code == 0
    row = next(line for line in output.splitlines() if MODEL.model in line)
    assert row.split()[:4] == [MODEL.model, MODEL.digest.hex()[:8], "60", "3"]


def test_verify_names_a_damaged_file_and_ends_with_1(command: Command, folder: Path) -> None:
    assert command("store", "verify", folder)[:2] == (0, "3 files checked, 0 damaged.\n")
    name = next(iter(scan(folder))).name
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    code, output, errors = command("store", "verify", folder)
    assert (code, output) == (1, "3 files checked, 1 damaged.\n")
    assert f"check failed: {name}: its checksum is wrong." in errors


def test_gc_removes_what_nothing_leads_to(command: Command, folder: Path) -> None:
    assert command("store", "gc", folder)[1].startswith("0 files removed")
    first = next(file for file in scan(folder) if file.head.start == 0)
    (folder / first.name).unlink()
    assert command("store", "gc", folder)[1].startswith("2 files removed")
    assert list(scan(folder)) == []


def test_gc_removes_a_model_or_what_was_not_used_for_long_with_what_follows_it(command: Command, folder: Path) -> None:
    assert command("store", "gc", folder, "--model", "another")[1].startswith("0 files removed")
    assert command("store", "gc", folder, "--unused-days", "1")[1].startswith("0 files removed")
    last = next(file for file in scan(folder) if file.head.start == 40 and file.head.kind == "block")
    os.utime(folder / last.name, (0, 0))
    assert command("store", "gc", folder, "--unused-days", "1")[1].startswith("2 files removed")
    assert command("store", "gc", folder, "--model", MODEL.model)[1].startswith("1 file removed")


def test_a_folder_that_is_no_store_is_one_line_and_exit_code_2(command: Command, tmp_path: Path) -> None:
    for action in ("ls", "verify", "gc"):
        code, output, errors = command("store", action, tmp_path)
        assert (code, output, errors.count("\n")) == (2, "", 1)
        assert errors.startswith(f"error: {tmp_path}: cannot be used as a store")


def test_a_replay_finds_what_the_one_before_it_left(command: Command, tmp_path: Path) -> None:
    arguments = ("replay", "--model", "tiny", "--cache", "radix", "--requests", "2", "--disk", tmp_path / "store")
    code, _, _ = command(*arguments)
    assert code == 0
    files = {file.name for file in scan(tmp_path / "store")}
    assert files
    again = tmp_path / "again.json"
    assert command(*arguments, "--json", again)[0] == 0
    rows = json.loads(again.read_text())["runs"][0]["rows"]
    assert [row["cached_tokens"] for row in rows] == [row["prompt_tokens"] - 1 for row in rows]
    assert {file.name for file in scan(tmp_path / "store")} == files
