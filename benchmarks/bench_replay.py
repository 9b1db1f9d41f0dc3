"""What do the four caches save when memory is short: from a tenth of what all conversations need to all of it?

What all conversations need is their distinct tokens, those on the edges of one radix tree of every prompt and reply,
times the model's bytes per token. A budget is a share of that; `none` and `single` have no use for one. `bound` is the
infinite cache: it prefills what no earlier request held, and at least one token of each prompt.

    counted   many requests on a hollow model, which only writes its caches, with the demo model's tokenizer. How many
              tokens are prefilled depends on nothing else, so the counts are exact and one run is enough
    timed     few requests on the demo model, run REPEATS times; seconds are of this machine

Replies are fed as they were recorded. Conversations: tau-bench's airline task beside the repository if it is there (200
recorded agents, one system prompt), else the built-in set, repeated under other names until there are enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.budget_plot import plot_budgets
from benchmarks.hollow_model import HollowModel
from benchmarks.record import arguments, publish
from radixcache import RadixTree
from runner.backends.plain_run import layers_bytes
from runner.builtin import builtin_conversations
from runner.conversations import Conversation, read_conversations
from runner.models import LoadedModel, load_model
from runner.progress import ReplayProgress
from runner.replay import CacheRun, ReplayOptions, replay
from runner.report import MIB
from runner.schedule import schedule
from runner.script import Script

AIRLINE = Path(__file__).parents[2] / "shared/data/tau-bench/historical_trajectories/gpt-4o-airline.json"
SHARES = (10, 25, 50, 100)
UNLIMITED_BYTES = 1 << 50
REPEATS = 1
KV_STEP_TOKENS = 256


@dataclass(frozen=True)
class Workload:
    """A script, the model it runs on, and what an infinite cache would make of it."""

    part: str
    loaded: LoadedModel
    script: Script
    is_timed: bool
    distinct_tokens: int
    bound_tokens: int
    token_bytes: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(self.script[index].prompt.tokens) for index in range(len(self.script)))


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    began = time.perf_counter()
    demo = load_model("tiny" if options.quick else "demo")
    conversations, source = _conversations(None if options.quick else AIRLINE)
    model: Any = HollowModel("kv", 1)
    hollow = replace(demo, model=model, name="hollow", weight_bytes=0)
    counted, timed = ((10, None), (2, 1)) if options.quick else ((600, None), (8, 2))
    shares = (25, 100) if options.quick else SHARES
    workloads = [
        _workload("counted", hollow, conversations, *counted, is_timed=False),
        _workload("timed", demo, conversations, *timed, is_timed=True),
    ]
    rows = [row for workload in workloads for row in _measure(workload, shares)]
    title = f"{source}: {' and '.join(f'{len(w.script)} requests on {w.loaded.name}' for w in workloads)}"
    publish(
        "budgets",
        f"Prefill and TTFT by byte budget. {title}",
        rows,
        folder=options.results,
        repeats=REPEATS,
        conclusion=conclusion(rows),
        took_s=time.perf_counter() - began,
    )
    plot_budgets(options.results / "budgets.png", rows, title=title)


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Say where radix is ahead of the best other cache and where it is not, from the figures."""
    counts = [_comparison(rows, "counted", "prefilled tokens", share) for share in _shares(rows)]
    times = [_comparison(rows, "timed", "prefill s", share) for share in _shares(rows)]
    return (
        f"Prefilled tokens of the best other cache over those of radix: {', '.join(counts)}. "
        f"Seconds to all first tokens, {REPEATS} run each: {', '.join(times)}. Below 1, radix is behind."
    )


def _comparison(rows: Sequence[dict[str, Any]], part: str, figure: str, share: int) -> str:
    budgeted = [row for row in rows if row["part"] == part and row["budget %"] in (share, None)]
    others = [row for row in budgeted if row["cache"] not in ("radix", "bound")]
    ours = next(row for row in budgeted if row["cache"] == "radix")
    best = min(others, key=lambda row: row[figure])
    return f"{best[figure] / ours[figure]:.2f} ({best['cache']}) at {share} %"


