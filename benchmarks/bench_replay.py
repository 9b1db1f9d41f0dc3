"""Compare four caches by byte budget, from a tenth of the bytes that all conversations need to all of them.

The conversations need their distinct tokens times the model's bytes per token. The distinct tokens are those on the
edges of one radix tree with every prompt and reply. A budget is a share of that; `none` and `single` ignore it. `bound`
is the infinite cache: it prefills the tokens that no earlier request had, and at least one token of each prompt.

    counted   many requests on a hollow model, which only writes its caches, with the demo model's tokenizer. The counts
              do not depend on the machine, so one run is enough
    timed     few requests on a random mid-size model, all caches in turns, REPEATS times; each result is the median.
              mlx-lm's server cuts a prompt where it stores a segment, and on a CPU two chunks are quicker than one.
              With nothing to reuse, it is therefore faster than no cache

The replies are the recorded ones. Conversations come from --conversations FILE (default: tau-bench's airline task in
shared/data beside the repository: 200 recorded agents with one system prompt). Without that file, the benchmark repeats
the built-in set under other names until there are enough.
"""

from __future__ import annotations

import argparse
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
from benchmarks.harness.hollow_model import HollowModel
from benchmarks.harness.random_models import random_model
from benchmarks.harness.record import REPEATS, Spread, arguments, publish
from radixcache import RadixTree
from runner.commands.replay import ReplayProgress
from runner.models.load import LoadedModel, load_model
from runner.replay import ReplayOptions
from runner.replay.caches import layers_bytes
from runner.replay.replayer import CacheRun, Replay
from runner.script.conversation import Conversation
from runner.script.conversation_reader import builtin_conversations, read_conversations
from runner.script.schedule import schedule
from runner.script.script import Script
from runner.text import MIB

AIRLINE = Path(__file__).parents[2] / "shared/data/tau-bench/historical_trajectories/gpt-4o-airline.json"
SHARES = (10, 25, 50, 100)
UNLIMITED_BYTES = 1 << 50
KV_STEP_TOKENS = 256


@dataclass(frozen=True)
class Workload:
    """A script, its model, and the counts of an infinite cache."""

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
    options = arguments(__doc__, given, add=_add_conversations)
    began = time.perf_counter()
    demo = load_model("tiny" if options.quick else "demo")
    vocabulary = 1 + max(demo.tokenizer.vocab.values())
    random = (
        demo if options.quick else replace(demo, model=random_model("kv", vocabulary=vocabulary), name="random llama")
    )
    conversations, source = _conversations(None if options.quick else options.conversations)
    model: Any = HollowModel("kv", 1)
    hollow = replace(demo, model=model, name="hollow")
    counted, timed = ((10, None), (2, 1)) if options.quick else ((600, None), (6, 2))
    shares = (25, 100) if options.quick else SHARES
    workloads = [
        _workload("counted", hollow, conversations, *counted, is_timed=False),
        _workload("timed", random, conversations, *timed, is_timed=True),
    ]
    repeats = 2 if options.quick else REPEATS
    rows = [row for workload in workloads for row in _measure(workload, shares, repeats if workload.is_timed else 1)]
    title = f"{source}: {' and '.join(f'{len(w.script)} requests on {w.loaded.name}' for w in workloads)}"
    publish(
        "budgets",
        f"Prefill and TTFT by byte budget. {title}",
        rows,
        folder=options.results,
        repeats=repeats,
        conclusion=conclusion(rows, repeats),
        took_s=time.perf_counter() - began,
    )


def conclusion(rows: Sequence[dict[str, Any]], repeats: int) -> str:
    """Compare radix with mlx-lm, and name the cases where radix is not ahead."""
    counts = [_comparison(rows, "counted", "prefilled tokens", share) for share in _shares(rows)]
    times = [_comparison(rows, "timed", "prefill s", share) for share in _shares(rows)]
    return (
        f"mlx-lm over radix at the same budget (below 1, radix is behind). Prefilled tokens: {', '.join(counts)}. "
        f"Seconds to all first tokens, medians of {repeats} runs: {', '.join(times)}."
    )


