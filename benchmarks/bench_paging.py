"""Compare the speed of page-out and page-in with a plain MLX copy of the same bytes.

The caches are those of a model with LAYERS layers of full attention, filled with random numbers; there is no model. At
first, a path of so many tokens is live and is stored nowhere else. Then:

    page out    a request without a common prefix begins: the cache copies the whole path out of the live buffers
    page in     a request for the path begins: the cache writes the snapshot into the live buffers in place

Both times are of the whole `begin`, including look-up and accounting. The plain copies take turns with them: arrays of
the same number and shapes, evaluated together.

    page out    mx.contiguous of the first tokens of a buffer, into new memory
    page in     assignment to the first tokens of a buffer, into existing memory

GB/s is 10^9 bytes copied per second. ratio is the speed of the cache divided by the speed of the plain copy, by pair,
with the range.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from benchmarks.harness.record import REPEATS, Spread, arguments, in_turns, publish, say
from radixcache import PrefixCache

UNLIMITED_BYTES = 1 << 40
AIM_RATIO = 0.8
# Keys and values of SmolLM2-135M: 46,080 bytes per token in float32.
LAYERS, HEADS, WIDTH = 30, 3, 64
ARRAYS = 2 * LAYERS
TOKEN_BYTES = ARRAYS * HEADS * WIDTH * 4
ROOM_TOKENS = 256


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    # Paging takes milliseconds, so other load on the machine matters: more repeats than elsewhere.
    lengths, repeats = ((100, 600), 2) if options.quick else ((500, 2000, 8000), 2 * REPEATS + 1)
    rows = [row for tokens in lengths for row in _measure(tokens, repeats)]
    title = "Speed of page-out and page-in, compared with a plain copy"
    publish("paging", title, rows, folder=options.results, repeats=repeats, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the ratios with the aim."""
    parts = []
    for way in ("out", "in"):
        ratios = {row["tokens"]: row["ratio"] for row in rows if row["page"] == way}
        listed = ", ".join(f"{ratio:.2f} at {tokens:,} tokens" for tokens, ratio in ratios.items())
        within = sum(ratio >= AIM_RATIO for ratio in ratios.values())
        parts.append(f"page-{way} {listed} ({within} of {len(ratios)} reach {AIM_RATIO:g})")
    return f"Bandwidth, relative to a plain copy: {'; '.join(parts)}."


def _measure(tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    say(f"{tokens:,} tokens")
    paging = Paging(tokens)
    plain = PlainCopy(tokens)
    pairs = in_turns(paging.out_and_in, plain.out_and_in, repeats)
    paging.cache.check()
    for index, way in enumerate(("out", "in")):
        ours = [ours_s[index] for ours_s, _ in pairs]
        theirs = [theirs_s[index] for _, theirs_s in pairs]
        ratio = Spread.of(b / a for a, b in zip(ours, theirs, strict=True))
        copied_bytes = tokens * TOKEN_BYTES
        yield {
            "page": way,
            "tokens": tokens,
            "MB": copied_bytes / 1e6,
            "ms": statistics.median(ours) * 1e3,
            "GB/s": copied_bytes / statistics.median(ours) / 1e9,
            "plain copy ms": statistics.median(theirs) * 1e3,
            "plain copy GB/s": copied_bytes / statistics.median(theirs) / 1e9,
            "ratio": ratio.median,
            "min to max": ratio.range,
        }


class Paging:
    """A cache with a path to page out and in."""

    def __init__(self, tokens: int) -> None:
        self.cache = PrefixCache(caches=lambda: [KVCache() for _ in range(LAYERS)], budget_bytes=UNLIMITED_BYTES)
        self._tokens = tokens
        self._prompt = list(range(tokens))
        self._rounds = 0
        self._fill()

    def out_and_in(self) -> tuple[float, float]:
        """Page the path out and in; return the seconds of each."""
        self._rounds += 1
        before = self.cache.stats
        # A token that is in no other prompt.
        out_s = self._begin_s([self._tokens + self._rounds, 0])
        paged = self.cache.stats
        in_s = self._begin_s([*self._prompt, 0])
        after = self.cache.stats
        copied = (paged.paged_out_bytes - before.paged_out_bytes, after.paged_in_bytes - paged.paged_in_bytes)
        assert copied == (self._tokens * TOKEN_BYTES,) * 2, (copied, self._tokens)
        # Drop the copy, the first eviction victim: the path is live only, as before.
        self.cache.reclaim(after.live_bytes + after.paged_bytes - after.duplicate_bytes)
        assert self.cache.stats.paged_bytes == 0, self.cache.stats
        return out_s, in_s

    def _begin_s(self, prompt: Sequence[int]) -> float:
        """Begin and close a request; return the seconds of begin."""
        mx.clear_cache()
        began = time.perf_counter()
        session = self.cache.begin(prompt, reserve=0)
        took_s = time.perf_counter() - began
        session.close()
        return took_s

    def _fill(self) -> None:
        """Fill the caches with the path, in place of a model."""
        state = _random_arrays(self._tokens)
        with self.cache.begin(self._prompt) as session:
            for index, layer in enumerate(session.caches):
                layer.update_and_fetch(*state[2 * index : 2 * index + 2])


class PlainCopy:
    """Copies of the same arrays out of buffers and into them, all arrays together."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._buffers = _random_arrays(tokens + ROOM_TOKENS)

    def out_and_in(self) -> tuple[float, float]:
        """Copy out and in; return the seconds of each."""
        mx.clear_cache()
        began = time.perf_counter()
        copies = [mx.contiguous(buffer[..., : self._tokens, :]) for buffer in self._buffers]
        mx.eval(copies)
        out_s = time.perf_counter() - began
        mx.clear_cache()
        began = time.perf_counter()
        for buffer, copied in zip(self._buffers, copies, strict=True):
            buffer[..., : self._tokens, :] = copied
        mx.eval(self._buffers)
        return out_s, time.perf_counter() - began


def _random_arrays(tokens: int) -> list[mx.array]:
    random = np.random.default_rng(0)
    arrays = [mx.array(random.random((1, HEADS, tokens, WIDTH), dtype=np.float32)) for _ in range(ARRAYS)]
    mx.eval(arrays)
    return arrays


if __name__ == "__main__":
    main()
