"""What does the cache cost in Python: per decoded token, per prefill chunk, and per request?

The model is hollow (benchmarks/hollow_model.py): its forward pass only writes its caches, so that what a session adds
is most of what there is. Two tables:

    tokens      step() against calling the model directly on caches of the same kind and length, in turns; likewise
                prefill() against a loop of forward passes. Arrays are evaluated between the measured blocks of `step`
                and, as by any loop, after each chunk of `prefill`.
    requests    begin, close and both, in caches of 10 to 10,000 nodes. The forward passes, and waiting for them, lie
                in between and do not count; of the first two kinds all but one token are stored.

                Python        begin and close without what MLX takes to copy state

                next turn     the conversation that is live goes on
                switch        another stored conversation goes on: SHARED of its tokens are live, the rest is paged in
                miss          a new conversation, of which only the shared beginning is stored
                full budget   as miss, in a cache that has no byte left and has to evict what each request adds

`--profile` prints where the time of a switch and of a step goes instead.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.hollow_model import HollowModel
from benchmarks.record import arguments, publish
from radixcache import PrefixCache
from radixcache.ledger import Ledger
from runner.tiny import tiny_model

UNLIMITED_BYTES = 1 << 40
SHARED = 32
STORED_TOKENS = 64
BLOCK_TOKENS = 32
CHUNK_TOKENS = 16
VOCABULARY = 256
AIM_TOKEN_US = 50.0
AIM_REQUEST_MS = 2.0
AIM_NODES = 10_000


def main(given: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if given is None else given
    if "--profile" in given:
        print_profiles()
        return
    options = arguments(__doc__, given)
    blocks, repeats, counts = (3, 4, (10, 50)) if options.quick else (30, 30, (10, 1_000, AIM_NODES))
    models = {f"{kind} x {layers}": HollowModel(kind, layers) for kind, layers in _configurations(options.quick)}
    tokens = [_measure_tokens(name, model, blocks) for name, model in models.items()]
    tokens.append(_measure_tokens("tiny:llama", tiny_model("llama"), blocks))
    requests = [row for name, model in models.items() for row in _measure_requests(name, model, counts, repeats)]
    title = "What step and prefill add to the model's own forward pass, us"
    publish("overhead-tokens", title, tokens, folder=options.results, repeats=blocks)
    title = "What a request costs beside its forward passes, ms"
    about = conclusion(tokens, requests)
    publish("overhead", title, requests, folder=options.results, repeats=repeats, conclusion=about)


def conclusion(tokens: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]]) -> str:
    """Say what the figures mean for the aims, from the figures."""
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
        f"A decoded token costs {slowest['step adds us']:.0f} us of Python at most, with {slowest['model']} "
        f"({verdict} {AIM_TOKEN_US:.0f}). At {nodes:,} nodes "
        f"{within} of {len(large)} kinds of requests take less than {AIM_REQUEST_MS:g} ms of Python, at most "
        f"{slowest_python['Python ms']:.2f} ({slowest_python['request']} with {slowest_python['model']}); with the "
        f"copies of state, at most {worst['request ms']:.2f} ({worst['request']} with {worst['model']}). From the "
        f"smallest cache to the largest a request gets {min(slopes):.2f} to {max(slopes):.2f} times as slow."
    )


def _configurations(quick: bool) -> tuple[tuple[str, int], ...]:
    if quick:
        return (("kv", 2), ("hybrid", 4))
    return (("kv", 4), ("kv", 30), ("sliding", 30), ("hybrid", 30))


# Tokens --------------------------------------------------------------------------------------------------------------


def _measure_tokens(name: str, model: Any, blocks: int) -> dict[str, Any]:
    direct_us, step_us = zip(*_step_blocks(model, blocks), strict=True)
    adds = [ours - theirs for theirs, ours in zip(direct_us, step_us, strict=True)]
    chunks = [ours - theirs for theirs, ours in _prefill_pairs(model, blocks)]
    return {
        "model": name,
        "model alone us": statistics.median(direct_us),
        "step us": statistics.median(step_us),
        "step adds us": statistics.median(adds),
        "least us": min(adds),
        "most us": max(adds),
        "prefill adds us/chunk": statistics.median(chunks),
    }


def _step_blocks(model: Any, blocks: int) -> Iterator[tuple[float, float]]:
    """Time per token of a block of tokens, direct and through a session, in us."""
    prompt = np.arange(2 * STORED_TOKENS) % VOCABULARY
    room = (blocks + 1) * BLOCK_TOKENS
    tokens = [mx.array([index % VOCABULARY]) for index in range(BLOCK_TOKENS)]
    mx.eval(tokens)
    direct = _roomy(model, len(prompt) + room)
    model(mx.array(prompt)[None], cache=direct)
    with PrefixCache(model, budget_bytes=UNLIMITED_BYTES).begin(prompt, reserve=room) as session:
        session.prefill(model)
        session.step(model, prompt[-1:])
        for index in range(blocks + 1):
            theirs = _block_us(lambda token: model(token[None], cache=direct), tokens)
            _wait(direct)
            ours = _block_us(lambda token: session.step(model, token), tokens)
            _wait(session.caches)
            if index:  # the first block warms up
                yield theirs, ours


def _prefill_pairs(model: Any, repeats: int) -> Iterator[tuple[float, float]]:
    """Time per chunk of prefilling a prompt of 8 chunks, direct and through a session, in us; both evaluate each."""
    cache = PrefixCache(model, budget_bytes=UNLIMITED_BYTES)
    chunks = 8
    for index in range(repeats + 1):
        prompt = np.random.default_rng(index).integers(0, VOCABULARY, chunks * CHUNK_TOKENS + 1)
        direct = _roomy(model, len(prompt) + 1)
        began = time.perf_counter()
        for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
            model(mx.array(prompt[start : start + CHUNK_TOKENS])[None], cache=direct)
            _wait(direct)
            mx.clear_cache()
        theirs = time.perf_counter() - began
        with cache.begin(prompt) as session:
            began = time.perf_counter()
            session.prefill(model, step_size=CHUNK_TOKENS)
            ours = time.perf_counter() - began
        if index:
            yield theirs / chunks * 1e6, ours / chunks * 1e6


def _block_us(run: Callable[[mx.array], Any], tokens: Sequence[mx.array]) -> float:
    began = time.perf_counter()
    for token in tokens:
        run(token)
    return (time.perf_counter() - began) / len(tokens) * 1e6


def _roomy(model: Any, tokens: int) -> list[Any]:
    """Caches that do not grow while they are measured, as a session's do not."""
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    for cache in caches:
        if type(cache) is KVCache:
            cache.step = tokens
    return caches


