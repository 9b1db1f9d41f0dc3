"""Traces from words, as tests of the simulator make them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np

from runner.traces.trace import Trace, TraceRequest

words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def made(
    paths: Sequence[Sequence[int]],
    block_tokens: int = 16,
    name: str = "made",
    *,
    lacks: int = 0,
    gaps_ms: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> Trace:
    """A trace from words: a block's key stands for the whole word up to it.

    Args:
        lacks: tokens that the last block of each prompt lacks.
        gaps_ms: before each request; 10 where there are none.
        outputs: generated tokens of each request; 1 where there are none.
    """
    keys: dict[tuple[int, ...], int] = {}
    requests, time_ms = [], 0
    for index, word in enumerate(paths):
        time_ms += gaps_ms[index] if gaps_ms else 10
        ids = [keys.setdefault(tuple(word[: end + 1]), len(keys)) for end in range(len(word))]
        tokens = len(ids) * block_tokens - lacks
        requests.append(TraceRequest(np.array(ids, np.int64), tokens, outputs[index] if outputs else 1, time_ms))
    return Trace(name, block_tokens, requests, False, name)


def mooncake_file(path: Path, words: Sequence[Sequence[int]], gap_ms: int = 100) -> Path:
    """A file in Mooncake's format with a prompt for each list of block ids."""
    lines = [
        {"timestamp": gap_ms * index, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": list(ids)}
        for index, ids in enumerate(words)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON result."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows
