"""Compare the hit rate of models that cannot be cut at every token with the upper bound at the same budget.

The simulator, the deployed cache with sizes in place of arrays, runs traces with LRU and the sizes of two models in
bfloat16:

    windows     Gemma 3 12B: 8 layers of full attention, 40 layers with a window of 1,024 tokens
    recurrent   Qwen3-Next 80B: 12 layers of full attention, 36 layers with 2 MiB of state per checkpoint

    plain       each checkpoint holds the whole window of every layer; only the policy evicts checkpoints
    thinned     the same, but checkpoints that cost more than they are worth are dropped first
    radixcache  each token of a window is stored once; requests resume wherever a whole window is stored
    bound       windows and states take no bytes: the hit rate of full attention alone

The traces are those of bench_policies. Without them, the benchmark uses a made-up trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from benchmarks.harness.record import arguments, publish, say
from benchmarks.harness.recorded_traces import add_traces, traces_in
from radixcache.tree import state_tree as entries
from runner.models.footprint import ModelBytes
from runner.simulate.simulator import BlockSizes, simulate
from runner.traces.trace import Trace

#: Bytes per token of all full-attention layers, bytes of recurrent state, and windows as (tokens, bytes per token of
#: all layers with that window).
MODELS = {
    "windows": ModelBytes("gemma3", 65_536, 0, ((1_024, 327_680),), "bfloat16"),
    "recurrent": ModelBytes("qwen3_next", 24_576, 36 << 21, (), "bfloat16"),
}
BUDGETS_GIB = (10, 20, 45, 90, 180)
#: The aim: hits of `radixcache` divided by hits of `plain`, at a tight budget.
AIM = 1.3


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=add_traces)
    budgets = (1, 4) if options.quick else BUDGETS_GIB
    traces = traces_in(options.traces, options.quick)
    rows = [_measure(name, trace, gib) for name in MODELS for trace in traces for gib in budgets]
    title = "Hit rate of models with windows or recurrent layers, %"
    publish("windows", title, rows, folder=options.results, repeats=1, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Name the largest and the smallest gain."""
    best, worst = (choose(rows, key=lambda row: float(row["radixcache / plain"])) for choose in (max, min))
    said = [
        f"{row['radixcache / plain']:.2f} at {row['budget GiB']} GiB ({row['model']}, {row['trace']})"
        for row in (best, worst)
    ]
    found = f"Ratio of found tokens, radixcache / plain: at most {said[0]}, at least {said[1]}"
    return f"{found}. Aim at a tight budget: {AIM}."


def _measure(name: str, trace: Trace, gib: int) -> dict[str, Any]:
    model = MODELS[name]
    sizes = BlockSizes.of(model, trace.block_tokens)
    whole_bytes = model.state_bytes + sum(tokens * nbytes for tokens, nbytes in model.windows)
    whole = BlockSizes(sizes.span_bytes, whole_bytes, is_counting=False)

    def found(sizes: BlockSizes) -> float:
        return 100 * simulate(trace, "lru", gib << 30, sizes).token_hit_ratio

    with patch.object(entries, "WORTH", 0):
        every = found(whole)
    now, bound = found(sizes), found(BlockSizes(sizes.span_bytes, is_counting=False))
    say(f"{name}, {trace.name} at {gib} GiB: {every:.1f}, now {now:.1f} of {bound:.1f} %")
    return {
        "model": name,
        "trace": trace.name,
        "budget GiB": gib,
        "plain %": every,
        "thinned %": found(whole) if model.windows else now,
        "radixcache %": now,
        "bound %": bound,
        "radixcache / plain": now / every if every else 1.0,
    }


if __name__ == "__main__":
    main()
