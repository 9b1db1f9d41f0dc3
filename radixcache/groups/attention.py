"""Cascade attention: read a segment once for all rows that share it, and each row's tail by itself.

    queries (R, Hq, T, D)     segment   keys (1, H, S, D)    one product for the queries of all its rows
                              tails     keys (R, H, C, D)    one product per row

All parts of a row together are one softmax: they share one maximum, and their sums are added in float32.

`serve` replaces the global `scaled_dot_product_attention` of a model's modules, once. Calls with keys that a running
pass has handed out then go to cascade attention. All other calls go to mlx-lm's own function.

Source: Juravsky et al. 2024, Hydragen; Ye et al. 2025, FlashInfer; mlx_lm.models.base, mlx-lm 0.32.2.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

NAME = "scaled_dot_product_attention"
#: Most tokens of a row in one block. A block does not read keys after its last token.
BLOCK_TOKENS = 64
#: From this many rows per segment on, the queries of these rows are stacked. Stacking copies them.
FEWEST_STACKED = 3
#: From this many scores on, several kernels with a fast exponential are faster than one kernel with a slow one.
FEWEST_POWERS = 4096
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

#: Keys (1, H, S, D) and values (1, H, S, Dv) of a segment.
Pair = tuple[mx.array, mx.array]
#: mlx-lm's attention function.
Attention = Callable[..., mx.array]


def is_on_cpu() -> bool:
    """Whether MLX evaluates on its CPU backend."""
    return bool(mx.default_device() == mx.cpu)


def has_slow_exp() -> bool:
    """Whether MLX's exponential is slower than a power: on x86 CPUs (24 and 9 ns a value, mlx 0.32.4)."""
    return IS_X86 and is_on_cpu()


class Readers:
    """Which rows of a batch read which segments (None: all rows), computed once for all layers."""

    def __init__(self, rows: int, readers: Sequence[tuple[int, ...] | None]) -> None:
        self._indices = [None if each is None else _index_of(each) for each in readers]
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
        #: No row reads two segments of a level, so one array holds the results of all rows. Each level has its
        #: segments' numbers, how many rows read none of them, and each row's place in the array (None: in row order).
        self.levels: list[tuple[list[int], int, mx.array | None]] = []
        for known, numbers in taken:
            order = [row for number in numbers for row in (readers[number] or range(rows))]
            order += [row for row in range(rows) if row not in known]
            in_order = order == list(range(rows))
            places = None if in_order else mx.array(sorted(range(rows), key=order.__getitem__))
            self.levels.append((numbers, rows - len(known), places))
        self._is_whole = all(index is None for index in self._indices)

    def rows_of(self, array: mx.array, segment: int) -> mx.array:
        """The part of an array (R, ...) that belongs to the rows of a segment."""
        index = self._indices[segment]
        return array if index is None else array[index]

    def laid_out(self, parts: Sequence[mx.array], blank: float) -> list[mx.array]:
        """Join each segment's array (n, ...) into one array (R, ...) per level; rows without a segment get `blank`."""
        if self._is_whole:
            return [*parts]
        found = []
        for segments, absent, places in self.levels:
            columns = [parts[number] for number in segments]
            if absent:
                columns.append(mx.full((absent, *columns[0].shape[1:]), blank, columns[0].dtype))
            joined = columns[0] if len(columns) == 1 else mx.concatenate(columns)
            found.append(joined if places is None else joined[places])
        return found


class HandedOut(threading.local):
    """TailLayer.attend by the id of the keys that a pass on this thread has handed out."""

    def __init__(self) -> None:
        self.by_keys: dict[int, Callable[..., mx.array]] = {}


handed_out = HandedOut()


def serve(model: nn.Module) -> None:
    """Replace the attention function of all modules of a model."""
    replace_attention(model, _serve_layer, "is_served")


def replace_attention(model: nn.Module, replaced: Callable[[Attention], Attention], mark: str) -> None:
    """Replace the attention function of all modules of a model, except where it has an attribute `mark`."""
    for name in {type(module).__module__ for module in model.modules()}:
        stock = getattr(sys.modules.get(name), NAME, None)
        if stock is not None and not hasattr(stock, mark):
            attention = wraps(stock)(replaced(stock))
            setattr(attention, mark, True)
            setattr(sys.modules[name], NAME, attention)


def _serve_layer(stock: Attention) -> Attention:
    def attention(queries: mx.array, keys: Any, values: Any, *others: Any, **named: Any) -> mx.array:
        attend = handed_out.by_keys.get(id(keys))
        if attend is None:
            return stock(queries, keys, values, *others, **named)
        return attend(queries, values, *others, **named)

    return attention


