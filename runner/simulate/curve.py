"""Curve: the hit ratio of LRU at every capacity, from one pass over a trace, by Mattson's stack distances.

LRU on a tree that evicts leaves first is a stack algorithm: a cache of C blocks holds the C blocks used last. A request
uses its blocks deepest first, so a prefix is newer than its continuations. When a request arrives, a block is a hit in
every cache of at least

    need = 1 + distinct blocks used since the last use of this block

blocks. This is exact for any capacity: if a request does not fit, its deepest blocks are left out.

Each use of a block has a place in time. Let `previous[y]` be the place at which the block of use y was used before, or
-1. Let S be the place of a request's first use. Then:

    distinct blocks used in (q, S)  =  S - q - 1 - #{y < S: previous[y] > q}

A wavelet matrix counts the last term for all (S, q) in one pass over the bits. For n block references, that takes
O(n log n) time in NumPy and O(n) memory. This file never imports MLX.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runner.simulate.rows import RATIO_LABEL
from runner.text import GIB, new_figure, picture_bytes
from runner.traces.trace import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NEVER = np.iinfo(np.int64).max
#: Most points of a curve in JSON and pictures.
MOST_POINTS = 400
FIGURE_INCHES = (10.0, 6.0)
CURVE_COUNTS = (
    "Block hit ratio: share of prompt blocks found in the cache. Token hit ratio: share of prompt tokens in these"
    " blocks. LRU on whole blocks; blocks of a running request are not evicted."
)


@dataclass(frozen=True, eq=False)
class References:
    """Every block reference of a trace, in the order of the requests and, within a request, from the root down.

    For each: the number of the block by first use, its prompt tokens, and the references [first, last) of its request.
    """

    blocks: Ints
    tokens: Ints
    first: Ints
    last: Ints

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, eq=False)
class Curve:
    """Hit ratios of LRU over capacity, a step function: each ratio holds from its capacity up to the next one.

    Attributes:
        block_hit_ratio, token_hit_ratio: block hits / block references; tokens of the blocks hit / prompt tokens.
    """

    capacity_blocks: Ints
    block_hit_ratio: Floats
    token_hit_ratio: Floats
    block_refs: int
    unique_blocks: int
    prompt_tokens: int

    def block_hit_ratio_at(self, capacity_blocks: float) -> float:
        return _step(self.capacity_blocks, self.block_hit_ratio, capacity_blocks)

    def token_hit_ratio_at(self, capacity_blocks: float) -> float:
        return _step(self.capacity_blocks, self.token_hit_ratio, capacity_blocks)

    @property
    def infinite_block_hit_ratio(self) -> float:
        return self.block_hit_ratio_at(np.inf)

    @property
    def infinite_token_hit_ratio(self) -> float:
        return self.token_hit_ratio_at(np.inf)

    def capacity_for(self, share: float) -> int:
        """The smallest capacity with this share of the tokens that an infinite cache finds; 0: it finds none."""
        enough = self.token_hit_ratio >= share * self.infinite_token_hit_ratio * (1 - 1e-12)
        return int(self.capacity_blocks[int(np.argmax(enough))]) if len(enough) else 0

    def knee_blocks(self) -> int:
        """The capacity where the curve is farthest above its chord; 0 without hits.

        As in Satopaa et al., "Finding a Kneedle in a Haystack" (2011), without smoothing, on a linear axis. The chord
        goes from an empty cache to the smallest capacity that has all hits of an infinite cache.
        """
        if not len(self.capacity_blocks) or not self.infinite_block_hit_ratio:
            return 0
        above = self.block_hit_ratio / self.block_hit_ratio[-1] - self.capacity_blocks / self.capacity_blocks[-1]
        return int(self.capacity_blocks[int(np.argmax(above))])


def lru_curve(trace: Trace) -> Curve:
    """The curve of a trace. ValueError: the trace is empty."""
    references = references_of(trace)
    if not len(references):
        raise ValueError(f"{trace.source}: no requests; wanted at least one.")
    unique, prompt_tokens = int(references.blocks.max()) + 1, int(references.tokens.sum())
    capacities, blocks, tokens = _steps(needed_blocks(references), references.tokens)
    ratios = blocks / len(references), tokens / prompt_tokens
    return Curve(capacities, *ratios, len(references), unique, prompt_tokens)


def references_of(trace: Trace) -> References:
    lengths = np.fromiter((len(request.keys) for request in trace.requests), np.int64, len(trace.requests))
    keys = np.concatenate([request.keys for request in trace.requests]) if len(lengths) else np.empty(0, np.int64)
    ends = np.cumsum(lengths)
    tokens = np.full(len(keys), trace.block_tokens, np.int64)
    prompts = np.fromiter((request.tokens for request in trace.requests), np.int64, len(lengths))
    tokens[ends - 1] = prompts - (lengths - 1) * trace.block_tokens
    return References(_number_by_first_use(keys), tokens, np.repeat(ends - lengths, lengths), np.repeat(ends, lengths))


def needed_blocks(references: References) -> Ints:
    """The smallest capacity at which each reference is a hit; the largest int64 for a first use."""
    # Places in time: within a request, the deepest block is used first.
    places = references.first + references.last - 1 - np.arange(len(references), dtype=np.int64)
    by_place = np.empty_like(references.blocks)
    by_place[places] = references.blocks
    previous = _previous_uses(by_place)
    own_previous = previous[places]
    needs = np.full(len(references), _NEVER, np.int64)
    seen = np.flatnonzero(own_previous >= 0)
    if not len(seen):
        return needs
    starts, lasts = references.first[seen], own_previous[seen]
    # If the last uses of blocks were one after another, each needs 1 more than the block before: compute the first.
    is_head = np.ones(len(seen), bool)
    is_head[1:] = (starts[1:] != starts[:-1]) | (lasts[1:] != lasts[:-1] - 1)
    heads = np.flatnonzero(is_head)
    head_needs = starts[heads] - lasts[heads] - _count_above(previous, starts[heads], lasts[heads])
    run = np.cumsum(is_head) - 1
    needs[seen] = head_needs[run] + np.arange(len(seen)) - heads[run]
    return needs


def _steps(needs: Ints, tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """Ascending capacities, and the block and token hits of each."""
    reused = needs != _NEVER
    capacities, index = np.unique(needs[reused], return_inverse=True)
    hits = np.bincount(index, minlength=len(capacities))
    # Float weights are exact for whole numbers up to 2**53.
    token_hits = np.bincount(index, weights=tokens[reused], minlength=len(capacities)).astype(np.int64)
    return capacities, np.cumsum(hits), np.cumsum(token_hits)


def _previous_uses(blocks: Ints) -> Ints:
    """For each use, the index of the use before it of the same block, or -1."""
    order = np.argsort(blocks, kind="stable")
    same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(blocks), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _count_above(values: Ints, lengths: Ints, bounds: Ints) -> Ints:
    """For each query, how many of the first `lengths` values are above its bound.

    A wavelet matrix, built level by level from the highest bit and never stored. At each level a query's candidates are
    one run [low, high) of the values. If the bit of the bound is 0, candidates with a 1 are above the bound and are
    counted. Candidates with the same bit as the bound remain for the next level.
    """
    # -1, the mark of a first use, becomes 0.
    values, bounds = values + 1, bounds + 1
    counts = np.zeros(len(bounds), np.int64)
    low, high = np.zeros(len(bounds), np.int64), lengths.copy()
    for bit in reversed(range(int(values.max(initial=0)).bit_length())):
        ones = (values >> bit) & 1
        ones_before = np.concatenate(([0], np.cumsum(ones)))
        zeros = len(values) - int(ones_before[-1])
        low_ones, high_ones = ones_before[low], ones_before[high]
        bound_is_one = ((bounds >> bit) & 1).astype(bool)
        counts += np.where(bound_is_one, 0, high_ones - low_ones)
        low = np.where(bound_is_one, zeros + low_ones, low - low_ones)
        high = np.where(bound_is_one, zeros + high_ones, high - high_ones)
        is_one = ones.astype(bool)
        values = np.concatenate((values[~is_one], values[is_one]))
    return counts


def _number_by_first_use(keys: Ints) -> Ints:
    _, first_index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first_index), np.int64)
    rank[np.argsort(first_index, kind="stable")] = np.arange(len(first_index))
    return rank[inverse]


def _step(capacities: Ints, ratios: Floats, capacity: float) -> float:
    index = int(np.searchsorted(capacities, capacity, side="right")) - 1
    return float(ratios[index]) if index >= 0 else 0.0


def points_of(curve: Curve) -> list[int]:
    """Capacities for JSON and pictures: at most `MOST_POINTS` steps, the named budgets, one block and all blocks."""
    steps = curve.capacity_blocks
    if len(steps) > MOST_POINTS:
        wanted = np.geomspace(max(1, steps[0]), steps[-1], MOST_POINTS)
        steps = steps[np.unique(np.minimum(np.searchsorted(steps, wanted), len(steps) - 1))]
    special = [1, curve.knee_blocks(), curve.capacity_for(0.9), curve.capacity_for(0.99), curve.unique_blocks]
    return sorted({int(step) for step in steps} | {capacity for capacity in special if capacity > 0})


def curve_rows(curve: Curve) -> list[dict[str, float]]:
    return [
        {
            "capacity_blocks": capacity,
            "block_hit_ratio": curve.block_hit_ratio_at(capacity),
            "token_hit_ratio": curve.token_hit_ratio_at(capacity),
        }
        for capacity in points_of(curve)
    ]


def curve_picture(
    curve: Curve, trace: Trace, block_bytes: int | None, *, marks: dict[str, int], file_format: str
) -> bytes:
    figure = new_figure(*FIGURE_INCHES)
    axes = figure.subplots()
    unit_blocks = 1.0 if block_bytes is None else GIB / block_bytes
    rows = curve_rows(curve)
    positions, ratios = ([row[name] for row in rows] for name in ("capacity_blocks", "block_hit_ratio"))
    axes.step([each / unit_blocks for each in positions], ratios, where="post", color="#D55E00", label="LRU")
    axes.axhline(curve.infinite_block_hit_ratio, color="black", linestyle=":", linewidth=1.2, label="infinite cache")
    for (name, capacity), color in zip(marks.items(), ("#0072B2", "#009E73", "#CC79A7", "#56B4E9"), strict=False):
        axes.axvline(capacity / unit_blocks, color=color, linestyle="--", linewidth=1, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, max(0.01, 1.08 * curve.infinite_block_hit_ratio))
    axes.set_xlabel(f"capacity, {f'blocks of {trace.block_tokens} tokens' if block_bytes is None else 'GiB'}")
    axes.set_ylabel(RATIO_LABEL)
    synthetic = ", synthetic arrivals" if trace.is_timing_synthetic else ""
    axes.set_title(f"{trace.name}: {len(trace.requests):,} requests{synthetic}", parse_math=False)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="upper left")
    return picture_bytes(figure, file_format)
