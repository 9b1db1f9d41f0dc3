"""A replay that was killed, and the one after it: what the first had served, the second finds on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.commands.inputs import ConversationOptions, read_chosen
from runner.models.load import load_model
from runner.replay import ReplayOptions, caches
from runner.replay.replayer import Replay
from runner.replay.servers import RequestRow
from runner.script.script import Script
from tests.replay.conftest import Silence
from tests.replay.killed import quantized
from tests.restarts import reading as reading

ROOT = Path(__file__).resolve().parents[2]
#: Three turns: a system prompt longer than a block, and of what the last one adds little is lost.
CONVERSATION = [
    {"role": "system", "content": "You sell rail and ferry tickets, and answer in one to three short sentences. " * 8},
    {"role": "user", "content": "Good morning. I need to get from Porto to Lisbon this Thursday. What do you have?"},
    {"role": "assistant", "content": "One moment, I am looking up the trains from Porto to Lisbon on Thursday."},
    {"role": "user", "content": "I would like to be there before noon, because my sister picks me up for lunch."},
    {"role": "assistant", "content": "The 8:09 is there at 10:55."},
    {"role": "user", "content": "Take it."},
    {"role": "assistant", "content": "Done."},
]
REQUESTS = [0, 1, 2]


@pytest.fixture
def conversation(tmp_path: Path) -> Path:
    path = tmp_path / "conversation.json"
    path.write_text(json.dumps({"messages": CONVERSATION}))
    return path


def killed(conversation: Path, disk: Path, kind: str, kv_bits: int, dies_at: float) -> None:
    """`radixcache replay` in a process of its own, up to there."""
    arguments = ["replay", "--model", f"tiny:{kind}", "--conversations", conversation, "--cache", "radix", "--recorded"]
    arguments += ["--disk", disk, "--step-size", 256]
    done = subprocess.run(
        [sys.executable, "-m", "tests.replay.killed", *map(str, [dies_at, kv_bits, *arguments])],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def served(conversation: Path, kind: str, requests: list[int], disk: Path | None = None) -> list[RequestRow]:
    """The same replay in this process, of these requests."""
    loaded = load_model(f"tiny:{kind}")
    scheduled = ConversationOptions().schedule(read_chosen([conversation], skip_bad=False))
    script = Script(loaded, [scheduled[index] for index in requests], max_tokens=1, recorded=True)
    options = ReplayOptions(
        128 << 20, max_tokens=1, recorded=True, step_size=256, disk=disk and str(disk), disk_bytes=1 << 30
    )
    return list(Replay(loaded, script, ["radix"], options, Silence()).run()[0].rows)


def loses_little(conversation: Path, kind: str, kv_bits: int, *moments: float) -> None:
    """Processes get this far, one after the other; the next one has nearly all that one process would have."""
    disk = conversation.parent / "disk"
    in_one_process: list[int] = []
    for dies_at in moments:
        killed(conversation, disk, kind, kv_bits, dies_at)
        in_one_process += REQUESTS[: int(dies_at)]
    wanted = served(conversation, kind, [*in_one_process, *REQUESTS])[-len(REQUESTS) :]
    rows = served(conversation, kind, REQUESTS, disk)
    assert [row.output_hash for row in rows] == [served(conversation, kind, [each])[0].output_hash for each in REQUESTS]
    assert sum(row.cached_tokens for row in rows) >= 0.97 * sum(row.cached_tokens for row in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kv_bits"), [("gemma3_text", 0), ("lfm2", 0), ("llama", 8)])
def test_replays_of_any_layers_may_be_killed_in_the_middle_and_at_the_end(
    conversation: Path, kind: str, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "PrefixCache", quantized(kv_bits))
    loses_little(conversation, kind, kv_bits, 1.5, 3)