def cascade(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    readers: Readers,
    segments: Sequence[Pair],
    *,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention (R, Hq, T, Dv) of queries (R, Hq, T, D) over segments and tails.

    Args:
        keys, values: of the tails, (R, H, C, D) and (R, H, C, Dv), Hq a multiple of H.
        mask: bool, which columns of the tails a token sees: (R, 1, T, C) or (T, C). The last T columns are the tokens
            of the queries. None: one token, which sees all columns.
        sinks: (Hq,), one more score per head; it takes part in the softmax and has no value.
    """
    rows, query_heads, tokens, _ = queries.shape
    if tokens > BLOCK_TOKENS:
        blocks = []
        for start in range(0, tokens, BLOCK_TOKENS):
            block = slice(start, min(start + BLOCK_TOKENS, tokens))
            seen = slice(keys.shape[2] - tokens + block.stop)
            part, tail = queries[:, :, block], (keys[..., seen, :], values[..., seen, :])
            its = None if mask is None else mask[..., block, seen]
            blocks.append(cascade(part, *tail, readers, segments, scale=scale, mask=its, sinks=sinks))
        return mx.concatenate(blocks, axis=2)
    heads = keys.shape[1]
    # (R, H, G * T, D): the queries of the G heads that share one kv head, stacked.
    grouped = (queries * scale).reshape(rows, heads, query_heads // heads * tokens, -1)
    own = _mask(_scores(grouped, keys), mask, tokens)
    if rows == tokens == 1:
        scores = [*(_scores(grouped, each) for each, _ in segments), own]
        output = _side_by_side(scores, [*segments, (keys, values)], sinks)
        return output.astype(queries.dtype).reshape(rows, query_heads, tokens, -1)
    shared = [_scores(_stack(readers.rows_of(grouped, number)), segment[0]) for number, segment in enumerate(segments)]
    maxima = [mx.max(own, axis=-1, keepdims=True)]
    maxima += readers.laid_out([_unstack(mx.max(each, axis=-1, keepdims=True), grouped) for each in shared], -mx.inf)
    if sinks is not None:
        maxima.append(mx.repeat(sinks.astype(mx.float32), tokens).reshape(1, heads, -1, 1))
    maximum = reduce(mx.maximum, maxima)
    exp = _exp if has_slow_exp() else mx.exp
    weights = exp(own - maximum)
    totals, found = [mx.sum(weights, axis=-1, keepdims=True)], [_product(weights, values)]
    if sinks is not None:
        totals.append(exp(maxima[-1] - maximum))
    weighed = [exp(each - _stack(readers.rows_of(maximum, number))) for number, each in enumerate(shared)]
    totals += readers.laid_out([_unstack(mx.sum(each, axis=-1, keepdims=True), grouped) for each in weighed], 0)
    products = [_product(each, pair[1]) for each, pair in zip(weighed, segments, strict=True)]
    found += readers.laid_out([_unstack(each, grouped) for each in products], 0)
    output = reduce(mx.add, found) / reduce(mx.add, totals)
    return output.astype(queries.dtype).reshape(rows, query_heads, tokens, -1)


def _side_by_side(scores: list[mx.array], parts: Sequence[Pair], sinks: mx.array | None) -> mx.array:
    """Attention (1, H, G, Dv) of one token of one row, with all scores (1, H, G, S) in one array, for speed."""
    ends = [*accumulate(each.shape[-1] for each in scores)]
    if sinks is not None:
        scores = [*scores, sinks.astype(mx.float32).reshape(*scores[0].shape[:-1], 1)]
    weights = _softmax(scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1))
    spans = zip(pairwise([0, *ends]), parts, strict=True)
    return reduce(mx.add, [_product(weights[..., start:stop], values) for (start, stop), (_, values) in spans])


def _exp(array: mx.array) -> mx.array:
    return mx.power(math.e, array)


def _softmax(scores: mx.array) -> mx.array:
    if scores.size < FEWEST_POWERS or not has_slow_exp():
        return mx.softmax(scores, axis=-1)
    weights = _exp(scores - mx.max(scores, axis=-1, keepdims=True))
    return weights / mx.sum(weights, axis=-1, keepdims=True)


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """Scores (..., M, S) in float32. For one query, keys are on the left: OpenBLAS is faster with many rows there."""
    if queries.shape[-2] == 1:
        return (keys @ queries.swapaxes(-1, -2)).swapaxes(-1, -2).astype(mx.float32)
    return (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)


def _index_of(rows: Sequence[int]) -> slice | mx.array:
    """An index of some rows: a slice if they are consecutive, as it needs no copy."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if [*rows] == [*range(first, last + 1)] else mx.array([*rows])


def _product(weights: mx.array, values: mx.array) -> mx.array:
    return (weights.astype(values.dtype) @ values).astype(mx.float32)


def _mask(scores: mx.array, mask: mx.array | None, tokens: int) -> mx.array:
    if mask is None:
        return scores
    if tokens > 1:
        rows, heads, queries, columns = scores.shape
        apart = scores.reshape(rows, heads, queries // tokens, tokens, columns)
        return mx.where(mask if mask.ndim == 2 else mask[:, :, None], apart, -mx.inf).reshape(scores.shape)
    return mx.where(mask, scores, -mx.inf)


def _stack(array: mx.array) -> mx.array:
    """Reshape (R, H, G, D) to (1, H, R * G, D), all rows of a head in one matrix; do nothing with few rows."""
    rows, heads, group, width = array.shape
    if rows < FEWEST_STACKED:
        return array
    return array.swapaxes(0, 1).reshape(1, heads, rows * group, width)


def _unstack(array: mx.array, like: mx.array) -> mx.array:
    """Undo `_stack`: reshape (1, H, n * G, W) to (n, H, G, W). `like`, (R, H, G, D), gives G."""
    rows, heads, stacked, width = array.shape
    group = like.shape[2]
    if rows > 1 or stacked == group:
        return array
    return array.reshape(heads, stacked // group, group, width).swapaxes(0, 1)
