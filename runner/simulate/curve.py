"""The LRU hit rate at every capacity from one pass over a trace: Mattson's stack distances, and a sampled estimate.

LRU on a tree whose leaves go first is a stack algorithm: a cache of C blocks holds the C blocks used last, where a
request uses its blocks deepest first, so that a prefix is newer than what hangs below it. What a request finds is
settled when it arrives: a block is a hit in every cache of at least

    need = 1 + distinct blocks used since its own last use, up to the arrival of the request

blocks. (Counting distances while the request's blocks are being used, deepest first, would push each block down by its
own continuation and is wrong; the order matters for what the next request finds.) That is exact for any capacity, since
the blocks of one request that do not fit are the deepest ones.

The count is done offline and for all blocks at once. With `previous[y]` the place of the use before use y of the same
block, or -1, and S the place where the request's uses begin:

    distinct blocks used in (q, S)  =  S - q - 1 - #{y < S: previous[y] > q}

The last term asks "how many of the first S values are above q" for many (S, q): a wavelet matrix answers all of them
in one sweep over the bits, which takes the place of the Fenwick tree of the usual one-by-one pass.
O(n log n) time in NumPy, O(n) memory, n block references.

Sampling: SHARDS (Waldspurger et al., FAST 2015) keeps the blocks whose hash falls below a rate R, measures distances
among them and divides by R; the difference between the sampled and the expected number of references is put at distance
0 (their "adj"). The same is done for disjoint parts of the sample, and their spread gives the standard error.

A curve of LRU hit ratios as a table, as JSON and as a picture. This file never imports MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from runner.picture import new_figure, picture_bytes
from runner.text import GIB
from runner.traces.trace import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Disjoint parts of a sample, for its error.
PARTS = 8
#: A part with fewer references than this says nothing about the error.
_LEAST_PART_REFS = 50
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class References:
    """Every block reference of a trace, requests in order, each request's blocks from the root side down.

    Attributes:
        blocks: number of the block, in the order blocks first appear.
        tokens: tokens of the block that the request's prompt fills.
        first: index of the first reference of the request that a reference belongs to.
        last: one past the request's last reference.
    """

    blocks: Ints
    tokens: Ints
    first: Ints
    last: Ints

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, eq=False)
class Curve:
    """Hit ratios of LRU over capacity, a step function.

    Attributes:
        capacity_blocks: ascending capacities at which the ratio rises.
        block_hit_ratio: at and above each of them: block hits over block references.
        token_hit_ratio: at and above each of them: tokens of the blocks hit over prompt tokens.
        block_error: standard error of `block_hit_ratio` by sampling; None where nothing was sampled.
        block_refs, unique_blocks, prompt_tokens: of the whole trace.
        sample_rate: share of the blocks that were followed, 1 for all.
    """

    capacity_blocks: Ints
    block_hit_ratio: Floats
    token_hit_ratio: Floats
    block_error: Floats | None
    block_refs: int
    unique_blocks: int
    prompt_tokens: int
    sample_rate: float = 1.0

    def block_hit_ratio_at(self, capacity_blocks: float) -> float:
        """Share of block references that a cache of this capacity serves."""
        return _step(self.capacity_blocks, self.block_hit_ratio, capacity_blocks)

    def token_hit_ratio_at(self, capacity_blocks: float) -> float:
        """Share of prompt tokens in the blocks that a cache of this capacity serves."""
        return _step(self.capacity_blocks, self.token_hit_ratio, capacity_blocks)

    def block_error_at(self, capacity_blocks: float) -> float | None:
        """Standard error of `block_hit_ratio_at`, None where nothing was sampled."""
        return None if self.block_error is None else _step(self.capacity_blocks, self.block_error, capacity_blocks)

    @property
    def infinite_block_hit_ratio(self) -> float:
        """What a cache that never evicts serves."""
        return float(self.block_hit_ratio[-1]) if len(self.block_hit_ratio) else 0.0

    @property
    def infinite_token_hit_ratio(self) -> float:
        """What a cache that never evicts serves, by token."""
        return float(self.token_hit_ratio[-1]) if len(self.token_hit_ratio) else 0.0

    def capacity_for(self, share: float) -> int:
        """The smallest capacity with at least this share of the tokens an infinite cache serves; 0 if that is none."""
        enough = self.token_hit_ratio >= share * self.infinite_token_hit_ratio * (1 - 1e-12)
        return int(self.capacity_blocks[int(np.argmax(enough))]) if len(enough) else 0

    def knee_blocks(self) -> int:
        """Where more capacity stops paying: the point farthest above the chord of the curve, capacity on a linear axis.

        The definition of Satopaa et al., "Finding a Kneedle in a Haystack" (2011), without smoothing; the chord
        runs from the empty cache to the smallest capacity that reaches the infinite cache's hits.
        """
        if not len(self.capacity_blocks) or not self.infinite_block_hit_ratio:
            return 0
        above = self.block_hit_ratio / self.block_hit_ratio[-1] - self.capacity_blocks / self.capacity_blocks[-1]
        return int(self.capacity_blocks[int(np.argmax(above))])


def lru_curve(trace: Trace, *, sample_rate: float = 1.0, seed: int = 0) -> Curve:
    """The curve of a trace.

    Args:
        sample_rate: share of the blocks to follow, above 0 and at most 1; 1 is exact.
        seed: of the hash that picks them.

    Raises:
        ValueError: the trace or the sample is empty, or `sample_rate` is out of range.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate is {sample_rate:g}; wanted more than 0 and at most 1.")
    references = references_of(trace)
    if not len(references):
        raise ValueError(f"{trace.source}: no request to make a curve of.")
    if sample_rate == 1:
        return _exact(references)
    return _sampled(references, sample_rate, seed)


