"""Compare the TTFT of a hit with the forward pass of the uncached tokens alone.

Two conversations are stored. They are requested in turn, twice each time, and grow by NEW tokens per request:

    switch      the other conversation is live: the cache pages out the newest part of it and pages in this one
    continue    this conversation is live: nothing is copied

A hit is begin, prefill, the step of the last prompt token, and evaluated logits. Right after it, the same tokens run
without a PrefixCache, on mlx-lm caches with the same contents and enough room. The forward passes have the same cuts.
Each is evaluated, and MLX's free buffers are released after each, as in mlx-lm's prefill. The benchmark fails if the
logits differ.

Columns, medians over the pairs:

    hit ms                 TTFT of the hit
    forward ms             the forward passes alone
    hit / forward          by pair, with the range
    hit / uncut prefill    the same for a prefill without the cuts at checkpoints; empty for models that need none
    begin ms               the part of the hit in begin
    paged in MB            the state that begin copied in
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benchmarks.harness.random_models import random_model
from benchmarks.harness.record import REPEATS, Spread, arguments, publish, say
from radixcache import PrefixCache
from runner.models.load import ModelError, load_model

UNLIMITED_BYTES = 1 << 40
PREFILL_TOKENS = 512
AIM_RATIO = 1.15
# Stored prompt tokens, and new tokens per request.
SIZES = ((512, 16), (512, 64), (2000, 1), (2000, 16), (2000, 128), (8000, 16))
QUICK_SIZES = ((40, 1), (40, 20))
#: Largest difference of logits from rounding. Logits are about 1 to 10.
ROUNDING = 1e-3


@dataclass
class Conversation:
    """Tokens so far, and their mlx-lm caches: prefilled with the cuts of the PrefixCache, and without."""

    tokens: list[int]
    caches: list[Any]
    uncut: list[Any]


@dataclass(frozen=True)
class Pair:
    """Times of one request with the cache and without, in ms."""

    hit_ms: float
    begin_ms: float
    forward_ms: float
    uncut_ms: float | None
    paged_in_bytes: int
    differ: float


class Spy:
    """A model that records the number of tokens in each forward pass."""

    def __init__(self, model: Any) -> None:
        self.chunks: list[int] = []
        self._model = model

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        self.chunks.append(tokens.shape[1])
        return self._model(tokens, cache=cache)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    sizes, repeats = (QUICK_SIZES, 2) if options.quick else (SIZES, REPEATS)
    rows = [row for name, model in _models(options.quick) for row in _measure(name, model, sizes, repeats)]
    title = "TTFT of a hit, compared with the forward pass of its uncached tokens"
    publish("restore", title, rows, folder=options.results, repeats=repeats, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for request in ("continue", "switch"):
        found = [row for row in rows if row["request"] == request]
        worst = max(found, key=lambda row: row["hit / forward"])
        within = sum(row["hit / forward"] <= AIM_RATIO for row in found)
        parts.append(
            f"{within} of {len(found)} rows are within {AIM_RATIO:g}; the highest is {worst['hit / forward']:.3f} "
            f"({worst['model']}, {worst['new']} new tokens after {worst['stored']:,}: {worst['hit ms']:.1f} ms "
            f"instead of {worst['forward ms']:.1f} ms)"
        )
    uncut = [row["hit / uncut prefill"] for row in rows if row["hit / uncut prefill"] is not None]
    cuts = f" Relative to a prefill without stops for checkpoints: {min(uncut):.2f} to {max(uncut):.2f}." * bool(uncut)
    return (
        f"TTFT of a hit, relative to the forward pass of its new tokens. On the live path: {parts[0]}. After a switch "
        f"to another conversation: {parts[1]}.{cuts}"
    )


def _models(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield models with full attention, sliding windows and recurrent layers; free each before the next."""
    if not quick:
        try:
            loaded = load_model("demo")
            yield f"kv: {loaded.name}", loaded.model
        except ModelError as error:
            say(f"without the demo model: {error}")
    for kind in ("kv", "sliding", "hybrid") if quick else ("sliding", "hybrid"):
        yield f"{kind}: random", random_model(kind, small=quick)


# Measuring -----------------------------------------------------------------------------------------------------------


