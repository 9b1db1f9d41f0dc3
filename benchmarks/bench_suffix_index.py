"""Measure the index of suffixes that replies are drafted from: its bytes, how fast it is fed, and how fast it proposes.

The text is made up: phrases of 3 to 30 tokens, drawn with Zipf's frequencies, in runs of RUN_PHRASES. Times are seconds
of the thread's CPU. Columns:

    tokens            tokens in the index, which is full
    bytes per token   arrays and runs, as `nbytes` counts them
    feed tokens/s     a run at a time, as when a request closes; and the longest single call
    extend us         a token, as a reply grows
    propose us        LIMIT tokens behind TAIL_TOKENS tokens of a stored run: the median and the 99th percentile of
                      TAILS tails, of each the median of REPEATS look-ups
    first p99 us      the same for the first look-up of each tail, which finds no memory in the processor's caches
    new p99 us        the 99th percentile behind tokens that were never stored together
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.record import REPEATS, arguments, publish
from radixcache.speculate.suffix_index import MOST_TOKEN_BYTES, TAIL_TOKENS, SuffixIndex
from radixcache.tokens import TokenIds

VOCABULARY, PHRASES, RUN_PHRASES = 32_000, 20_000, 40
SIZES = (100_000, 1_000_000, 10_000_000)
TAILS, LIMIT = 4_000, 16
AIM_US, AIM_BYTES = 50.0, 40.0


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    rows = [_measure(tokens) for tokens in (SIZES[:1] if options.quick else SIZES)]
    publish("suffix_index", "Index of suffixes", rows, folder=options.results, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    last = rows[-1]
    is_fast = last["propose p99 us"] < AIM_US and last["bytes per token"] <= AIM_BYTES
    return (
        f"With {last['tokens']:,} tokens, the index takes {last['bytes per token']:.1f} bytes a token, and proposes in "
        f"{last['propose us']:.0f} us ({last['propose p99 us']:.0f} us at the 99th percentile). The aim is "
        f"{AIM_BYTES:g} bytes and {AIM_US:g} us: it is {'met' if is_fast else 'NOT met'}. Feeding takes "
        f"{1e6 / last['feed tokens/s']:.2f} us a token."
    )


def _runs(random: np.random.Generator) -> Iterator[TokenIds]:
    phrases = [random.integers(0, VOCABULARY, random.integers(3, 30)).astype(np.int32) for _ in range(PHRASES)]
    weights = 1 / np.arange(1, PHRASES + 1)
    weights /= weights.sum()
    while True:
        yield np.concatenate([phrases[index] for index in random.choice(PHRASES, RUN_PHRASES, p=weights)])


def _measure(tokens: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    index, runs = SuffixIndex(tokens * MOST_TOKEN_BYTES), _runs(random)
    kept: list[TokenIds] = []
    fed, feed_s, longest_s = 0, 0.0, 0.0
    while fed < tokens:
        run = next(runs)
        seconds = _seconds(lambda: index.add(run))  # noqa: B023
        fed, feed_s, longest_s = fed + len(run), feed_s + seconds, max(longest_s, seconds)
        if random.random() < TAILS * len(run) / tokens:
            kept.append(run)
    reply = next(runs).tolist()
    extend_s = _seconds(lambda: index.extend(reply))
    places = [(kept[at], random.integers(TAIL_TOKENS, len(kept[at]))) for at in random.integers(0, len(kept), TAILS)]
    stored = [run[end - TAIL_TOKENS : end].tolist() for run, end in places]
    new = random.integers(0, VOCABULARY, (TAILS, TAIL_TOKENS)).tolist()
    first, median = _propose(index, stored)
    index.check() if tokens == SIZES[0] else None
    return {
        "tokens": index.tokens,
        "bytes per token": index.nbytes / index.tokens,
        "feed tokens/s": fed / feed_s,
        "longest add ms": 1e3 * longest_s,
        "extend us": 1e6 * extend_s / len(reply),
        "propose us": float(np.percentile(median, 50)),
        "propose p99 us": float(np.percentile(median, 99)),
        "first p99 us": float(np.percentile(first, 99)),
        "new p99 us": float(np.percentile(_propose(index, new)[1], 99)),
    }


def _propose(index: SuffixIndex, tails: Sequence[list[int]]) -> tuple[list[float], list[float]]:
    """Microseconds of the first look-up of each tail, and the median of all look-ups of each."""
    times = [[1e6 * _seconds(lambda: index.propose(tail, LIMIT)) for _ in range(REPEATS)] for tail in tails]  # noqa: B023
    return [each[0] for each in times], [float(np.median(each)) for each in times]


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
