"""Measure the gain from spare room in a session's buffers. mlx-lm's caches grow by 256 tokens and copy each time.

The model only writes its caches, LAYERS layers of full attention, so growth takes a large part of the time. The same
tokens are written three ways, in turns:

    mlx-lm                   mlx-lm's own caches
    session                  a session with its default room for the reply; the room grows by half for longer replies
    session, known length    a session that knows the length of the reply (reserve=)

Situations:

    prefill     a prompt in chunks of CHUNK_TOKENS
    decode      token by token after a prompt; the prompt is not measured

Columns:

    total ms      all forward passes, each evaluated; with the range over the repeats
    longest ms    the longest forward pass of a chunk or a token, without the first
    growths       how often larger buffers replaced the buffers
    copied MB     bytes copied by the growths
    live MB       buffers at the end
    peak MB       peak MLX memory above the start
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from benchmarks.harness.record import REPEATS, Spread, arguments, publish, say
from radixcache import PrefixCache

UNLIMITED_BYTES = 1 << 40
CHUNK_TOKENS = 512
# Keys and values of SmolLM2-135M: 46,080 bytes per token in float32.
LAYERS, HEADS, WIDTH = 30, 3, 64
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4
# (situation, prompt tokens, reply tokens).
SIZES = (("prefill", 2000, 0), ("prefill", 8000, 0), ("decode", 16, 2000), ("decode", 6000, 2000))
QUICK_SIZES = (("prefill", 1100, 0), ("decode", 16, 600))
DEFAULT_RESERVE_TOKENS = 256


class WritingModel:
    """Callable as an mlx-lm model: writes zeros into its caches, and returns logits (1, T, 1).

    Counts buffer growths, within or between forward passes, and the tokens copied by them. All layers have buffers of
    the same size.
    """

    def __init__(self) -> None:
        self.growths = self.copied_tokens = 0
        self._capacity = 0
        self._rows: dict[int, mx.array] = {}

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(LAYERS)]

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        length, filled = tokens.shape[1], cache[0].offset
        self.look(cache, filled)
        if length not in self._rows:
            self._rows[length] = mx.zeros((1, HEADS, length, WIDTH))
        for layer in cache:
            layer.update_and_fetch(self._rows[length], self._rows[length])
        self.look(cache, filled)
        return mx.zeros((1, length, 1))

    def look(self, caches: Sequence[Any], filled: int) -> None:
        """Note the buffers, which hold or held `filled` tokens."""
        capacity = 0 if caches[0].keys is None else caches[0].keys.shape[2]
        if capacity > self._capacity and filled:
            self.growths += 1
            self.copied_tokens += filled
        self._capacity = capacity


@dataclass(frozen=True)
class Run:
    """One run: the times of the measured forward passes, and the buffer growths."""

    times_ms: list[float]
    growths: int
    copied_tokens: int
    live_bytes: int
    peak_bytes: int


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    sizes, repeats = (QUICK_SIZES, 2) if options.quick else (SIZES, REPEATS)
    rows = [row for size in sizes for row in _measure(*size, repeats)]
    title = "Cost of growing buffers: mlx-lm and radixcache"
    publish("growth", title, rows, folder=options.results, repeats=repeats, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Describe the largest case of each situation."""
    parts = []
    for situation in dict.fromkeys(row["what"] for row in rows):
        *_, theirs, ours, told = (row for row in rows if row["what"] == situation)
        parts.append(
            f"{situation} of {theirs['new']:,} tokens after {theirs['prompt']:,}: mlx-lm grows its buffers "
            f"{theirs['growths']} times and copies {theirs['copied MB']:,.0f} MB; a session {ours['growths']} times "
            f"and {ours['copied MB']:,.0f} MB, or {told['copied MB']:,.0f} MB if the length is known. A session takes "
            f"{ours['total ms'] / theirs['total ms']:.2f} of mlx-lm's time ({told['total ms'] / theirs['total ms']:.2f}"
            f" with known length) and {ours['peak MB'] / theirs['peak MB']:.2f} of its peak memory "
            f"({told['peak MB'] / theirs['peak MB']:.2f})"
        )
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def _measure(what: str, prompt: int, reply: int, repeats: int) -> Iterator[dict[str, Any]]:
    say(f"{what}: {reply or prompt:,} tokens")
    ways: dict[str, Callable[[], Run]] = {
        "mlx-lm": lambda: _plain(prompt, reply),
        "session": lambda: _session(prompt, reply, DEFAULT_RESERVE_TOKENS),
        "session, known length": lambda: _session(prompt, reply, reply + 1),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            runs[name].append(way())
    for name, (_, *counted) in runs.items():
        total = Spread.of(sum(run.times_ms) for run in counted)
        last = counted[-1]
        yield {
            "what": what,
            "buffers": name,
            "prompt": prompt if reply else 0,
            "new": reply or prompt,
            "total ms": total.median,
            "min to max": total.range,
            "longest ms": statistics.median(max(run.times_ms[1:]) for run in counted),
            "growths": last.growths,
            "copied MB": last.copied_tokens * TOKEN_BYTES / 1e6,
            "live MB": last.live_bytes / 1e6,
            "peak MB": statistics.median(run.peak_bytes for run in counted) / 1e6,
        }


def _plain(prompt: int, reply: int) -> Run:
    """Run chunks and tokens through the model on mlx-lm's caches, as mlx-lm's generation does."""
    model = WritingModel()
    caches = model.make_cache()
    before_bytes = _start_watching_memory()
    times_ms = []
    for start in range(0, prompt, CHUNK_TOKENS):
        began = time.perf_counter()
        model(mx.zeros((1, min(prompt - start, CHUNK_TOKENS)), mx.int32), caches)
        _wait(caches)
        mx.clear_cache()
        times_ms.append((time.perf_counter() - began) * 1e3)
    return _finished(model, caches, times_ms, reply, lambda: model(mx.zeros((1, 1), mx.int32), caches), before_bytes)


def _session(prompt: int, reply: int, reserve: int) -> Run:
    model = WritingModel()
    before_bytes = _start_watching_memory()
    cache = PrefixCache(model, budget_bytes=UNLIMITED_BYTES)
    moments: list[float] = [time.perf_counter()]
    # One token more, because prefill leaves out the last token of the prompt.
    with cache.begin([0] * (prompt + 1), reserve=reserve) as session:
        session.prefill(model, step_size=CHUNK_TOKENS, on_progress=lambda *_: moments.append(time.perf_counter()))
        # on_progress is also called before the first chunk. The time of begin belongs to the first chunk.
        del moments[1]
        times_ms = [(end - start) * 1e3 for start, end in itertools.pairwise(moments)]
        return _finished(model, session.caches, times_ms, reply, lambda: session.step(model, [0]), before_bytes)


def _finished(
    model: WritingModel,
    caches: Sequence[Any],
    prefill_ms: list[float],
    reply: int,
    step: Callable[[], Any],
    before_bytes: int,
) -> Run:
    """Write the reply token by token. With a reply, the prefill does not count."""
    model.look(caches, caches[0].offset)
    growths, copied_tokens = model.growths, model.copied_tokens
    times_ms = []
    for _ in range(reply):
        began = time.perf_counter()
        step()
        _wait(caches)
        times_ms.append((time.perf_counter() - began) * 1e3)
    live_bytes = sum(layer.nbytes for layer in caches)
    peak_bytes = mx.get_peak_memory() - before_bytes
    if not reply:
        return Run(prefill_ms, growths, copied_tokens, live_bytes, peak_bytes)
    return Run(times_ms, model.growths - growths, model.copied_tokens - copied_tokens, live_bytes, peak_bytes)


def _wait(caches: Sequence[Any]) -> None:
    mx.eval([array for layer in caches for array in (layer.keys, layer.values)])


def _start_watching_memory() -> int:
    """Reset the peak; return the bytes in use."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


if __name__ == "__main__":
    main()
