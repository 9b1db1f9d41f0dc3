"""Passes: the forward passes of a group's rows, and the batches that they go in.

together    the rows of a pass come into one batch, and stay in it. One that leaves it leaves a hole, for some steps or
            until another one takes it, and who has yet to come gets room, since gathering all takes as long as a step
alone       a row whose next chunk is its own, and rows that do not fit side by side, padded to the longest of them

Room is asked for before anything runs, for all rows of a step at once.

Way: how a model decodes several rows at a time; found out by trial, once per model.

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

from radixcache.adapters.contract import Spans
from radixcache.errors import BudgetFullError, UnsupportedCacheError
from radixcache.groups.attention import serve
from radixcache.groups.batch import Batch, Held, LostStateError
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.tails import GROWTH_COLUMNS, Columns, Part
from radixcache.layers.trials import allowed_error, by_slot, error_of, once_per_model

#: Where nothing is read in place, cascade attention is the faster one from so many scores of a head on.
FEWEST_SCORES = 2048


class Passes:
    """Forward passes of one group; takes the lock where the tree and the budget are concerned."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._lock = room.core.lock

    def prefill(self, model: Any, rows: Sequence[Row], ids: mx.array) -> mx.array | None:
        """The next tokens (N, T) of each row; logits (N, T, V), not evaluated; None: there is no room side by side."""
        if len(rows) > 1:
            return self._side_by_side(model, rows, ids, is_prompt=True)
        with self._lock:
            self._part(rows[0])
        return self._forward(model, rows[0].batch, ids)

    def step(self, model: Any, rows: Sequence[Row], ids: mx.array, *, side_by_side: bool) -> mx.array:
        """One more token (N, 1) of each row; logits (N, 1, V), not evaluated. All rows step, or none."""
        logits = self._side_by_side(model, rows, ids) if side_by_side and len(rows) > 1 else None
        return self._one_by_one(model, rows, ids) if logits is None else logits

    def _side_by_side(
        self, model: Any, rows: Sequence[Row], ids: mx.array, *, is_prompt: bool = False
    ) -> mx.array | None:
        batch = self._together(rows, ids.shape[1], is_prompt)
        if batch is None:
            return None
        places = [row.at for row in rows]
        if places == list(range(len(batch.rows))):
            return self._forward(model, batch, ids, is_prompt=is_prompt)
        numbers = {row.at: number for number, row in enumerate(rows)}
        in_order = ids[mx.array([numbers.get(at, 0) for at in range(len(batch.rows))])]  # a hole gets any row's
        return self._forward(model, batch, in_order, is_prompt=is_prompt)[mx.array(places)]

    def settle(self, spared: Batch | None = None) -> None:
        """Give up all room to grow, and that of rows that have left their batch; not of one batch that is spared."""
        for batch in self._room.batches():
            left = [(batch, at) for at, row in enumerate(batch.rows) if row is not None]
            columns = batch.columns
            if batch is not spared and (len(left) < columns.row_capacity or columns.capacity > columns.end + 1):
                Batch.gathered(left).take_over()
        self._room.book()

    def _together(self, rows: Sequence[Row], count: int, is_prompt: bool) -> Batch | None:
        """A batch of these rows and no others, in some order; None: padded to the longest of them they do not fit.

        Args:
            count: tokens that it has room for.
            is_prompt: they do not stay in it.
        """
        room = self._room
        batches = [row.batch for row in rows]
        batch = max(batches, key=lambda each: (batches.count(each), each.columns.row_capacity))
        with self._lock:
            try:
                joining = [row for row in rows if row.batch is not batch]
                nobody_stays = len(batch.open_rows) + len(joining) == len(rows)
                if nobody_stays and (not joining or batch.take_in(joining)) and batch.goes_on(count):
                    try:
                        self._grow(batch, count)
                        return batch
                    except BudgetFullError:
                        if batch.columns.row_capacity == len(rows):
                            raise
                longest = max(row.batch.columns.lengths[row.at] for row in rows)
                size, position = longest + count, max(row.position for row in rows) + count
                held = sum(each.nbytes for each in {id(row.batch): row.batch for row in rows}.values())
                spare_rows = 0 if is_prompt else room.coming(rows, longest)
                # Twice: what they evaluate is in the tree as well once they are through, and nothing is to go for that.
                wanted = 2 * room.bytes_of(len(rows) + spare_rows, size + GROWTH_COLUMNS, position) - held
                if room.evictor.over_bytes(wanted):
                    spare_rows = 0
                all_rows = len(rows) + spare_rows
                spare = room.ask(lambda more: room.bytes_of(all_rows, size + more, position), GROWTH_COLUMNS, held)
            except BudgetFullError:
                return None
            left = {id(row.batch) for row in rows}
            for other in room.rows.values():
                if other not in rows and id(other.batch) in left:
                    self._part(other)
            # Rows that share stand side by side, so that nothing has to be gathered for what they read.
            side_by_side = sorted(rows, key=_branch)
            together = Batch.gathered([(row.batch, row.at) for row in side_by_side], count + spare, spare_rows)
            together.take_over()
            room.book()
        return together

    def _part(self, row: Row) -> None:
        """Let a row have a batch of its own."""
        if len(row.batch.rows) > 1:
            Batch.gathered([(row.batch, row.at)]).take_over()

    def _one_by_one(self, model: Any, rows: Sequence[Row], ids: mx.array) -> mx.array:
        """A forward pass for each row."""
        with self._lock:
            if any(len(row.batch.rows) > 1 for row in rows):
                for row in rows:
                    self._part(row)
                self.settle()
            for row in rows:
                self._grow(row.batch, 1)
        logits: list[mx.array] = []
        done: list[tuple[Batch, Held]] = []
        try:
            for index, row in enumerate(rows):
                held = row.batch.hold(1)
                logits.append(self._forward(model, row.batch, ids[index : index + 1]))
                done.append((row.batch, held))
        except BaseException as error:
            for batch, held in done:
                batch.roll_back(held, error)
            raise
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _forward(self, model: Any, batch: Batch, ids: mx.array, *, is_prompt: bool = False) -> mx.array:
        with self._lock:
            self._grow(batch, ids.shape[1])
            parts = _parts(batch)
        rows = batch.open_rows
        ours = rows[0].in_segments and (bool(parts) or ids.size * (batch.columns.width + ids.shape[1]) >= FEWEST_SCORES)
        try:
            return batch.forward(model, ids, parts, ours=ours, is_prompt=is_prompt)
        except BaseException as error:
            for row in rows if isinstance(error, LostStateError) else ():
                row.lost = str(error)
            with self._lock:
                self._room.book()
            raise

    def _grow(self, batch: Batch, count: int) -> None:
        """Make room for so many more tokens of each row. BudgetFullError: there is none."""
        columns, room = batch.columns, self._room
        position = max(columns.positions)
        if columns.end + count < columns.capacity and not room.grows_at(position):
            return
        # Nobody knows yet what a token takes: no more than is about to be evaluated.
        spare = GROWTH_COLUMNS if room.layout.is_known else 0
        if spare and len(batch.rows) == 1:
            spare = max(batch.rows[0].prompt_left - count, spare)
        size = columns.end + count + 1

        def ask() -> int:
            rows = columns.row_capacity
            return room.ask(lambda more: room.bytes_of(rows, size + more, position + count), spare, batch.nbytes)

        try:
            columns.capacity = size + ask()
        except BudgetFullError:
            self.settle(spared=batch)
            columns.capacity = size + ask()