def _wait(caches: Sequence[Any]) -> None:
    """Evaluate what the caches hold, so that no graph grows."""
    mx.eval([cache.state for cache in caches])


# Requests ------------------------------------------------------------------------------------------------------------


def _measure_requests(name: str, model: Any, counts: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    ledger = Ledger(UNLIMITED_BYTES)
    cache = PrefixCache(model, budget_bytes=ledger)
    conversations: list[list[int]] = []
    for count in counts:
        _fill(cache, model, conversations, count)
        for request, prompts in _scenarios(conversations, repeats + 1):
            before = cache.stats
            if request == "full budget":
                ledger.budget_bytes = before.live_bytes + before.paged_bytes - before.spare_bytes
            # The first request warms up.
            times = [_request_ms(cache, model, prompt) for prompt in prompts][1:]
            both = [begin + close for begin, close, _, _ in times]
            yield {
                "model": name,
                "request": request,
                "nodes": before.nodes,
                "begin ms": statistics.median(begin for begin, _, _, _ in times),
                "close ms": statistics.median(close for _, close, _, _ in times),
                "request ms": statistics.median(both),
                "Python ms": statistics.median(begin + close - copies for begin, close, copies, _ in times),
                "least ms": min(both),
                "most ms": max(both),
                "tokens evaluated": max(evaluated for _, _, _, evaluated in times),
                "evictions/request": (cache.stats.evictions - before.evictions) / len(prompts),
            }
            ledger.budget_bytes = UNLIMITED_BYTES
        cache.check()


def _scenarios(conversations: list[list[int]], repeats: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Name and prompts of each kind of request. A conversation that is asked grows by the token that was new.

    The newest conversations are asked: at full budget earlier ones may have been evicted.
    """
    random = np.random.default_rng(len(conversations))

    def asked(index: int) -> list[int]:
        conversations[index].append(int(random.integers(VOCABULARY)))
        return list(conversations[index])

    yield "next turn", [asked(-1) for _ in range(repeats)]
    yield "switch", [asked(-2 - index % 7) for index in range(repeats)]
    yield "miss", [_new_conversation(random) for _ in range(repeats)]
    yield "full budget", [_new_conversation(random) for _ in range(repeats)]


def _request_ms(cache: PrefixCache, model: Any, prompt: list[int]) -> tuple[float, float, float, int]:
    """Wall time of begin and of close in ms, how much of both MLX ran copies, and the tokens evaluated in between."""
    with _timed_evaluations() as beginning:
        began = time.perf_counter()
        session = cache.begin(prompt, reserve=16)
        begun = time.perf_counter()
    session.prefill(model)
    session.step(model, prompt[-1:])
    _wait(session.caches)
    with _timed_evaluations() as closing:
        last = time.perf_counter()
        session.close()
        closed = time.perf_counter()
    copies = sum(beginning) + sum(closing)
    return (begun - began) * 1e3, (closed - last) * 1e3, copies * 1e3, len(session.remaining)


@contextmanager
def _timed_evaluations() -> Iterator[list[float]]:
    """Seconds of every `mx.eval` inside: there the state itself is copied, and Python waits."""
    seconds: list[float] = []
    evaluate = mx.eval

    def timed(*arrays: Any) -> None:
        began = time.perf_counter()
        evaluate(*arrays)
        seconds.append(time.perf_counter() - began)

    mx.eval = timed
    try:
        yield seconds
    finally:
        mx.eval = evaluate


def _fill(cache: PrefixCache, model: Any, conversations: list[list[int]], count: int) -> None:
    """Store conversations that share a beginning until the cache has `count` nodes."""
    random = np.random.default_rng(count)
    caches = model.make_cache()
    model(mx.zeros((1, STORED_TOKENS), mx.int32), cache=caches)
    _wait(caches)
    while cache.stats.nodes < count:
        conversations.append(_new_conversation(random))
        cache.insert(conversations[-1], caches)


def _new_conversation(random: np.random.Generator) -> list[int]:
    return [*range(SHARED), *random.integers(0, VOCABULARY, STORED_TOKENS - SHARED).tolist()]


# Profiles ------------------------------------------------------------------------------------------------------------


def print_profiles(layers: int = 30, count: int = 1_000, requests: int = 100) -> None:
    """Print the functions that take most of a switch between conversations, and of a decoded token."""
    model = HollowModel("kv", layers)
    cache = PrefixCache(model, budget_bytes=UNLIMITED_BYTES)
    conversations: list[list[int]] = []
    _fill(cache, model, conversations, count)
    prompts = dict(_scenarios(conversations, requests))["switch"]
    _print_profile("begin and close, switch", lambda: [_request_ms(cache, model, prompt) for prompt in prompts])
    with cache.begin(conversations[0], reserve=2_000) as session:
        session.prefill(model)
        tokens = [mx.array([index % VOCABULARY]) for index in range(1_000)]
        session.step(model, conversations[0][-1:])
        _print_profile("step", lambda: _block_us(lambda token: session.step(model, token), tokens))


def _print_profile(title: str, run: Callable[[], Any]) -> None:
    profile = cProfile.Profile()
    profile.runcall(run)
    print(f"\n{title}")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
