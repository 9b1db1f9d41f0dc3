"""Cascade attention: a segment that several rows share is read once for all of them, and each row's tail by itself.

    queries (R, Hq, T, D)     segment   keys (1, H, S, D)    queries of its rows side by side: one product for all
                              tails     keys (R, H, C, D)    a product per row

All parts of a row are one softmax: they have one maximum, and their sums are added up, in float32.

A model comes here through the global `scaled_dot_product_attention` of its module, which `serve` replaces once: keys
that a pass of ours has handed out are attended here, all others where they always were.

Source: Juravsky et al. 2024, Hydragen; Ye et al. 2025, FlashInfer; mlx_lm.models.base, mlx-lm 0.32.2.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

NAME = "scaled_dot_product_attention"
#: Queries of a row that are attended at a time: what those behind them alone may see is left out.
BLOCK_TOKENS = 64
#: From so many rows on those that read a segment lie one below the other for it, which takes copies.
FEWEST_STACKED = 3
#: From so many scores on several kernels with a fast exponential beat one with a slow one.
FEWEST_POWERS = 4096
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def exponential() -> Callable[[mx.array], mx.array]:
    """What takes e to the power of each; on x86 MLX's own is three times as slow (24 and 9 ns a value, mlx 0.32.4)."""
    return partial(mx.power, math.e) if has_slow_exp() else mx.exp


def has_slow_exp() -> bool:
    """Whether MLX's exponential is slower here than a power."""
    return IS_X86 and is_on_cpu()


def is_on_cpu() -> bool:
    """Whether MLX evaluates on its CPU backend."""
    return bool(mx.default_device() == mx.cpu)


#: Keys (1, H, S, D) and values (1, H, S, Dv) of a segment.
Pair = tuple[mx.array, mx.array]


class Level(NamedTuple):
    """Segments that no row has two of, so that what rows get from them can be laid side by side.

    Attributes:
        segments: their numbers.
        absent: how many rows have none of them.
        places: where each row's part is in the order of segments and absent ones; None: in that of the rows.
    """

    segments: list[int]
    absent: int
    places: mx.array | None


class Plan:
    """Which rows of a batch read which segments, worked out once for all layers.

    Args:
        rows: how many there are.
        readers: of each segment the rows; None: all of them.
    """

    def __init__(self, rows: int, readers: Sequence[tuple[int, ...] | None]) -> None:
        self.rows = rows
        self._takes = [None if each is None else _taking(each) for each in readers]
        taken: list[tuple[set[int], list[int]]] = []
        for number, each in enumerate(readers):
            its = set(range(rows) if each is None else each)
            for known, numbers in taken:
                if not known & its:
                    known |= its
                    numbers.append(number)
                    break
            else:
                taken.append((its, [number]))
        self.levels = []
        for known, numbers in taken:
            order = [row for number in numbers for row in (readers[number] or range(rows))]
            order += [row for row in range(rows) if row not in known]
            in_order = order == list(range(rows))
            places = None if in_order else mx.array(sorted(range(rows), key=order.__getitem__))
            self.levels.append(Level(numbers, rows - len(known), places))
        self._is_whole = all(takes is None for takes in self._takes)

    def of_rows(self, array: mx.array, segment: int) -> mx.array:
        """What of an array (R, ...) is of the rows of a segment."""
        takes = self._takes[segment]
        return array if takes is None else array[takes]

    def laid_out(self, parts: Sequence[mx.array], blank: float) -> list[mx.array]:
        """For each level what all rows have (R, ...), from what the rows of each segment have (n, ...)."""
        if self._is_whole:
            return [*parts]
        found = []
        for level in self.levels:
            columns = [parts[number] for number in level.segments]
            if level.absent:
                columns.append(mx.full((level.absent, *columns[0].shape[1:]), blank, columns[0].dtype))
            joined = columns[0] if len(columns) == 1 else mx.concatenate(columns)
            found.append(joined if level.places is None else joined[level.places])
        return found


#: Attends for the keys that it has handed out: queries, scale, mask, sinks -> output.
Attend = Callable[[mx.array, mx.array, float, Any, mx.array | None], mx.array]


class _Handed(threading.local):
    """By the id of keys that are being handed out on this thread: who attends."""

    def __init__(self) -> None:
        self.by_keys: dict[int, Attend] = {}


handed = _Handed()


def serve(model: nn.Module) -> None:
    """Let every attention of a model that goes through its module's global ask for keys that were handed out."""
    for name in {type(module).__module__ for module in model.modules()}:
        stock = getattr(sys.modules.get(name), NAME, None)
        if stock is not None and not hasattr(stock, "is_served"):
            setattr(sys.modules[name], NAME, _served(stock))


