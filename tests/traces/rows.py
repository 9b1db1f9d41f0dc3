"""Traces in the making, for tests: rows and sessions, and the invariants of what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from runner.traces.trace import Trace


def line(timestamp: float = 0, tokens: float = 1000, ids: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    ids = [0, 1] if ids is None else ids
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": ids, **more}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def ask(t: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": ids, **more}


def session(path: Path, *requests: Any, block_size: int = 64, **more: Any) -> Path:
    path.write_text(json.dumps({"id": path.stem, "block_size": block_size, "requests": list(requests), **more}))
    return path


def assert_invariants(trace: Trace) -> None:
    """TR1 to TR4 of a trace."""
    places: dict[int, tuple[int, ...]] = {}
    time_ms = 0
    for request in trace.requests:
        assert len(request.keys) == -(-request.tokens // trace.block_tokens) >= 1
        assert request.keys.dtype == np.int64
        keys = request.keys.tolist()
        assert min(keys) >= 0
        assert request.time_ms >= time_ms
        time_ms = request.time_ms
        for index, key in enumerate(keys):
            # The block before stands for everything before it.
            before = (index, keys[index - 1] if index else -1)
            assert places.setdefault(key, before) == before


def chat(chat_id: int, parent: int, timestamp: float, ids: list[int], **more: Any) -> dict[str, Any]:
    row = line(0, 16 * len(ids), ids, chat_id=chat_id, parent_chat_id=parent, type="text", turn=1)
    return {**row, "timestamp": timestamp, **more}
