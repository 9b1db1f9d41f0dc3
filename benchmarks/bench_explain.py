"""What does it cost to ask why a prompt was not reused further, and to be able to?

Two tables:

    explain     one call of explain() in caches of 10 to 10,000 nodes, with a history of evictions that is full and as
                many recent prompts as are kept, all with the stored prompts' beginning. Median, least and most of
                repeats, without a tokenizer and with the byte-level one of the tiny models.

                stored      the next turn of a stored conversation
                diverged    a prompt that leaves the stored ones behind their common beginning
                evicted     a conversation that was evicted
                hint        a prompt with a varying id in front of a long equal text, as the recent ones have

    keeping     what events and history add to a request, in three caches by turns: with neither history nor listener,
                with the history alone, and with a listener that counts as well. Requests as in bench_overhead. What
                the last two add to begin and close is the median over the rounds of the difference within one round;
                "+-" is half the notch of a box plot, 1.57 times the quartiles' distance by the root of the rounds.

                begin and close   in Python, without what MLX takes to copy state
                request           these, what session.prefill() adds to the forward pass of a chunk where there is
                                  one, and for each of REPLY_TOKENS tokens what session.step() adds to its own: all
                                  that the cache does for a request
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.bench_overhead import UNLIMITED_BYTES, VOCABULARY, _fill, _measure_tokens, _request_ms, _scenarios
from benchmarks.hollow_model import HollowModel
from benchmarks.record import REPEATS, Spread, arguments, publish, say
from radixcache import Event, PrefixCache
from radixcache.history import MAX_PIECES, MAX_PROMPTS, History
from radixcache.ledger import Ledger
from radixcache.sized_layout import SizedLayout, SizedModel
from radixcache.tree import Keys
from runner.tiny import tiny_tokenizer

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
    """What a cache would have that keeps no history: the baseline."""

    def evicted(self, node: Any, start: int, tick: int) -> None: ...

    def dropped_checkpoint(self, node: Any, tick: int) -> None: ...

    def asked(self, namespace: str, keys: Keys) -> None: ...


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    counts, repeats, rounds = ((10, 50), 2, 4) if options.quick else ((10, 1_000, AIM_NODES), REPEATS, 400)
    asked = [row for kind in ("span", "point") for count in counts for row in _measure_explain(kind, count, repeats)]
    title = "One call of explain(), ms"
    publish("explain", title, asked, folder=options.results, repeats=repeats, conclusion=asking(asked))
    configurations = QUICK_CONFIGURATIONS if options.quick else CONFIGURATIONS
    kept = [row for kind, layers in configurations for row in _measure_keeping(kind, layers, counts[1], rounds)]
    title = "What events and history add to a request, us of Python"
    publish("explain-keeping", title, kept, folder=options.results, repeats=rounds, conclusion=keeping(kept))


def asking(rows: Sequence[dict[str, Any]]) -> str:
    """Say what the figures mean for the aim, from the figures."""
    kinds = {row["layers"] for row in rows}
    nodes = min(max(row["nodes"] for row in rows if row["layers"] == layers) for layers in kinds)
    largest = [row for row in rows if row["nodes"] >= nodes]
    worst = max(largest, key=lambda row: row["explain ms"])
    text = max(row["with text ms"] for row in largest)
    verdict = "under" if worst["explain ms"] < AIM_EXPLAIN_MS else "NOT under"
    return (
        f"At {nodes:,} nodes explain takes {worst['explain ms']:.2f} ms at most ({worst['prompt']}, {worst['layers']} "
        f"layers; {verdict} {AIM_EXPLAIN_MS:g}), {text:.2f} ms with text beside the tokens."
    )


def keeping(rows: Sequence[dict[str, Any]]) -> str:
    """Say what the figures mean for the aim, from the figures."""
    parts = []
    for share, whole_us in (("of request %", "request us"), ("of begin and close %", "begin and close us")):
        worst = max(rows, key=lambda row: row[share])
        within = sum(row[share] < 100 * AIM_SHARE for row in rows)
        surely = sum(row["both add us"] + row["+- us"] < AIM_SHARE * row[whole_us] for row in rows)
        parts.append(
            f"{worst[share]:.1f} % at most ({worst['request']} with {worst['model']}), less than {100 * AIM_SHARE:g} % "
            f'in {within} of {len(rows)} kinds of requests, in {surely} also with the "+-" added'
        )
    return (
        f"Of all that the cache does for a request with a reply of {REPLY_TOKENS} tokens, events with a listener and "
        f"history are {parts[0]}; of begin and close alone {parts[1]}."
    )


# Asking --------------------------------------------------------------------------------------------------------------


def _measure_explain(kind: str, count: int, repeats: int) -> Iterator[dict[str, Any]]:
    say(f"explain: {kind} layers, {count:,} nodes")
    layout = SizedLayout(1) if kind == "span" else SizedLayout(1, 10)
    ledger = Ledger(UNLIMITED_BYTES)
    cache = PrefixCache(layout=layout, budget_bytes=ledger)
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
        varying = np.concatenate([[index], shared, random.integers(0, VOCABULARY, 50)])
        _serve(cache, varying)
    prompts = {
        "stored": np.concatenate([stored, shared]),
        "diverged": prompt(),
        "evicted": evicted[-1],
        "hint": np.concatenate([[99], shared, [1, 2, 3]]),
    }
    for name, asked in prompts.items():
        cache._tokenizer = None
        explanation = cache.explain(asked)
        spread = _spread_ms(lambda asked=asked: cache.explain(asked), repeats)  # type: ignore[misc]
        cache._tokenizer = tiny_tokenizer()
        text = _spread_ms(lambda asked=asked: cache.explain(asked), repeats)  # type: ignore[misc]
        yield {
            "layers": kind,
            "prompt": name,
            "nodes": cache.stats.nodes,
            "evicted pieces": len(cache._states.history._pieces),
            "tokens": len(asked),
            "resumable": explanation.resumable_tokens,
            "gaps": len(explanation.gaps),
            "hints": len(explanation.hints),
            "explain ms": spread.median,
            "least to most": spread.range,
            "with text ms": text.median,
        }


def _serve(cache: PrefixCache, prompt: Keys) -> None:
    with cache.begin(prompt, reserve=0) as session:
        session.prefill(SizedModel())
        session.step(SizedModel(), prompt[-1:])


def _spread_ms(run: Callable[[], Any], repeats: int) -> Spread:
    """Wall time of a call, each repeat the mean of CALLS; one before does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - began) / CALLS * 1e3)
    return Spread.of(times[1:])