def references_of(trace: Trace) -> References:
    """All block references of a trace in one row."""
    lengths = np.fromiter((len(request.keys) for request in trace.requests), np.int64, len(trace.requests))
    keys = np.concatenate([request.keys for request in trace.requests]) if len(lengths) else np.empty(0, np.int64)
    ends = np.cumsum(lengths)
    tokens = np.full(len(keys), trace.block_tokens, np.int64)
    prompts = np.fromiter((request.tokens for request in trace.requests), np.int64, len(lengths))
    tokens[ends - 1] = prompts - (lengths - 1) * trace.block_tokens
    return References(_numbered(keys), tokens, np.repeat(ends - lengths, lengths), np.repeat(ends, lengths))


def needed_blocks(references: References) -> Ints:
    """The smallest capacity at which each reference is a hit; the largest int64 for a first use.

    Exact for a tree under LRU whose leaves go first and whose running request is never evicted.
    """
    # Place of each use in time: within a request deepest first.
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
    # Blocks last used one right after the other need one block more each: the first of such a run tells for all.
    is_head = np.ones(len(seen), bool)
    is_head[1:] = (starts[1:] != starts[:-1]) | (lasts[1:] != lasts[:-1] - 1)
    heads = np.flatnonzero(is_head)
    head_needs = starts[heads] - lasts[heads] - _count_above(previous, starts[heads], lasts[heads])
    run = np.cumsum(is_head) - 1
    needs[seen] = head_needs[run] + np.arange(len(seen)) - heads[run]
    return needs


def _exact(references: References) -> Curve:
    needs = needed_blocks(references)
    capacities, blocks, tokens = _steps(needs, references.tokens)
    prompt_tokens = int(references.tokens.sum())
    unique = int(references.blocks.max()) + 1
    return Curve(
        capacities, blocks / len(references), tokens / prompt_tokens, None, len(references), unique, prompt_tokens
    )


def _sampled(references: References, rate: float, seed: int) -> Curve:
    hashes, unique = _hashed(references.blocks, seed), int(references.blocks.max()) + 1
    if not (hashes < rate).any():
        raise ValueError(f"a sample of {rate:g} has none of the {unique:,} blocks; wanted a larger one.")
    whole = _estimate(references, hashes < rate, rate)
    capacities = whole[0]
    errors = np.full(len(capacities), np.nan)
    parts = [(hashes >= rate * part / PARTS) & (hashes < rate * (part + 1) / PARTS) for part in range(PARTS)]
    if min(int(part.sum()) for part in parts) >= _LEAST_PART_REFS:
        curves = [_estimate(references, part, rate / PARTS) for part in parts]
        ratios = np.stack([_steps_at(curve[0], curve[1], capacities) for curve in curves])
        errors = ratios.std(axis=0, ddof=1) / np.sqrt(PARTS)
    return Curve(
        *whole,
        errors,
        len(references),
        unique,
        int(references.tokens.sum()),
        rate,
    )