def _branch(row: Row) -> list[int]:
    """What sorts rows so that those with a common beginning come together."""
    return [] if row.node is None else [id(node) for node in row.node.path()]


def _parts(batch: Batch) -> list[Part]:
    """What the rows of a batch read in place; what all of them read its holes read as well."""
    rows = batch.open_rows
    readers: dict[int, tuple[list[int], Any]] = {}
    for row in rows:
        for spans in row.reads():
            readers.setdefault(id(spans), ([], spans))[0].append(row.at)
    return [(None if len(its) == len(rows) else tuple(its), spans) for its, spans in readers.values()]


#: Two rows that share SHARED and MORE is the first one's alone, as two segments; OWN in chunks as they are prefilled.
SHARED, MORE, OWN = (5, 3, 7, 2), (6, 1), ((4, 2, 6), (3,))
#: Then a token for each row, twice.
STEPS = ((1, 6), (3, 5))


class Way(StrEnum):
    """How several rows decode."""

    SEGMENTS = "segments"
    BATCH = "batch"
    SINGLE = "single"


class WayTrial(NamedTuple):
    """The way of a model, why it is not a faster one, and whether a pass of several rows may have several tokens."""

    way: Way
    reason: str
    is_wide: bool


_found: dict[int, WayTrial] = {}


def way_of(model: Any, fresh: Callable[[], Sequence[Any]]) -> WayTrial:
    """What a trial found for this model before, or finds now.

    Args:
        fresh: returns fresh mlx-lm caches of the model.

    Raises:
        UnsupportedCacheError: not even a row by itself gets the logits that it gets in mlx-lm's caches.
    """
    return once_per_model(_found, model, lambda: _tried(model, fresh))


def _tried(model: Any, fresh: Callable[[], Sequence[Any]]) -> WayTrial:
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
                return WayTrial(way, reason, way is not Way.SINGLE and _is_wide(model, fresh, way, wanted, allowed))
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
    return Spans(start, end, batch.copied(0, [(start, end)], lambda make: make(), emptying=False), 0)


def _behind(batch: Batch, end: int) -> Batch:
    """The row with what is behind an offset in its tails, and the rest to be read in place."""
    columns = Columns([batch.columns.end - end], [end])
    tails = batch.leaves
    return batch.refilled(
        columns, lambda leaf: [tails[leaf].columns_of(0, end, end + columns.end)] if columns.end else []
    )
