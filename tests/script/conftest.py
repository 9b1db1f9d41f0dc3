"""What tests of readers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.script.conversation_reader import ReadResult, read_conversations


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ReadResult]:
    """Read a JSONL file of these records; a text goes in as it is."""

    def read_file(*records: Any, name: str = "a.jsonl", **options: Any) -> ReadResult:
        lines = (each if isinstance(each, str) else json.dumps(each) for each in records)
        (tmp_path / name).write_text("".join(f"{each}\n" for each in lines))
        return read_conversations(tmp_path / name, **options)

    return read_file