def _comparison(rows: Sequence[dict[str, Any]], part: str, figure: str, share: int) -> str:
    theirs, ours = (
        next(row[figure] for row in rows if (row["part"], row["cache"], row["budget %"]) == (part, cache, share))
        for cache in ("mlx-lm", "radix")
    )
    return f"{theirs / ours:.2f} at {share} %"


def _shares(rows: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({row["budget %"] for row in rows if isinstance(row["budget %"], int)})


# What is replayed ----------------------------------------------------------------------------------------------------


def _add_conversations(parser: argparse.ArgumentParser) -> None:
    beside = AIRLINE if AIRLINE.exists() else None
    parser.add_argument("--conversations", type=Path, default=beside, metavar="FILE", help="conversations to replay")


def _conversations(path: Path | None) -> tuple[Sequence[Conversation], str]:
    if path is not None:
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
    """Return the distinct tokens of a script, and the tokens that a cache without eviction prefills."""
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


def _measure(workload: Workload, shares: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    need_bytes = workload.distinct_tokens * workload.token_bytes
    plan: list[tuple[str, int | str | None, int]] = [("none", None, UNLIMITED_BYTES), ("single", None, UNLIMITED_BYTES)]
    budgets: list[tuple[int | str, int]] = [(share, need_bytes * share // 100) for share in shares]
    if not workload.is_timed:
        budgets.append(("no limit", UNLIMITED_BYTES))
    plan += [(cache, share, budget) for cache in ("mlx-lm", "radix") for share, budget in budgets]
    rounds = [[_run(workload, cache, budget) for cache, _, budget in plan] for _ in range(repeats)]
    runs = [list(of_one) for of_one in zip(*rounds, strict=True)]
    none_s = [_prefill_s(run) for run in runs[0]]
    rows = [_row(workload, of_one, share, none_s) for (_, share, _), of_one in zip(plan, runs, strict=True)]
    none = rows[0]
    yield from rows
    yield {
        **dict.fromkeys(none),
        "part": workload.part,
        "cache": "bound",
        "requests": len(workload.script),
        "prompt tokens": workload.prompt_tokens,
        "prefilled tokens": workload.bound_tokens,
        "prefilled / bound": 1.0,
        "peak MiB": need_bytes / MIB,
    }


def _run(workload: Workload, cache: str, budget_bytes: int) -> CacheRun:
    options = ReplayOptions(budget_bytes, max_tokens=1, recorded=True)
    with ReplayProgress(Console(stderr=True)) as progress:
        (run,) = Replay(workload.loaded, workload.script, [cache], options, progress).run()
    return run


def _prefill_s(run: CacheRun) -> float:
    return sum(row.ttft_ms for row in run.rows) / 1e3


def _row(
    workload: Workload, runs: Sequence[CacheRun], share: int | str | None, none_s: Sequence[float]
) -> dict[str, Any]:
    """Return the row of one cache at one budget: counts, equal in all repeats, and median times."""
    run = runs[0]
    prefilled = _prefilled(run)
    assert all(_prefilled(other) == prefilled for other in runs), run.cache
    timed = workload.is_timed
    ttft_ms = [np.percentile([row.ttft_ms for row in each.rows], (50, 95)) for each in runs]
    prefill_s = Spread.of(_prefill_s(each) for each in runs)
    saved_s = Spread.of(without - _prefill_s(each) for without, each in zip(none_s, runs, strict=True))
    return {
        "part": workload.part,
        "cache": run.cache,
        "budget %": share,
        "requests": len(run.rows),
        "prompt tokens": workload.prompt_tokens,
        "prefilled tokens": prefilled,
        "prefilled / bound": prefilled / workload.bound_tokens,
        "TTFT p50 ms": Spread.of(float(p50) for p50, _ in ttft_ms).median if timed else None,
        "TTFT p95 ms": Spread.of(float(p95) for _, p95 in ttft_ms).median if timed else None,
        "prefill s": prefill_s.median if timed else None,
        "min to max s": prefill_s.range if timed else None,
        "saved s": saved_s.median if timed else None,
        "peak MiB": max(row.peak_bytes for each in runs for row in each.rows) / MIB,
        "evictions": run.evictions,
    }


def _prefilled(run: CacheRun) -> int:
    return sum(row.prompt_tokens - row.cached_tokens for row in run.rows)


if __name__ == "__main__":
    main()
