"""Measure explain(), and the events and history that it needs.

Two tables:

    explain     One call of explain() in caches of 10 to 10,000 nodes. The eviction history and the list of recent
                prompts are full, and all prompts share a beginning. Median and range of the repeats, without a
                tokenizer and with the byte-level tokenizer of the tiny models.

                stored      the next turn of a stored conversation
                diverged    a prompt that leaves the stored prompts after their common beginning
                evicted     a conversation that was evicted
                hint        a varying id before a long common text; the recent prompts have the same form

    keeping     Time that events and history add to a request. Three caches take turns: without history and listener,
                with history, and with history and a listener that counts events. The requests are those of
                bench_overhead. "add" is the median over the rounds of the difference within a round. "+-" is half the
                notch of a box plot: 1.57 times the interquartile range, divided by the square root of the rounds.

                begin and close   Python only, without the time in which MLX copies state
                request           begin and close, plus the time that session.prefill() adds to the forward pass of a
                                  chunk, plus the time that session.step() adds to each of REPLY_TOKENS tokens
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.hollow_model import HollowModel
from benchmarks.harness.measured_requests import (
    UNLIMITED_BYTES,
    VOCABULARY,
    fill,
    measure_tokens,
    request_ms,
    scenarios,
)
from benchmarks.harness.record import REPEATS, Spread, arguments, publish, rotated, say
from radixcache import Event, PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.ledger import Ledger
from radixcache.sized_cache import sized_cache
from radixcache.tokens import Keys
from radixcache.tree.history import MAX_PIECES, MAX_PROMPTS, History
from runner.models.tiny import tiny_tokenizer

AIM_EXPLAIN_MS = 1.0
AIM_SHARE = 0.02
AIM_NODES = 10_000
SHARED_TOKENS = 2_000
PROMPT_TOKENS = 4_000
CALLS = 20
REPLY_TOKENS = 128
CONFIGURATIONS = (("kv", 4), ("kv", 30), ("hybrid", 30))
QUICK_CONFIGURATIONS = (("kv", 2), ("hybrid", 4))


class NoHistory(History):
    """A history that keeps nothing: the baseline."""

    def evicted(self, node: Any, start: int, tick: int, was_wrong: bool = False) -> None: ...

    def evicted_checkpoint(self, node: Any, tick: int) -> None: ...

    def asked(self, namespace: str, keys: Keys) -> None: ...


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    counts, repeats, rounds = ((10, 50), 2, 4) if options.quick else ((10, 1_000, AIM_NODES), REPEATS, 400)
    asked = [row for kind in ("span", "point") for count in counts for row in _measure_explain(kind, count, repeats)]
    title = "One call of explain(), ms"
    publish("explain", title, asked, folder=options.results, repeats=repeats, conclusion=asking(asked))
    configurations = QUICK_CONFIGURATIONS if options.quick else CONFIGURATIONS
    kept = [row for kind, layers in configurations for row in _measure_keeping(kind, layers, counts[1], rounds)]
    title = "Cost of events and history per request, us of Python"
    publish("explain-keeping", title, kept, folder=options.results, repeats=rounds, conclusion=keeping(kept))


def asking(rows: Sequence[dict[str, Any]]) -> str:
    kinds = {row["layers"] for row in rows}
    nodes = min(max(row["nodes"] for row in rows if row["layers"] == layers) for layers in kinds)
    largest = [row for row in rows if row["nodes"] >= nodes]
    worst = max(largest, key=lambda row: row["explain ms"])
    text = max(row["with text ms"] for row in largest)
    verdict = "under" if worst["explain ms"] < AIM_EXPLAIN_MS else "NOT under"
    return (
        f"At {nodes:,} nodes, explain takes at most {worst['explain ms']:.2f} ms ({worst['prompt']}, {worst['layers']} "
        f"layers; {verdict} {AIM_EXPLAIN_MS:g} ms), and with decoded text at most {text:.2f} ms."
    )


def keeping(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for share, whole_us in (("both / request %", "request us"), ("both / begin and close %", "begin and close us")):
        worst = max(rows, key=lambda row: row[share])
        within = sum(row[share] < 100 * AIM_SHARE for row in rows)
        surely = sum(row["both add us"] + row["+- us"] < AIM_SHARE * row[whole_us] for row in rows)
        parts.append(
            f"at most {worst[share]:.1f} % ({worst['request']} with {worst['model']}); {within} of {len(rows)} kinds "
            f'of requests are under {100 * AIM_SHARE:g} %, and {surely} also with the "+-" added'
        )
    return (
        f"Share of events (with a listener) and history in the time that the cache takes for a request with "
        f"{REPLY_TOKENS} reply tokens: {parts[0]}. Share in the time of begin and close alone: {parts[1]}."
    )


# Asking --------------------------------------------------------------------------------------------------------------


def _measure_explain(kind: str, count: int, repeats: int) -> Iterator[dict[str, Any]]:
    say(f"explain: {kind} layers, {count:,} nodes")
    cache, prompts = _full_of_history(kind, count)
    for name, prompt in prompts.items():
        explain = partial(cache.explain, prompt)
        cache._about = cache._about._replace(tokenizer=None)
        explanation = explain()
        spread = _spread_ms(explain, repeats)
        cache._about = cache._about._replace(tokenizer=tiny_tokenizer())
        text = _spread_ms(explain, repeats)
        yield {
            "layers": kind,
            "prompt": name,
            "nodes": cache.stats.nodes,
            "evicted pieces": len(cache._core.states.events.history._pieces),
            "tokens": len(prompt),
            "resumable": explanation.resumable_tokens,
            "gaps": len(explanation.gaps),
            "hints": len(explanation.hints),
            "explain ms": spread.median,
            "min to max": spread.range,
            "with text ms": text.median,
        }


def _full_of_history(kind: str, count: int) -> tuple[PrefixCache, dict[str, Keys]]:
    """Return a cache of `count` nodes with a full history, and the prompts to explain, by name."""
    layout = SizedLayout(1) if kind == "span" else SizedLayout(1, 10)
    cache = sized_cache(layout, budget_bytes=Ledger(UNLIMITED_BYTES))
    random = np.random.default_rng(count)
    shared = random.integers(0, VOCABULARY, SHARED_TOKENS)

    def prompt() -> Keys:
        fresh: Keys = random.integers(0, VOCABULARY, PROMPT_TOKENS - SHARED_TOKENS)
        return np.concatenate([shared, fresh])

    evicted = [prompt() for _ in range(min(count, MAX_PIECES))]
    for each in evicted:
        _serve(cache, each)
        cache.reclaim(SHARED_TOKENS + 20)
    while cache.stats.nodes < count:
        stored = prompt()
        _serve(cache, stored)
    for index in range(MAX_PROMPTS):
        _serve(cache, np.concatenate([[index], shared, random.integers(0, VOCABULARY, 50)]))
    return cache, {
        "stored": np.concatenate([stored, shared]),
        "diverged": prompt(),
        "evicted": evicted[-1],
        "hint": np.concatenate([[99], shared, [1, 2, 3]]),
    }


def _serve(cache: PrefixCache, prompt: Keys) -> None:
    with cache.begin(prompt, reserve=0) as session:
        session.prefill(SizedModel())
        session.step(SizedModel(), prompt[-1:])


def _spread_ms(run: Callable[[], Any], repeats: int) -> Spread:
    """Time a call. Each repeat is the mean of CALLS calls; the first repeat warms up and does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - began) / CALLS * 1e3)
    return Spread.of(times[1:])