def _estimate(references: References, chosen: npt.NDArray[np.bool_], rate: float) -> tuple[Ints, Floats, Floats]:
    """Capacities and ratios from the references of some blocks, which are `rate` of all blocks."""
    sample = _only(references, chosen)
    needs = needed_blocks(sample)
    reused = needs != _NEVER
    needs[reused] = np.maximum(1, np.rint(needs[reused] / rate)).astype(np.int64)
    # A first step at capacity 1, however few blocks the sample has.
    capacities, blocks, tokens = _steps(np.append(needs, 1), np.append(sample.tokens, 0))
    blocks = blocks - 1
    # What is missing from (or too much in) the sample is taken to be the hottest blocks: hits at any capacity.
    expected_refs = rate * len(references)
    expected_tokens = rate * float(references.tokens.sum())
    block_ratio = (blocks + (expected_refs - len(sample))) / expected_refs
    token_ratio = (tokens + (expected_tokens - float(sample.tokens.sum()))) / expected_tokens
    return capacities, np.clip(block_ratio, 0, 1), np.clip(token_ratio, 0, 1)


def _only(references: References, chosen: npt.NDArray[np.bool_]) -> References:
    before = np.concatenate(([0], np.cumsum(chosen)))
    return References(
        references.blocks[chosen],
        references.tokens[chosen],
        before[references.first[chosen]],
        before[references.last[chosen]],
    )


def _steps(needs: Ints, tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """Capacities in ascending order with the block and token hits of each."""
    reused = needs != _NEVER
    capacities, index = np.unique(needs[reused], return_inverse=True)
    hits = np.bincount(index, minlength=len(capacities))
    # Whole numbers up to 2**53 pass through the float weights unharmed.
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

    A wavelet matrix, level by level from the highest bit and never kept: at each level the values stand in an order
    where each query's candidates are one run [low, high); the run goes on among the values with the bound's bit, and
    where that bit is 0 the values with a 1 are above the bound and counted.
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


def _numbered(keys: Ints) -> Ints:
    """Keys as numbers 0, 1, 2 ... in the order they first appear."""
    _, first_index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first_index), np.int64)
    rank[np.argsort(first_index, kind="stable")] = np.arange(len(first_index))
    return rank[inverse]