def _measure(name: str, model: Any, sizes: Sequence[tuple[int, int]], repeats: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    most = max(stored + (2 * repeats + 4) * new for stored, new in sizes)
    for stored in dict.fromkeys(stored for stored, _ in sizes):
        prefilled = [_prefilled(model, random, stored, most) for _ in range(2)]
        for new in (new for size, new in sizes if size == stored):
            say(f"{name}: {new} new after {stored:,}")
            conversations = [copy.deepcopy(each) for each in prefilled]
            pairs = _pairs(model, conversations, new, repeats, random)
            for request, found in zip(("continue", "switch"), pairs, strict=True):
                yield {"model": name, "request": request, "stored": stored, "new": new, **_figures(found)}


def _figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    ratio = Spread.of(pair.hit_ms / pair.forward_ms for pair in pairs)
    uncut = [pair.hit_ms / pair.uncut_ms for pair in pairs if pair.uncut_ms is not None]
    return {
        "hit ms": statistics.median(pair.hit_ms for pair in pairs),
        "forward ms": statistics.median(pair.forward_ms for pair in pairs),
        "hit / forward": ratio.median,
        "min to max": ratio.range,
        "hit / uncut prefill": statistics.median(uncut) if uncut else None,
        "begin ms": statistics.median(pair.begin_ms for pair in pairs),
        "paged in MB": statistics.median(pair.paged_in_bytes for pair in pairs) / 1e6,
        "logits differ": max(pair.differ for pair in pairs),
    }


def _pairs(
    model: Any, conversations: Sequence[Conversation], new: int, repeats: int, random: np.random.Generator
) -> tuple[list[Pair], list[Pair]]:
    """Run `repeats` requests that continue and that switch. The first request of a conversation does not count."""
    cache = PrefixCache(model, budget_bytes=UNLIMITED_BYTES)
    for conversation in conversations:
        cache.insert(conversation.tokens, conversation.caches)
    continued, switched = [], []
    for index in range(repeats + 2):
        conversation = conversations[index % 2]
        switched.append(_request(cache, model, conversation, new, random))
        continued.append(_request(cache, model, conversation, new, random))
    cache.check()
    return continued[2:], switched[2:]


def _request(cache: PrefixCache, model: Any, conversation: Conversation, new: int, random: np.random.Generator) -> Pair:
    """Continue a conversation by `new` tokens: with the cache, without it, and without cuts if there were any."""
    fresh = random.integers(1, _vocabulary(model), new).tolist()
    prompt = conversation.tokens + fresh
    paged_in_bytes = cache.stats.paged_in_bytes
    spy = Spy(model)
    mx.clear_cache()
    began = time.perf_counter()
    session = cache.begin(prompt)
    begun = time.perf_counter()
    session.prefill(spy)
    logits = session.step(spy, prompt[-1:])
    mx.eval(logits)
    hit = time.perf_counter()
    assert session.cached_tokens == len(conversation.tokens), (session.cached_tokens, len(conversation.tokens))
    session.close()
    forward_ms, expected = _forward(model, conversation.caches, fresh, spy.chunks)
    uncut_ms = None
    if cache._core.layout.has_points:
        uncut_ms, _ = _forward(model, conversation.uncut, fresh, [new - 1, 1] if new > 1 else [1])
    conversation.tokens = prompt
    differ = float(mx.abs(logits[:, -1] - expected[:, -1]).max())
    assert differ < ROUNDING, differ
    paged_in_bytes = cache.stats.paged_in_bytes - paged_in_bytes
    return Pair((hit - began) * 1e3, (begun - began) * 1e3, forward_ms, uncut_ms, paged_in_bytes, differ)


def _forward(model: Any, caches: list[Any], tokens: list[int], chunks: Sequence[int]) -> tuple[float, mx.array]:
    """Run tokens through the model in chunks; return the time in ms and the last logits."""
    assert sum(chunks) == len(tokens), (chunks, len(tokens))
    mx.clear_cache()
    began = time.perf_counter()
    start = 0
    for count in chunks[:-1]:
        model(mx.array(tokens[start : start + count])[None], cache=caches)
        mx.eval([cache.state for cache in caches if not cache.empty()])
        mx.clear_cache()
        start += count
    logits: mx.array = model(mx.array(tokens[start:])[None], cache=caches)
    mx.eval(logits)
    took_ms = (time.perf_counter() - began) * 1e3
    mx.eval([cache.state for cache in caches if not cache.empty()])
    return took_ms, logits


def _prefilled(model: Any, random: np.random.Generator, stored: int, room: int) -> Conversation:
    """Return a conversation of random tokens, in caches with enough room for all requests."""
    tokens = random.integers(1, _vocabulary(model), stored).tolist()
    caches: list[Any] = make_prompt_cache(model)
    for cache in caches:
        if type(cache) is KVCache:
            cache.step = room
    _forward(model, caches, tokens, [len(part) for part in np.array_split(tokens, -(-stored // PREFILL_TOKENS))])
    return Conversation(tokens, caches, copy.deepcopy(caches))


def _vocabulary(model: Any) -> int:
    return int(model.args.vocab_size)


if __name__ == "__main__":
    main()