# Keeping -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filled:
    """One of the three caches, and prompts by kind of request. All three get the same prompts."""

    cache: PrefixCache
    ledger: Ledger
    prompts: dict[str, list[list[int]]]

    def leave_no_room(self) -> None:
        stats = self.cache.stats
        self.ledger.budget_bytes = stats.live_bytes + stats.paged_bytes - stats.spare_bytes


class Listener:
    """Count events."""

    told = 0

    def hear(self, _: Event) -> None:
        self.told += 1


def _measure_keeping(kind: str, layers: int, count: int, rounds: int) -> Iterator[dict[str, Any]]:
    say(f"keeping: {kind} x {layers}, {count:,} nodes")
    model = HollowModel(kind, layers)
    token = measure_tokens(f"{kind} x {layers}", model, 4 if rounds < 10 else 30)
    step_us, chunk_us = (max(0.0, token[key]) for key in ("step adds us", "prefill adds us/chunk"))
    listener = Listener()
    caches = _filled(model, count, rounds + 1, listener)
    for request in caches["neither"].prompts:
        if request == "full budget":
            for each in caches.values():
                each.leave_no_room()
        listener.told = 0
        times, evaluated = _rounds_us(model, caches, request)
        base = statistics.median(times["neither"][1:])
        has_chunk = evaluated > 1  # session.step() takes the prompt's last token.
        request_us = base + has_chunk * chunk_us + REPLY_TOKENS * step_us
        (history, _), (both, uncertain) = (_added(times["neither"], times[name]) for name in ("history", "both"))
        yield {
            "model": f"{kind} x {layers}",
            "request": request,
            "begin and close us": base,
            "request us": request_us,
            "history adds us": history,
            "both add us": both,
            "+- us": uncertain,
            "both / request %": 100 * both / request_us,
            "both / begin and close %": 100 * both / base,
            "events/request": listener.told / (rounds + 1),
        }


def _filled(model: HollowModel, count: int, rounds: int, listener: Listener) -> dict[str, Filled]:
    """Return the three caches, each with `count` nodes and `rounds` prompts of each kind."""
    caches = {}
    for name in ("neither", "history", "both"):
        ledger = Ledger(UNLIMITED_BYTES)
        cache = PrefixCache(model, budget_bytes=ledger, on_event=listener.hear if name == "both" else None)
        if name == "neither":
            cache._core.states.events.history = NoHistory()
        conversations: list[list[int]] = []
        fill(cache, model, conversations, count)
        caches[name] = Filled(cache, ledger, dict(scenarios(conversations, rounds)))
    return caches


def _rounds_us(model: HollowModel, caches: dict[str, Filled], request: str) -> tuple[dict[str, list[float]], int]:
    """Return the us of begin and close in Python by cache and round, and the tokens evaluated by the last call."""
    times: dict[str, list[float]] = {name: [] for name in caches}
    evaluated = 0
    for index in range(len(caches["neither"].prompts[request])):
        for name in rotated(list(caches), index):
            begin, close, copies, evaluated = request_ms(
                caches[name].cache, model, caches[name].prompts[request][index]
            )
            times[name].append((begin + close - copies) * 1e3)
    return times, evaluated


def _added(without: Sequence[float], with_it: Sequence[float]) -> tuple[float, float]:
    """Return the median difference within a round, and the "+-" of the table. The first round warms up."""
    differences = [b - a for a, b in zip(without[1:], with_it[1:], strict=True)]
    lower, median, upper = statistics.quantiles(differences, n=4)
    return median, 1.57 * (upper - lower) / len(differences) ** 0.5


if __name__ == "__main__":
    main()