# Keeping -------------------------------------------------------------------------------------------------------------


def _measure_keeping(kind: str, layers: int, count: int, rounds: int) -> Iterator[dict[str, Any]]:
    say(f"keeping: {kind} x {layers}, {count:,} nodes")
    model = HollowModel(kind, layers)
    token = _measure_tokens(f"{kind} x {layers}", model, 4 if rounds < 10 else 30)
    step_us, chunk_us = (max(0.0, token[key]) for key in ("step adds us", "prefill adds us/chunk"))
    told = 0

    def listen(_: Event) -> None:
        nonlocal told
        told += 1

    caches: dict[str, tuple[PrefixCache, Ledger, list[list[int]]]] = {}
    for name in ("neither", "history", "both"):
        ledger = Ledger(UNLIMITED_BYTES)
        cache = PrefixCache(model, budget_bytes=ledger, on_event=listen if name == "both" else None)
        if name == "neither":
            cache._states.history = NoHistory()
        caches[name] = (cache, ledger, [])
        _fill(cache, model, caches[name][2], count)
    # The same draws for each cache: the same requests.
    kinds = [list(_scenarios(conversations, rounds + 1)) for _, _, conversations in caches.values()]
    for which, (request, _) in enumerate(kinds[0]):
        times: dict[str, list[float]] = {name: [] for name in caches}
        has_chunk = False
        if request == "full budget":
            for cache, ledger, _ in caches.values():
                stats = cache.stats
                ledger.budget_bytes = stats.live_bytes + stats.paged_bytes - stats.spare_bytes
        told = 0
        for index in range(rounds + 1):
            # Which comes first changes from round to round.
            turn = [*caches.items()][index % 3 :] + [*caches.items()][: index % 3]
            for name, (cache, _, _) in turn:
                prompt = kinds[list(caches).index(name)][which][1][index]
                begin, close, copies, evaluated = _request_ms(cache, model, prompt)
                times[name].append((begin + close - copies) * 1e3)
                has_chunk = evaluated > 1  # the prompt's last token is stepped
        base = statistics.median(times["neither"][1:])
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
            "of request %": 100 * both / request_us,
            "of begin and close %": 100 * both / base,
            "events/request": told / (rounds + 1),
        }


def _added(without: Sequence[float], with_it: Sequence[float]) -> tuple[float, float]:
    """Median difference within a round, and half the width of its interval; the first round warms up."""
    differences = [b - a for a, b in zip(without[1:], with_it[1:], strict=True)]
    lower, median, upper = statistics.quantiles(differences, n=4)
    return median, 1.57 * (upper - lower) / len(differences) ** 0.5


if __name__ == "__main__":
    main()
