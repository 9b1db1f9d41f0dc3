"""Compare the TTFT of a row with a cached prefix to the forward pass of the uncached tokens.

The forward pass is the lower bound: mlx-lm's own caches hold the prefix, and a greedy token is taken from the last
logits. The row goes through a group, from the request to the first piece of text: look-up, admission, the same forward
pass, sampling and detokenizing. No other request is running.

    first token ms           TTFT of the row
    forward ms               forward pass of the uncached tokens alone
    first token / forward    median and range over the pairs
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.bench_decode import model_of
from benchmarks.harness.record import Spread, arguments, in_turns, publish, say
from radixcache import PrefixCache
from runner.engine.generator import ParallelGenerator

BUDGET_BYTES = 8 << 30
CHUNK_TOKENS = 512
REPEATS = 15
#: The aim: most TTFT divided by the time of the forward pass.
AIM = 1.05


@dataclass(frozen=True)
class Load:
    """Prompts of a model: `cached` tokens, then one of several numbers of uncached tokens."""

    model: str
    cached: int
    uncached: tuple[int, ...]


FULL = (Load("tiny", 2000, (32, 100, 512)), Load("shape", 300, (32, 100, 512)))
QUICK = (Load("tiny", 300, (32,)),)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    rows = [row for load in (QUICK if options.quick else FULL) for row in measure(load)]
    title = "TTFT of a row with a cached prefix"
    publish("first-token", title, rows, folder=options.results, repeats=REPEATS, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the rows with the aim."""
    met = sum(row["first token / forward"] <= AIM for row in rows)
    worst = max(rows, key=lambda row: float(row["first token / forward"]))
    return (
        f"TTFT relative to the forward pass: {met} of {len(rows)} rows are within {AIM}; the highest is "
        f"{worst['first token / forward']:.3f} ({worst['model']}, {worst['uncached']} tokens after {worst['cached']})."
    )


def measure(load: Load) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of uncached tokens."""
    model, tokenizer = model_of(load.model)
    random = np.random.default_rng(0)

    def own(count: int) -> list[int]:
        found: list[int] = random.integers(16, 250, count).tolist()
        return found

    beginning = own(load.cached)
    caches = make_prompt_cache(model)
    _forward(model, caches, beginning)
    for uncached in load.uncached:
        say(f"{load.model}, {uncached} tokens behind {load.cached}")
        cache = PrefixCache(model, budget_bytes=BUDGET_BYTES)
        capacity = load.cached + (REPEATS + 2) * (uncached + 2)
        with ParallelGenerator(cache, model, tokenizer, capacity=capacity, step_size=CHUNK_TOKENS) as generator:
            _first_token(generator, [*beginning, 15])
            pairs = in_turns(
                lambda its=generator, count=uncached: _first_token(its, beginning + own(count)),  # type: ignore[misc]
                lambda count=uncached: _timed_forward(model, caches, own(count)),  # type: ignore[misc]
                REPEATS,
            )
        cache.close()
        ratio = Spread.of(ours / forward for ours, forward in pairs)
        yield {
            "model": load.model,
            "cached": load.cached,
            "uncached": uncached,
            "first token ms": statistics.median(ours for ours, _ in pairs) * 1e3,
            "forward ms": statistics.median(forward for _, forward in pairs) * 1e3,
            "first token / forward": ratio.median,
            "min to max": ratio.range,
        }


def _first_token(generator: ParallelGenerator, prompt: list[int]) -> float:
    """Return the seconds to the first piece of a request; the request then generates another piece."""
    began_s = time.perf_counter()
    generator.submit(prompt, max_tokens=2, stop_tokens=())
    pieces = iter(generator)
    next(pieces)
    seconds = time.perf_counter() - began_s
    for _ in pieces:
        pass
    return seconds


def _timed_forward(model: Any, caches: list[Any], tokens: list[int]) -> float:
    """Return the seconds of a forward pass of these tokens; then restore the caches."""
    began_s = time.perf_counter()
    _forward(model, caches, tokens)
    seconds = time.perf_counter() - began_s
    trim_prompt_cache(caches, len(tokens))
    return seconds


def _forward(model: Any, caches: list[Any], tokens: list[int]) -> None:
    """Evaluate tokens in chunks, and the most likely next token."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        logits = model(mx.array([tokens[start : start + CHUNK_TOKENS]]), cache=caches)
        mx.eval(mx.argmax(logits[:, -1], axis=-1))


if __name__ == "__main__":
    main()
