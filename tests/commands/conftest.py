"""What several tests of the command line share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli import main


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line; gives (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """A file with the conversations of two users, who ask the same."""
    path = tmp_path / "talks.jsonl"
    turns = ("system", "You answer in one word."), ("user", "Which river runs through Rome?"), ("assistant", "Tiber.")
    messages = [{"role": role, "content": content} for role, content in (*turns, ("user", "And through Paris?"))]
    records = [{"id": name, "user": name, "messages": messages} for name in ("ann", "bob")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