def _served(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(stock)
    def attention(queries: mx.array, keys: Any, values: Any, *others: Any, **named: Any) -> mx.array:
        attend = handed.by_keys.get(id(keys))
        if attend is None:
            return stock(queries, keys, values, *others, **named)
        return _asked(attend, queries, values, *others, **named)

    attention.is_served = True  # type: ignore[attr-defined]
    return attention


def _asked(
    attend: Attend, queries: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    return attend(queries, values, scale, mask, sinks)


def cascade(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    plan: Plan,
    segments: Sequence[Pair],
    *,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention (R, Hq, T, Dv) over segments and tails.

    Args:
        queries: (R, Hq, T, D).
        keys, values: of the tails, (R, H, C, D) and (R, H, C, Dv), Hq a multiple of H.
        mask: bool, what of the tails is seen, for every head: (R, 1, T, C), or (T, C), where the last T columns are the
            queries' own tokens, of which none is seen before its time; None: all of them, by one token.
        sinks: (Hq,), a score of each head that takes weight and has no value; None: there is none.
    """
    tokens, columns = queries.shape[2], keys.shape[2]
    if tokens == 1:
        return _cascade(queries, (keys, values), plan, segments, scale, mask, sinks)
    blocks = []
    for start in range(0, tokens, BLOCK_TOKENS):
        block = slice(start, min(start + BLOCK_TOKENS, tokens))
        seen = slice(columns - tokens + block.stop)
        own = keys[..., seen, :], values[..., seen, :]
        its = None if mask is None else mask[..., block, seen]
        blocks.append(_cascade(queries[:, :, block], own, plan, segments, scale, its, sinks))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def _cascade(
    queries: mx.array,
    tails: Pair,
    plan: Plan,
    segments: Sequence[Pair],
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    keys, values = tails
    rows, query_heads, tokens, _ = queries.shape
    heads = keys.shape[1]
    # (R, H, G * T, D): the queries of a head's group one below the other.
    grouped = (queries * scale).reshape(rows, heads, query_heads // heads * tokens, -1)
    own = _masked(_scores(grouped, keys), mask, tokens)
    if rows == tokens == 1:
        output = _side_by_side([*(_scores(grouped, each) for each, _ in segments), own], [*segments, tails], sinks)
        return output.astype(queries.dtype).reshape(rows, query_heads, tokens, -1)
    shared = [_scores(_stacked(plan.of_rows(grouped, number)), segment[0]) for number, segment in enumerate(segments)]
    maxima = [mx.max(own, axis=-1, keepdims=True)]
    maxima += plan.laid_out([_unstacked(mx.max(each, axis=-1, keepdims=True), grouped) for each in shared], -mx.inf)
    if sinks is not None:
        maxima.append(mx.repeat(sinks.astype(mx.float32), tokens).reshape(1, heads, -1, 1))
    maximum = reduce(mx.maximum, maxima)
    exp = exponential()
    weights = exp(own - maximum)
    totals, found = [mx.sum(weights, axis=-1, keepdims=True)], [_product(weights, values)]
    if sinks is not None:
        totals.append(exp(maxima[-1] - maximum))
    weighed = [exp(each - _stacked(plan.of_rows(maximum, number))) for number, each in enumerate(shared)]
    totals += plan.laid_out([_unstacked(mx.sum(each, axis=-1, keepdims=True), grouped) for each in weighed], 0)
    products = [_product(each, pair[1]) for each, pair in zip(weighed, segments, strict=True)]
    found += plan.laid_out([_unstacked(each, grouped) for each in products], 0)
    output = reduce(mx.add, found) / reduce(mx.add, totals)
    return output.astype(queries.dtype).reshape(rows, query_heads, tokens, -1)


def _side_by_side(scores: list[mx.array], parts: Sequence[Pair], sinks: mx.array | None) -> mx.array:
    """Attention (1, H, G, Dv) of one token: side by side the scores of all parts, (1, H, G, S), take fewer kernels."""
    ends = [*accumulate(each.shape[-1] for each in scores)]
    if sinks is not None:
        scores = [*scores, sinks.astype(mx.float32).reshape(*scores[0].shape[:-1], 1)]
    weights = _softmax(scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1))
    spans = zip(pairwise([0, *ends]), parts, strict=True)
    return reduce(mx.add, [_product(weights[..., start:stop], values) for (start, stop), (_, values) in spans])


def _softmax(scores: mx.array) -> mx.array:
    if scores.size < FEWEST_POWERS or not has_slow_exp():
        return mx.softmax(scores, axis=-1)
    weights = exponential()(scores - mx.max(scores, axis=-1, keepdims=True))
    return weights / mx.sum(weights, axis=-1, keepdims=True)


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """(..., M, S) in float32, by (..., M, D) and (..., S, D); OpenBLAS is the faster one with many rows on the left."""
    if queries.shape[-2] == 1:
        return (keys @ queries.swapaxes(-1, -2)).swapaxes(-1, -2).astype(mx.float32)
    return (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)


def _taking(rows: Sequence[int]) -> slice | mx.array:
    """What takes these rows out of an array; neighbours without a copy."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if [*rows] == [*range(first, last + 1)] else mx.array([*rows])


def _product(weights: mx.array, values: mx.array) -> mx.array:
    return (weights.astype(values.dtype) @ values).astype(mx.float32)


def _masked(scores: mx.array, mask: mx.array | None, tokens: int) -> mx.array:
    if mask is None:
        return scores
    if tokens > 1:
        rows, heads, queries, columns = scores.shape
        apart = scores.reshape(rows, heads, queries // tokens, tokens, columns)
        return mx.where(mask if mask.ndim == 2 else mask[:, :, None], apart, -mx.inf).reshape(scores.shape)
    return mx.where(mask, scores, -mx.inf)


def _stacked(array: mx.array) -> mx.array:
    """(R, H, G, D) as (1, H, R * G, D): the rows of a head one below the other, where that is worth it."""
    rows, heads, group, width = array.shape
    if rows < FEWEST_STACKED:
        return array
    return array.swapaxes(0, 1).reshape(1, heads, rows * group, width)


def _unstacked(array: mx.array, like: mx.array) -> mx.array:
    """(1, H, n * G, W) as (n, H, G, W), which it may be, with a group as large as that of `like`, (R, H, G, D)."""
    rows, heads, stacked, width = array.shape
    group = like.shape[2]
    if rows > 1 or stacked == group:
        return array
    return array.reshape(heads, stacked // group, group, width).swapaxes(0, 1)