def _shares(rows: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({row["budget %"] for row in rows if isinstance(row["budget %"], int)})


# What is replayed ----------------------------------------------------------------------------------------------------


def _conversations(path: Path | None) -> tuple[Sequence[Conversation], str]:
    if path is not None and path.exists():
        return read_conversations(path).conversations, path.stem
    built_in = builtin_conversations()
    copies = [
        replace(each, conversation_id=f"{each.conversation_id}/{copy}", user=f"{each.user}/{copy}")
        for copy in range(8)
        for each in built_in
    ]
    return copies, "built-in set repeated"


def _workload(
    part: str,
    loaded: LoadedModel,
    conversations: Sequence[Conversation],
    requests: int,
    users: int | None,
    *,
    is_timed: bool,
) -> Workload:
    scheduled = schedule(conversations, users=users, max_requests=requests)
    script = Script(loaded, scheduled, max_tokens=1, recorded=True, skip_bad=True)
    distinct, bound = _infinite(script)
    caches = make_prompt_cache(loaded.model)
    loaded.model(mx.zeros((1, KV_STEP_TOKENS), mx.int32), cache=caches)
    return Workload(part, loaded, script, is_timed, distinct, bound, layers_bytes(caches) // KV_STEP_TOKENS)


def _infinite(script: Script) -> tuple[int, int]:
    """Distinct tokens of all prompts and replies, and the tokens to prefill for a cache that forgets nothing."""
    tree: RadixTree[None] = RadixTree()
    prefilled = 0
    for request in (script[index] for index in range(len(script))):
        prompt = request.prompt.tokens.astype(np.int64)
        prefilled += len(prompt) - min(tree.match(prompt).offset, len(prompt) - 1)
        whole = np.concatenate([prompt, request.reply.astype(np.int64)])
        match = tree.match(whole)
        node = match.node if match.offset == match.node.end else tree.split(match.node, match.offset)
        if match.offset < len(whole):
            tree.append(node, whole[match.offset :])
    return tree.key_count, prefilled


# Running -------------------------------------------------------------------------------------------------------------


def _measure(workload: Workload, shares: Sequence[int]) -> Iterator[dict[str, Any]]:
    need_bytes = workload.distinct_tokens * workload.token_bytes
    none = _row(workload, _run(workload, "none", UNLIMITED_BYTES), None, None)
    none["saved s"] = 0.0 if workload.is_timed else None
    plan: list[tuple[str, int | str | None, int]] = [("single", None, UNLIMITED_BYTES)]
    budgets: list[tuple[int | str, int]] = [(share, need_bytes * share // 100) for share in shares]
    if not workload.is_timed:
        budgets.append(("no limit", UNLIMITED_BYTES))
    plan += [(cache, share, budget) for cache in ("mlx-lm", "radix") for share, budget in budgets]
    yield none
    for cache, share, budget_bytes in plan:
        yield _row(workload, _run(workload, cache, budget_bytes), share, none["prefill s"])
    yield {
        **dict.fromkeys(none),
        "part": workload.part,
        "cache": "bound",
        "requests": len(workload.script),
        "prompt tokens": workload.prompt_tokens,
        "prefilled tokens": workload.bound_tokens,
        "times the bound": 1.0,
        "peak MiB": need_bytes / MIB,
    }


def _run(workload: Workload, cache: str, budget_bytes: int) -> CacheRun:
    options = ReplayOptions(budget_bytes, max_tokens=1, recorded=True)
    with ReplayProgress(Console(stderr=True)) as progress:
        (run,) = replay(workload.loaded, workload.script, [cache], options, progress)
    return run


def _row(workload: Workload, run: CacheRun, share: int | str | None, none_s: float | None) -> dict[str, Any]:
    ttft_ms = [row.ttft_ms for row in run.rows]
    prefilled = sum(row.prompt_tokens - row.cached_tokens for row in run.rows)
    prefill_s = sum(ttft_ms) / 1e3
    p50, p95 = (float(value) for value in np.percentile(ttft_ms, (50, 95)))
    timed = workload.is_timed
    return {
        "part": workload.part,
        "cache": run.cache,
        "budget %": share,
        "requests": len(run.rows),
        "prompt tokens": workload.prompt_tokens,
        "prefilled tokens": prefilled,
        "times the bound": prefilled / workload.bound_tokens,
        "TTFT p50 ms": p50 if timed else None,
        "TTFT p95 ms": p95 if timed else None,
        "prefill s": prefill_s if timed else None,
        "saved s": none_s - prefill_s if timed and none_s is not None else None,
        "peak MiB": max(row.peak_bytes for row in run.rows) / MIB,
        "evictions": run.evictions,
    }


if __name__ == "__main__":
    main()
