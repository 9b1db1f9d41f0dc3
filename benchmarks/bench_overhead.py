"""Measure the Python time of the cache per decoded token, per prefill chunk and per request.

The model is hollow (benchmarks/harness/hollow_model.py): the forward pass only writes the caches, so most of the time
is the session's. The requests come from benchmarks/harness/measured_requests.py. Two tables:

    tokens      step() against direct calls of the model on caches of the same kind and length, in turns; prefill()
                against a loop of forward passes. For `step`, arrays are evaluated between the measured blocks; for
                `prefill`, after each chunk, as in any loop.
    requests    begin, close and their sum, in caches of 10 to 10,000 nodes. The forward passes in between do not
                count. In "next turn" and "switch", all tokens but one are stored.

                Python        begin and close, without the time in which MLX copies state

                next turn     the live conversation goes on
                switch        another stored conversation goes on: SHARED of its tokens are live, the rest is paged in
                miss          a new conversation; only the shared beginning is stored
                full budget   as miss, in a full cache that evicts for each request
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.hollow_model import HollowModel
from benchmarks.harness.measured_requests import (
    UNLIMITED_BYTES,
    fill,
    measure_tokens,
    request_ms,
    scenarios,
)
from benchmarks.harness.record import arguments, publish
from radixcache import PrefixCache
from radixcache.ledger import Ledger
from runner.models.tiny import tiny_model

AIM_TOKEN_US = 50.0
AIM_REQUEST_MS = 0.8
AIM_NODES = 10_000


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    blocks, repeats, counts = (3, 4, (10, 50)) if options.quick else (30, 30, (10, 1_000, AIM_NODES))
    models = {f"{kind} x {layers}": HollowModel(kind, layers) for kind, layers in _configurations(options.quick)}
    tokens = [measure_tokens(name, model, blocks) for name, model in models.items()]
    tokens.append(measure_tokens("tiny:llama", tiny_model("llama"), blocks))
    requests = [row for name, model in models.items() for row in _measure_requests(name, model, counts, repeats)]
    title = "Python time per decoded token and per chunk of prefill, us"
    publish("overhead-tokens", title, tokens, folder=options.results, repeats=blocks)
    title = "Python time per request, ms"
    about = conclusion(tokens, requests)
    publish("overhead", title, requests, folder=options.results, repeats=repeats, conclusion=about)


def conclusion(tokens: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]]) -> str:
    slowest = max(tokens, key=lambda row: row["step adds us"])
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in requests:
        series.setdefault((row["model"], row["request"]), []).append(row)
    large = [rows[-1] for rows in series.values()]
    nodes = min(row["nodes"] for row in large)
    worst = max(large, key=lambda row: row["request ms"])
    slowest_python = max(large, key=lambda row: row["Python ms"])
    within = sum(row["Python ms"] < AIM_REQUEST_MS for row in large)
    slopes = [rows[-1]["request ms"] / rows[0]["request ms"] for rows in series.values()]
    verdict = "under" if slowest["step adds us"] < AIM_TOKEN_US else "NOT under"
    return (
        f"A decoded token takes at most {slowest['step adds us']:.0f} us of Python ({slowest['model']}; {verdict} "
        f"{AIM_TOKEN_US:.0f} us). At {nodes:,} nodes, {within} of {len(large)} kinds of requests take less than "
        f"{AIM_REQUEST_MS:g} ms of Python; the highest is {slowest_python['Python ms']:.2f} ms "
        f"({slowest_python['request']} with {slowest_python['model']}). With copies of state, a request takes at most "
        f"{worst['request ms']:.2f} ms ({worst['request']} with {worst['model']}). A request on the largest cache "
        f"takes {min(slopes):.2f} to {max(slopes):.2f} times as long as on the smallest."
    )


def _configurations(quick: bool) -> tuple[tuple[str, int], ...]:
    if quick:
        return (("kv", 2), ("hybrid", 4))
    return (("kv", 4), ("kv", 30), ("sliding", 30), ("hybrid", 30))


# Requests ------------------------------------------------------------------------------------------------------------


def _measure_requests(name: str, model: Any, counts: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    ledger = Ledger(UNLIMITED_BYTES)
    cache = PrefixCache(model, budget_bytes=ledger)
    conversations: list[list[int]] = []
    for count in counts:
        fill(cache, model, conversations, count)
        for request, prompts in scenarios(conversations, repeats + 1):
            before = cache.stats
            if request == "full budget":
                ledger.budget_bytes = before.live_bytes + before.paged_bytes - before.spare_bytes
            # The first request warms up.
            times = [request_ms(cache, model, prompt) for prompt in prompts][1:]
            both = [begin + close for begin, close, _, _ in times]
            yield {
                "model": name,
                "request": request,
                "nodes": before.nodes,
                "begin ms": statistics.median(begin for begin, _, _, _ in times),
                "close ms": statistics.median(close for _, close, _, _ in times),
                "request ms": statistics.median(both),
                "Python ms": statistics.median(begin + close - copies for begin, close, copies, _ in times),
                "min ms": min(both),
                "max ms": max(both),
                "tokens evaluated": max(evaluated for _, _, _, evaluated in times),
                "evictions/request": (cache.stats.evictions - before.evictions) / len(prompts),
            }
            ledger.budget_bytes = UNLIMITED_BYTES
        cache.check()


if __name__ == "__main__":
    main()