def _hashed(blocks: Ints, seed: int) -> Floats:
    """A number in [0, 1) for each block, by the finalizer of splitmix64."""
    value = blocks.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    value ^= value >> np.uint64(31)
    return (value >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _step(capacities: Ints, ratios: Floats, capacity: float) -> float:
    index = int(np.searchsorted(capacities, capacity, side="right")) - 1
    return float(ratios[index]) if index >= 0 else 0.0


def _steps_at(capacities: Ints, ratios: Floats, wanted: Ints | Sequence[int]) -> Floats:
    index = np.searchsorted(capacities, wanted, side="right") - 1
    return np.where(index >= 0, ratios[np.maximum(index, 0)], 0.0) if len(ratios) else np.zeros(len(wanted))


#: JSON and pictures hold at most so many points of a curve, even on a logarithmic axis.
MOST_POINTS = 400
FIGURE_INCHES = (10.0, 6.0)
COUNTS = (
    "Block hit ratio: blocks found in the cache over all blocks of all prompts. Token hit ratio: their tokens over all"
    " prompt tokens. LRU on whole blocks; what a running request uses is never evicted."
)


def capacities_of(curve: Curve) -> list[int]:
    """Round capacities, 1, 2 and 5 times the powers of ten, up to the first one that no more than all blocks fill."""
    capacities = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            capacities.append(factor * power)
            if factor * power >= curve.unique_blocks:
                return capacities
        power *= 10


def points_of(curve: Curve) -> list[int]:
    """Capacities for JSON and pictures: at most `MOST_POINTS`, with the knee and the round ones among them."""
    steps = curve.capacity_blocks
    if len(steps) > MOST_POINTS:
        wanted = np.geomspace(max(1, steps[0]), steps[-1], MOST_POINTS)
        steps = steps[np.unique(np.minimum(np.searchsorted(steps, wanted), len(steps) - 1))]
    special = [curve.knee_blocks(), curve.capacity_for(0.9), curve.capacity_for(0.99), *capacities_of(curve)]
    return sorted({int(step) for step in steps} | {capacity for capacity in special if capacity > 0})


def curve_rows(curve: Curve, capacities: list[int], block_bytes: int | None) -> list[dict[str, Any]]:
    """A row per capacity; `capacity_bytes` is None where the size of a block is not known."""
    return [
        {
            "capacity_blocks": capacity,
            "capacity_bytes": None if block_bytes is None else capacity * block_bytes,
            "block_hit_ratio": curve.block_hit_ratio_at(capacity),
            "token_hit_ratio": curve.token_hit_ratio_at(capacity),
            "block_error": curve.block_error_at(capacity),
        }
        for capacity in capacities
    ]


def curve_table(curve: Curve, trace: Trace, block_bytes: int | None) -> Table:
    """The round capacities, those where the ratio begins to rise and those where it is within reach of its end."""
    table = Table()
    headers = ["capacity\nblocks", "capacity\ntokens"]
    headers += [] if block_bytes is None else ["capacity\nGiB"]
    headers += ["block hit\nratio", "token hit\nratio"]
    headers += [] if curve.block_error is None else ["standard\nerror"]
    for header in headers:
        table.add_column(header, justify="right")
    least = int(curve.capacity_blocks[0]) if len(curve.capacity_blocks) else 1
    for row in curve_rows(curve, [c for c in capacities_of(curve) if c >= least], block_bytes):
        capacity = row["capacity_blocks"]
        cells = [f"{capacity:,}", f"{capacity * trace.block_tokens:,}"]
        cells += [] if block_bytes is None else [f"{row['capacity_bytes'] / GIB:,.2f}"]
        cells += [f"{row['block_hit_ratio']:.4f}", f"{row['token_hit_ratio']:.4f}"]
        cells += [] if curve.block_error is None else [_error_cell(row["block_error"])]
        table.add_row(*cells)
    return table


def curve_document(curve: Curve, trace: Trace, block_bytes: int | None, **about: Any) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "trace": trace.name,
        "policy": "lru",
        "requests": len(trace.requests),
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "block_refs": curve.block_refs,
        "unique_blocks": curve.unique_blocks,
        "prompt_tokens": curve.prompt_tokens,
        "is_timing_synthetic": trace.is_timing_synthetic,
        "skipped": len(trace.skipped),
        "sample_rate": curve.sample_rate,
        "infinite_block_hit_ratio": curve.infinite_block_hit_ratio,
        "infinite_token_hit_ratio": curve.infinite_token_hit_ratio,
        "knee_blocks": curve.knee_blocks(),
        "counts": COUNTS,
        "rows": [
            {**row, "block_error": None if row["block_error"] != row["block_error"] else row["block_error"]}
            for row in curve_rows(curve, points_of(curve), block_bytes)
        ],
        **about,
    }


def curve_picture(
    curve: Curve, trace: Trace, block_bytes: int | None, *, marks: dict[str, int], file_format: str
) -> bytes:
    """The curve over capacity, its error where it was sampled, and marked capacities; PNG, SVG or PDF."""
    figure = new_figure(*FIGURE_INCHES)
    axes = figure.subplots()
    unit_blocks, unit = (1.0, "blocks") if block_bytes is None else (GIB / block_bytes, "GiB")
    capacities = points_of(curve)
    positions = [capacity / unit_blocks for capacity in capacities]
    ratios = np.array([curve.block_hit_ratio_at(capacity) for capacity in capacities])
    axes.step(positions, ratios, where="post", color="#D55E00", label="LRU")
    if curve.block_error is not None:
        errors = np.array([curve.block_error_at(capacity) for capacity in capacities], dtype=float)
        axes.fill_between(
            positions, ratios - errors, ratios + errors, step="post", color="#D55E00", alpha=0.2, label="standard error"
        )
    axes.axhline(curve.infinite_block_hit_ratio, color="black", linestyle=":", linewidth=1.2, label="infinite cache")
    for (name, capacity), color in zip(marks.items(), ("#0072B2", "#009E73", "#CC79A7", "#56B4E9"), strict=False):
        axes.axvline(capacity / unit_blocks, color=color, linestyle="--", linewidth=1, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, max(0.01, 1.08 * curve.infinite_block_hit_ratio))
    axes.set_xlabel(f"capacity, {unit} of {trace.block_tokens} tokens" if unit == "blocks" else "capacity, GiB")
    axes.set_ylabel("block hit ratio: blocks found / blocks asked for")
    synthetic = ", synthetic arrivals" if trace.is_timing_synthetic else ""
    axes.set_title(f"{trace.name}: {len(trace.requests):,} requests{synthetic}", parse_math=False)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="upper left")
    return picture_bytes(figure, file_format)


def _error_cell(error: float) -> str:
    return f"{error:.4f}" if error == error else "unknown"
