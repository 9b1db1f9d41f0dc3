"""Measure the cost of exact mode in prefilled tokens: in exact mode, a request resumes only at multiples of step_size.

The benchmark replays the built-in conversations with their recorded replies, through a PrefixCache without exact mode
and through exact ones. The model is hollow, with the demo model's tokenizer. The counts do not depend on the machine,
so one run is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.hollow_model import HollowModel
from benchmarks.harness.record import arguments, publish
from runner.commands.replay import ReplayProgress
from runner.models.load import load_model
from runner.replay import ReplayOptions
from runner.replay.replayer import CacheRun, Replay
from runner.script.conversation_reader import builtin_conversations
from runner.script.schedule import schedule
from runner.script.script import Script

UNLIMITED_BYTES = 1 << 40
STEP_SIZES = (32, 64, 128, 256)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    demo = load_model("tiny" if options.quick else "demo")
    model: Any = HollowModel("kv", 1)
    hollow = replace(demo, model=model, name="hollow")
    requests = schedule(builtin_conversations(), max_requests=6 if options.quick else None)
    script = Script(hollow, requests, max_tokens=1, recorded=True)
    free, *exact = (_served(hollow, script, step_size) for step_size in (None, *STEP_SIZES))
    rows = [_row("no", free, free), *(_row(str(n), run, free) for n, run in zip(STEP_SIZES, exact, strict=True))]
    title = f"Cached prompt tokens in exact mode, {len(script)} requests of the built-in conversations"
    publish("exact", title, rows, folder=options.results, repeats=1)


def _served(hollow: Any, script: Script, step_size: int | None) -> CacheRun:
    options = ReplayOptions(UNLIMITED_BYTES, max_tokens=1, recorded=True)
    if step_size is not None:
        options = replace(options, exact=True, step_size=step_size)
    with ReplayProgress(Console(stderr=True)) as progress:
        (run,) = Replay(hollow, script, ["radix"], options, progress).run()
    return run


def _row(step_size: str, run: CacheRun, free: CacheRun) -> dict[str, Any]:
    prompts = sum(row.prompt_tokens for row in run.rows)
    cached, most = (sum(row.cached_tokens for row in each.rows) for each in (run, free))
    return {
        "exact, step_size": step_size,
        "prompt tokens": prompts,
        "cached tokens": cached,
        "cached %": 100 * cached / prompts,
        "more to prefill, tokens/request": (most - cached) / len(run.rows),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
