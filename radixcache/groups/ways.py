"""Way: how a model decodes several rows at a time; found out by trial, once per model.

    SEGMENTS    one forward pass; what rows share is read in place by cascade attention
    BATCH       one forward pass on tails that hold all of a row: as mlx-lm's own generator has it
    SINGLE      a forward pass for each row

Attention of some models does more with keys and values than their module's function does, goes by where in a buffer a
token stands, or takes every row to be where the first one is. A short trial beside the model's own caches tells, also
with random weights; see layers/trials.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from radixcache.adapters.snapshots import Spans
from radixcache.errors import UnsupportedCacheError
from radixcache.groups.attention import serve
from radixcache.groups.batch import Batch
from radixcache.groups.tails import Columns, Part
from radixcache.layers.trials import allowed_error, by_slot, error_of, once_per_model

#: Two rows that share SHARED and MORE is the first one's alone, as two segments; OWN in chunks as they are prefilled.
SHARED, MORE, OWN = (5, 3, 7, 2), (6, 1), ((4, 2, 6), (3,))
#: Then a token for each row, twice.
STEPS = ((1, 6), (3, 5))


class Way(StrEnum):
    """How several rows decode."""

    SEGMENTS = "segments"
    BATCH = "batch"
    SINGLE = "single"


class Finding(NamedTuple):
    """The way of a model, why it is not a faster one, and whether a pass of several rows may have several tokens."""

    way: Way
    reason: str
    is_wide: bool


_found: dict[int, Finding] = {}


def way_of(model: Any, fresh: Callable[[], Sequence[Any]]) -> Finding:
    """What a trial found for this model before, or finds now.

    Args:
        fresh: returns fresh mlx-lm caches of the model.

    Raises:
        UnsupportedCacheError: not even a row by itself gets the logits that it gets in mlx-lm's caches.
    """
    return once_per_model(_found, model, lambda: _tried(model, fresh))


def _tried(model: Any, fresh: Callable[[], Sequence[Any]]) -> Finding:
    rows = [(*SHARED, *MORE, *OWN[0]), (*SHARED, *OWN[1])]
    wanted = mx.concatenate([_alone(model, fresh(), row, index, 1) for index, row in enumerate(rows)])
    again = mx.concatenate([_alone(model, fresh(), row, index, 3) for index, row in enumerate(rows)])
    allowed = allowed_error(error_of(again, wanted), wanted.dtype)
    reason, candidates = by_slot(model), [*Way]
    if reason:
        candidates = [Way.SINGLE]
    elif isinstance(model, nn.Module):
        serve(model)
    for way in candidates:
        try:
            error = error_of(_rows(model, fresh, way), wanted)
            if error <= allowed:
                return Finding(way, reason, way is not Way.SINGLE and _is_wide(model, fresh, way, wanted, allowed))
            why = f"logits are off by {error:.1e} of the largest"
        except UnsupportedCacheError:
            raise
        except Exception as raised:  # whatever a model raises that was not made for this
            why = str(raised) or type(raised).__name__
        reason = f"{reason}; {way}: {why}" if reason else f"{way}: {why}"
    name = type(model).__module__.rpartition(".")[2]
    raise UnsupportedCacheError(f"{name} cannot be one row among others: {reason}.")


def _is_wide(model: Any, fresh: Callable[[], Sequence[Any]], way: Way, wanted: mx.array, allowed: float) -> bool:
    try:
        return error_of(_rows(model, fresh, way, is_wide=True), wanted) <= allowed
    except Exception:  # as in `_tried`
        return False


def _alone(model: Any, caches: Sequence[Any], row: Sequence[int], index: int, last: int) -> mx.array:
    """Logits (1, steps, V) of a row in mlx-lm's own caches; `last`: how many tokens of it go by themselves."""
    for chunk in (row[:-last], row[-last:]):
        model(mx.array([chunk]), cache=caches)
    return mx.concatenate([model(mx.array([[step[index]]]), cache=caches) for step in STEPS], axis=1)


def _rows(model: Any, fresh: Callable[[], Sequence[Any]], way: Way, *, is_wide: bool = False) -> mx.array:
    """Logits (2, steps, V) of both rows; wide: all steps are one pass."""
    first, second = (Batch.of_one(fresh(), row) for row in (0, 1))
    ours = way is Way.SEGMENTS
    for batch in (first, second):
        batch.forward(model, mx.array([SHARED]), ours=ours)
    first.forward(model, mx.array([MORE]), ours=ours)
    parts: list[Part] = []
    if ours:
        ends = len(SHARED), len(SHARED) + len(MORE)
        parts = [(None, _spans(first, 0, ends[0])), ((0,), _spans(first, *ends))]
        first, second = _behind(first, ends[1]), _behind(second, ends[0])
    own = [[(None, spans) for _, spans in parts], [(None, spans) for _, spans in parts[:1]]]
    for batch, chunk, its in zip((first, second), OWN, own, strict=True):
        batch.forward(model, mx.array([chunk]), its, ours=ours)
    if way is Way.SINGLE:
        rows = [
            [batch.forward(model, mx.array([[step[row]]])) for step in STEPS]
            for row, batch in ((0, first), (1, second))
        ]
        return mx.concatenate([mx.concatenate(steps, axis=1) for steps in rows])
    both = Batch.gathered([(first, 0), (second, 0)])
    passes = [mx.array(STEPS).T] if is_wide else [mx.array(step)[:, None] for step in STEPS]
    return mx.concatenate([both.forward(model, ids, parts, ours=ours) for ids in passes], axis=1)


def _spans(batch: Batch, start: int, end: int) -> Spans:
    return Spans(start, end, batch.copied(0, [(start, end)]), 0)


def _behind(batch: Batch, end: int) -> Batch:
    """The row with what is behind an offset in its tails, and the rest to be read in place."""
    columns = Columns([batch.columns.end - end], [end])
    tails = batch.leaves
    return batch.refilled(
        columns, lambda leaf: [tails[leaf].columns_of(0, end, end + columns.end)] if columns.end else []
    )
