"""Sliding windows stored by the token: how much more is found in the same bytes?

Traces go through the cache by the simulator, which is the deployed cache with sizes in place of arrays, with LRU and
the sizes of a Gemma 3 of 12B: 8 layers of full attention, 40 with a window of 1,024 tokens, bfloat16. Three ways:

    whole       each checkpoint holds the whole window of every layer, and requests resume at checkpoints alone
    by token    each token of a window is held once, and requests resume wherever a whole window is there
    bound       as if windows took nothing: what full attention alone would find

The traces are looked for as by bench_policies; where there are none, a made-up trace takes their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.record import arguments, publish, say
from benchmarks.harness.recorded_traces import add_traces, traces_in
from runner.models.footprint import ModelBytes
from runner.simulate.simulator import BlockSizes, simulate
from runner.traces.request import Trace

#: Bytes of a token over all layers of full attention, and over all with a window, of so many tokens.
TOKEN_BYTES, WINDOW_BYTES, WINDOW_TOKENS = 65_536, 327_680, 1_024
BUDGETS_GIB = (10, 20, 45, 90, 180)
#: What is found by token, by what is found whole, where the budget is tight: the lower half of the budgets.
AIM = 1.3


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=add_traces)
    budgets = (1, 4) if options.quick else BUDGETS_GIB
    rows = [row for trace in traces_in(options.traces, options.quick) for row in _measure(trace, budgets)]
    title = "Prompt tokens found of a model with sliding windows, %"
    publish("windows", title, rows, folder=options.results, repeats=1, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Say where most is won, and least, from the figures."""
    best, worst = (choose(rows, key=lambda row: float(row["by token / whole"])) for choose in (max, min))
    said = [
        f"{row['by token / whole']:.2f} times as many tokens at {row['budget GiB']} GiB ({row['trace']})"
        for row in (best, worst)
    ]
    return f"Stored by the token at most {said[0]}, at least {said[1]}; {AIM} times was the aim where room is short."


def _measure(trace: Trace, budgets: Sequence[int]) -> Iterator[dict[str, Any]]:
    model = ModelBytes("gemma3", TOKEN_BYTES, 0, ((WINDOW_TOKENS, WINDOW_BYTES),), "bfloat16")
    by_token = BlockSizes.of(model, trace.block_tokens)
    whole = BlockSizes(by_token.span_bytes, WINDOW_TOKENS * WINDOW_BYTES, is_counting=False)
    bound = BlockSizes(by_token.span_bytes, is_counting=False)
    for gib in budgets:
        found = [100 * simulate(trace, "lru", gib << 30, sizes).token_hit_ratio for sizes in (whole, by_token, bound)]
        say(f"{trace.name} at {gib} GiB: {found[0]:.1f}, {found[1]:.1f}, {found[2]:.1f} %")
        yield {
            "trace": trace.name,
            "budget GiB": gib,
            "whole %": found[0],
            "by token %": found[1],
            "bound %": found[2],
            "by token / whole": found[1] / found[0] if found[0] else 1.0,
        }


if __name__ == "__main__":
    main()
