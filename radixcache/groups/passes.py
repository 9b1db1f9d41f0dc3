"""Passes: the forward passes of a group's rows, and how rows join and leave batches for them.

`Passes.step` and `prefill` choose how rows go through a pass:

    side by side    the rows stay in one batch. Rows join by `Batch.take_in` if it has room. Otherwise all move to a new
                    batch by `Batch.gather`. That takes as long as a step, so the batch has room for later rows. A
                    closed row leaves a hole until another row joins, or until holes have cost as much as a step
    one by one      for rows that exceed the budget side by side, padded to the longest; and for a single row in prefill

`Passes.check` evaluates drafted tokens in the same ways. Each row has its own number; side by side they are padded.
`Passes.draft` runs a draft model ahead of the rows, side by side. The rows' state stays the same.

Removal: take tokens out of the middle of a row, so that later ones move up (context shift), or off its end (rewind).

    in place    tails                              in place    tails
    a a a a a a b b b b b b c c c   ->             a a a a     a a  b b  c c c
                                                   whole       a copy of the rest; keys after the gap are rotated

Whole nodes before the gap stay in place. A window can be shifted if the gap is before it, and cut if it has lost no
token. Recurrent state cannot forget tokens.

Way: how a model decodes several rows. A short trial finds out, once per model; see layers/trials.py. Some models do not
call the attention function of their module. Others depend on where in a buffer a token is, or use the position of the
first row for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import StrEnum
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from radixcache.adapters.contract import Spans
from radixcache.adapters.registry import adapter_for
from radixcache.errors import ShiftError, UnsupportedCacheError
from radixcache.groups.attention import Pair, serve
from radixcache.groups.batch import GROWTH_COLUMNS, Batch, Columns, Held, Part
from radixcache.groups.row import OverBudgetError, Piece, Room, Row
from radixcache.layers.shift import Rotation, rotations
from radixcache.layers.trials import BothModels, allowed_error, by_slot, error_of, logits_alone, once_per_model

#: Without segments, cascade attention is faster if a head computes at least this many scores.
FEWEST_SCORES = 2048

#: Takes logits (N, T, V) of a check; returns how many tokens of each row to keep.
Accept = Callable[[mx.array], Sequence[int]]


class DonePass(NamedTuple):
    """A batch whose last pass can still be undone, and how many tokens of each row that pass had."""

    batch: Batch
    held: Held
    given: Sequence[int]


class Passes:
    """Forward passes of one group. Takes the lock only to use the tree and the budget."""

    def __init__(self, room: Room) -> None:
        self._room, self._lock = room, room.core.lock
        self._undecided: list[DonePass] = []  # may be undone, so their batches must not change

    def prefill(self, model: Any, rows: Sequence[Row], ids: mx.array) -> mx.array | None:
        """Run the next tokens (N, T) of each row; logits (N, T, V), not evaluated. None: no room side by side."""
        if len(rows) > 1:
            return self._side_by_side(model, rows, ids, is_prompt=True)
        with self._lock:
            rows[0].leave_others()
        return self._forward(model, rows[0].batch, ids)

    def step(self, model: Any, rows: Sequence[Row], ids: mx.array, *, side_by_side: bool) -> mx.array:
        """Run one more token (N, 1) of each row; logits (N, 1, V), not evaluated. All rows step, or none."""
        logits = self._side_by_side(model, rows, ids) if side_by_side and len(rows) > 1 else None
        if logits is None:
            with self._deciding():
                logits = self._one_by_one(model, rows, ids, [1] * len(rows))
        return logits

    def check(
        self,
        model: Any,
        rows: Sequence[Row],
        ids: mx.array,
        counts: Sequence[int],
        accept: Accept,
        *,
        side_by_side: bool,
    ) -> None:
        """Run the first `counts` of the next tokens (N, T) of each row. `accept` says how many of these to keep.

        If `accept` raises, the check is undone for all rows. LostStateError: it cannot be undone.
        """
        with self._deciding() as done:
            logits = None
            if side_by_side and len(rows) > 1:
                logits = self._side_by_side(model, rows, ids, counts=counts)
            if logits is None:
                logits = self._one_by_one(model, rows, ids, counts)
            try:
                kept = dict(zip(rows, accept(logits), strict=True))
            except BaseException as error:
                _undo(done, error)
                raise
            for batch, held, given in done:
                batch.keep(held, given, [kept.get(row, 1) for row in batch.rows])

    def draft(
        self, both: BothModels, rows: Sequence[Row], ids: mx.array, count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Let the draft model propose `count` tokens after the next token (N, 1) of each row; also their probabilities.

        OverBudgetError: there is no room for the rows side by side.
        """
        if len(rows) > 1:
            batch = self._seat(rows, count + 1)  # with room for the check that follows
        else:
            with self._lock:
                rows[0].leave_others()
                batch = rows[0].batch
                self._grow(batch, count + 1, is_strict=True)
        places, order = self._order(batch, rows)
        with self._lock:
            parts = _parts(batch)
        with batch.scratch(both.first) as ahead:

            def forward(tokens: mx.array) -> mx.array:
                return ahead.forward(both.draft_model, tokens, parts, ours=self._is_ours(batch, parts, tokens))

            said, chances = both.drafted(ids if order is None else ids[order], count, forward)
        return [said[at] for at in places], [chances[at] for at in places]

    @contextmanager
    def _deciding(self) -> Iterator[list[DonePass]]:
        """Collect the passes of the block, which may be undone there. After the block they stay."""
        before, self._undecided = self._undecided, []
        try:
            yield self._undecided
        finally:
            self._undecided = before

    def settle(self, spared: Batch | None = None) -> None:
        """Free the spare columns and holes of all batches, except `spared` and batches whose pass may be undone."""
        undecided = [done.batch for done in self._undecided]
        for batch in self._room.batches():
            if batch is spared or batch in undecided:
                continue
            left = [(batch, at) for at, row in enumerate(batch.rows) if row is not None]
            columns = batch.columns
            if len(left) < columns.row_capacity or columns.capacity > columns.end + 1:
                Batch.gather(left).take_over()
        self._room.book()

    def _side_by_side(
        self,
        model: Any,
        rows: Sequence[Row],
        ids: mx.array,
        is_prompt: bool = False,
        counts: Sequence[int] | None = None,
    ) -> mx.array | None:
        try:
            batch = self._seat(rows, ids.shape[1], is_prompt)
        except OverBudgetError:
            return None
        places, order = self._order(batch, rows)
        if counts is not None:
            given = dict(zip(places, counts, strict=True))
            counts = [given.get(at, 1) for at in range(len(batch.rows))]
            self._undecided.append(DonePass(batch, batch.hold(ids.shape[1]), counts))
        if order is None:
            return self._forward(model, batch, ids, is_prompt=is_prompt, counts=counts)
        return self._forward(model, batch, ids[order], is_prompt=is_prompt, counts=counts)[mx.array(places)]

    def _seat(self, rows: Sequence[Row], count: int, is_prompt: bool = False) -> Batch:
        """Bring all these rows into one batch, with room for `count` more tokens. Raises OverBudgetError."""
        if not all(row.has_states_like(rows[0]) for row in rows):
            raise OverBudgetError
        with self._lock:
            return self._join(rows, count) or self._gather(rows, count, is_prompt)

    def _order(self, batch: Batch, rows: Sequence[Row]) -> tuple[list[int], mx.array | None]:
        """The place of each row in the batch, and for each place the index of its row; None: the order is the same."""
        places = [row.at for row in rows]
        if places == [*range(len(batch.rows))]:
            return places, None
        numbers = {at: number for number, at in enumerate(places)}
        return places, mx.array([numbers.get(at, 0) for at in range(len(batch.rows))])  # a hole gets the first row's

    def _join(self, rows: Sequence[Row], count: int) -> Batch | None:
        """Add all to the batch that most rows are in, and grow it. None: use a new batch. Raises OverBudgetError."""
        batches = [row.batch for row in rows]
        batch = max(batches, key=lambda each: (batches.count(each), each.columns.row_capacity))
        joining = [row for row in rows if row.batch is not batch]
        nobody_stays = len(batch.open_rows) + len(joining) == len(rows)
        if not (nobody_stays and (not joining or batch.take_in(joining)) and batch.goes_on(count)):
            return None
        try:
            self._grow(batch, count, is_strict=True)
        except OverBudgetError:
            if batch.columns.row_capacity == len(rows):
                raise
            return None
        return batch

    def _gather(self, rows: Sequence[Row], count: int, is_prompt: bool) -> Batch:
        """Make a batch of these rows, in any order, padded to the longest. `is_prompt`: they leave the batch soon."""
        room = self._room
        longest = max(row.tail_tokens for row in rows)
        size, position = longest + count, max(row.position for row in rows) + count
        held = sum(each.nbytes for each in {id(row.batch): row.batch for row in rows}.values())
        spare_rows = 0
        if not is_prompt:
            others = [row for row in room.rows.values() if row not in rows and row.lost is None]
            spare_rows = sum(row.tail_tokens + row.prompt_left <= longest for row in others)
        # Twice, as the tree gets a copy when rows close. Spare rows must not cause an eviction.
        wanted = 2 * room.bytes_of(len(rows) + spare_rows, size + GROWTH_COLUMNS, position) - held
        if room.core.budget.over_bytes(wanted):
            spare_rows = 0
        all_rows = len(rows) + spare_rows

        def nbytes(more: int) -> int:
            return room.bytes_of(all_rows, size + more, position)

        spare = room.ask(nbytes, GROWTH_COLUMNS, held, is_strict=True)
        left = {id(row.batch) for row in rows}
        for other in room.rows.values():
            if other not in rows and id(other.batch) in left:
                other.leave_others()
        # Rows that share a path are neighbours: a slice of the batch reads it, without a copy.
        side_by_side = sorted(rows, key=lambda row: [node.payload.entry.entry_id for node in row.path()])
        together = Batch.gather([(row.batch, row.at) for row in side_by_side], count + spare, spare_rows)
        together.take_over()
        room.book()
        return together

    def _one_by_one(self, model: Any, rows: Sequence[Row], ids: mx.array, counts: Sequence[int]) -> mx.array:
        with self._lock:
            if any(len(row.batch.rows) > 1 for row in rows):
                for row in rows:
                    row.leave_others()
                self.settle()
            for row, count in zip(rows, counts, strict=True):
                self._grow(row.batch, count)
        logits: list[mx.array] = []
        try:
            for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
                held = row.batch.hold(count)
                its = self._forward(model, row.batch, ids[index : index + 1, :count])
                logits.append(mx.pad(its, [(0, 0), (0, ids.shape[1] - count), (0, 0)]) if count < ids.shape[1] else its)
                self._undecided.append(DonePass(row.batch, held, [count]))
        except BaseException as error:
            _undo(self._undecided, error)
            raise
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _forward(
        self, model: Any, batch: Batch, ids: mx.array, *, is_prompt: bool = False, counts: Sequence[int] | None = None
    ) -> mx.array:
        with self._lock:
            self._grow(batch, ids.shape[1])
            parts = _parts(batch)
        ours = self._is_ours(batch, parts, ids)
        try:
            logits = batch.forward(model, ids, parts, ours=ours, is_prompt=is_prompt, counts=counts)
        except BaseException:
            with self._lock:
                self._room.book()
            raise
        if isinstance(model, BothModels):  # no logits depend on the draft model's state
            mx.async_eval(batch.arrays)
        return logits

    def _is_ours(self, batch: Batch, parts: Sequence[Part], ids: mx.array) -> bool:
        """Whether a pass over ids (R, T) may attend by cascade attention."""
        scores = ids.size * (batch.columns.width + ids.shape[1])
        return batch.open_rows[0].in_segments and (bool(parts) or scores >= FEWEST_SCORES)

    def _grow(self, batch: Batch, count: int, *, is_strict: bool = False) -> None:
        """Make room for `count` more tokens of each row; errors as in Room.ask."""
        columns, room = batch.columns, self._room
        position = max(columns.positions)
        if columns.end + count < columns.capacity and not room.grows_at(position):
            return
        spare = GROWTH_COLUMNS if room.layout.is_known else 0  # in the first pass a token's bytes are unknown
        owed = 0
        if spare and len(batch.rows) == 1:
            owed = max(batch.rows[0].prompt_left - count, 0)
            spare = max(owed, spare)
        room.require_row(position + count)
        size = columns.end + count + 1

        def ask(is_strict: bool) -> int:
            def nbytes(more: int) -> int:
                return room.bytes_of(columns.row_capacity, size + more, position + count)

            return room.ask(nbytes, spare, batch.nbytes, owed=owed, is_strict=is_strict)

        try:
            columns.capacity = size + ask(is_strict=True)
        except OverBudgetError:
            if not room.core.budget.over_bytes():  # over budget, other batches have no spare room
                self.settle(spared=batch)
            columns.capacity = size + ask(is_strict)


def _undo(done: Sequence[DonePass], error: BaseException) -> None:
    """Undo all of these passes after an error, as `Batch.undo` does."""
    with ExitStack() as stack:
        for batch, held, _ in done:
            stack.callback(batch.undo, held, error)


def _parts(batch: Batch) -> list[Part]:
    """What the rows of a batch read in place; holes read what all rows read."""
    rows = batch.open_rows
    readers: dict[int, tuple[list[int], Any]] = {}
    for row in rows:
        for spans in row.reads():
            readers.setdefault(id(spans), ([], spans))[0].append(row.at)
    return [(None if len(its) == len(rows) else tuple(its), spans) for its, spans in readers.values()]


class Removal(NamedTuple):
    """Take the tokens [begin, end), begin < end, out of a row; callers hold the lock."""

    room: Room
    row: Row
    begin: int
    end: int

    def run(self, model: Any) -> None:
        """Remove the tokens. ShiftError: impossible. RequestTooLargeError: no memory. An error changes nothing."""
        room, row, begin, end = self
        row.leave_others()
        self._require_removable()
        rotating: list[Rotation | None] = [None] * len(row.batch.leaves)
        if end < row.position:
            caches = room.layout.fresh()
            pairs = zip(caches, rotations(model, caches), strict=True)
            rotating = [rotation for cache, rotation in pairs if cache is not None]
        with nullcontext() if row.node is None else room.states.guarding(row.node):
            away = sum(spans.end - spans.start for spans in row.reads() if spans.end <= begin)
            length = row.position - (end - begin) - away
            columns, before = Columns([length], [away]), row.batch
            held, token_bytes = before.nbytes, room.layout.token_bytes
            least = held + (length + 1 - before.columns.capacity) * token_bytes
            columns.capacity = length + 1 + room.ask(lambda more: least + more * token_bytes, row.prompt_left, held)
            pieces = [row.pieces(index, begin) for index in range(len(before.leaves))]
            moved = [self._move(its, rotating[index]) for index, its in enumerate(pieces)]
            points = [self._point(leaf, rotating[index]) for index, leaf in enumerate(before.leaves)]
            mx.eval(moved, [arrays for arrays in points if arrays is not None])
            row.batch = before.with_tails(columns, lambda leaf: moved[leaf])
        for leaf, arrays in zip(row.batch.leaves, points, strict=True):
            if arrays == []:
                adapter_for(leaf).free(leaf)
            elif arrays is not None:
                adapter_for(leaf).place(leaf, arrays, leaf.offset - (end - begin), arrays[0].shape[2])  # type: ignore[attr-defined]
        row.in_place = [(low, high) for low, high in row.in_place if low < begin]
        row.orphans = [spans for spans in row.orphans if spans.end <= begin]
        node = row.node
        room.retreat(row, begin)
        if node is not None and node is not row.node:
            room.evictor.tidy(node)

    def _require_removable(self) -> None:
        _, row, begin, end = self
        for leaf in row.batch.leaves:
            if isinstance(leaf, ArraysCache) and not leaf.empty():
                raise ShiftError("recurrent layers cannot forget tokens, so this model cannot be shifted.")
            has_gone_round = isinstance(leaf, RotatingKVCache) and leaf.keys is not None and leaf.offset > leaf.max_size
            if has_gone_round and (end == row.position or end > leaf.offset - leaf.max_size):
                raise ShiftError(
                    f"row {row.id} is at {leaf.offset}; without [{begin}, {end}), its windows of {leaf.max_size} tokens"
                    " would need earlier tokens, which are no longer there."
                )

    def _move(self, pieces: list[Piece], rotation: Rotation | None) -> list[Pair]:
        """The pieces without the gap. Keys after the gap are rotated to their new positions."""
        found: list[Pair] = []
        for start, (keys, values) in pieces:
            length = keys.shape[2]
            before = slice(0, max(0, min(length, self.begin - start)))
            behind = slice(max(0, min(length, self.end - start)), length)
            if before.stop:
                found.append((keys[..., before, :], values[..., before, :]))
            if behind.start < length:
                later = keys[..., behind, :]
                if rotation is not None:
                    later = rotation.shift(later, self.begin - self.end)
                found.append((later, values[..., behind, :]))
        return found

    def _point(self, leaf: Any, rotation: Rotation | None) -> list[mx.array] | None:
        """What a window holds afterwards, in order; None: the leaf is no window, or holds nothing."""
        if not isinstance(leaf, RotatingKVCache) or leaf.keys is None:
            return None
        keys, values = adapter_for(leaf).state(leaf)  # type: ignore[attr-defined]
        first = leaf.offset - keys.shape[2]
        pairs = self._move([(first, (keys, values))], rotation)
        return [mx.concatenate([pair[name] for pair in pairs], axis=2) for name in (0, 1)] if pairs else []


#: A trial: both rows read segment SHARED, and the first row also MORE. OWN is prefilled. Then both run two steps.
SHARED, MORE, OWN = (5, 3, 7, 2), (6, 1), ((4, 2, 6), (3,))
STEPS = ((1, 6), (3, 5))


class Way(StrEnum):
    """How a model decodes several rows: one pass that reads segments in place, one pass, or a pass per row."""

    SEGMENTS = "segments"
    BATCH = "batch"
    SINGLE = "single"


class WayTrial(NamedTuple):
    """The fastest way that is right, and why no faster one is.

    Attributes:
        is_wide: whether a pass may have several tokens per row.
        is_ragged: whether rows may then have different numbers of tokens, and keep different numbers.
    """

    way: Way
    reason: str
    is_wide: bool
    is_ragged: bool


_found: dict[int, WayTrial] = {}


def way_of(model: Any, fresh: Callable[[], Sequence[Any]]) -> WayTrial:
    """Try a model once, and return what was found. UnsupportedCacheError: even a row alone gets wrong logits."""
    if isinstance(model, BothModels):
        parts = (model.model, slice(model.first)), (model.draft_model, slice(model.first, None))
        tried = [way_of(each, lambda its=its: fresh()[its]) for each, its in parts]  # type: ignore[misc]
        slowest = max(tried, key=lambda each: [*Way].index(each.way))
        return slowest._replace(
            is_wide=all(each.is_wide for each in tried), is_ragged=all(each.is_ragged for each in tried)
        )
    return once_per_model(_found, model, lambda: _try_ways(model, fresh))


def _try_ways(model: Any, fresh: Callable[[], Sequence[Any]]) -> WayTrial:
    rows = [(*SHARED, *MORE, *OWN[0]), (*SHARED, *OWN[1])]
    wanted, rechunked = (logits_alone(model, fresh, rows, STEPS, last) for last in (1, 3))
    allowed = allowed_error(error_of(rechunked, wanted), wanted.dtype)
    reasons = [reason] if (reason := by_slot(model)) else []
    if not reasons and isinstance(model, nn.Module):
        serve(model)
    for way in (Way.SINGLE,) if reasons else Way:
        try:
            error = error_of(_rows(model, fresh, way, _single), wanted)
            if error <= allowed:
                found = {_wide: False, _ragged: False}
                for steps in found if way is not Way.SINGLE else ():
                    with suppress(Exception):  # a model may raise anything on shapes it was not made for
                        found[steps] = error_of(_rows(model, fresh, way, steps), wanted) <= allowed
                return WayTrial(way, "; ".join(reasons), *found.values())
            why = f"logits differ by {error:.1e} of the largest"
        except UnsupportedCacheError:
            raise
        except Exception as raised:  # a model that was not made for this may raise anything
            why = str(raised) or type(raised).__name__
        reasons.append(f"{way}: {why}")
    name = type(model).__module__.rpartition(".")[2]
    raise UnsupportedCacheError(f"{name} cannot be decoded in a batch: {'; '.join(reasons)}.")


#: Runs STEPS on a batch by a forward function, which takes ids (N, T) and token counts (N); logits (N, steps, V).
Steps = Callable[[Batch, Callable[..., mx.array]], mx.array]


def _single(batch: Batch, forward: Callable[..., mx.array]) -> mx.array:
    return mx.concatenate([forward([[token] for token in step]) for step in STEPS], axis=1)


def _wide(batch: Batch, forward: Callable[..., mx.array]) -> mx.array:
    return forward([list(row) for row in zip(*STEPS, strict=True)])


def _ragged(batch: Batch, forward: Callable[..., mx.array]) -> mx.array:
    """The first row drafts two wrong tokens, and the second row none. Then both rows continue."""
    held = batch.hold(3)
    (first, second), (third, fourth) = STEPS
    drafted = forward([[first, fourth, fourth], [second, 0, 0]], counts=[3, 1])
    again = [first] if batch.keep(held, [3, 1], [1, 1])[0] else []
    rest = forward([[*again, third], [fourth, 0][: len(again) + 1]], counts=[len(again) + 1, 1])
    return mx.stack([drafted[:, 0], mx.stack([rest[0, -1], rest[1, 0]])], axis=1)


class TrialRow:
    """A row of a trial, which has nothing but its place in a batch."""

    lost: str | None = None


def _rows(model: Any, fresh: Callable[[], Sequence[Any]], way: Way, steps: Steps) -> mx.array:
    """Logits (2, steps, V) of both rows."""
    first, second = (Batch.of_one(fresh(), TrialRow()) for _ in range(2))
    ours = way is Way.SEGMENTS
    for batch in (first, second):
        batch.forward(model, mx.array([SHARED]), ours=ours)
    first.forward(model, mx.array([MORE]), ours=ours)
    parts: list[Part] = []
    if ours:
        ends = len(SHARED), len(SHARED) + len(MORE)
        shared, more = (
            Spans(
                low, high, first.copy_tails(0, [(low, high)], lambda make: make(), lambda its: its, emptying=False), 0
            )
            for low, high in ((0, ends[0]), ends)
        )
        parts = [(None, shared), ((0,), more)]
        # All that was evaluated is read in place.
        first, second = (
            each.with_tails(Columns([0], [end]), lambda _: []) for each, end in ((first, ends[1]), (second, ends[0]))
        )
    own = [[(None, spans) for _, spans in its] for its in (parts, parts[:1])]
    for batch, chunk, its in zip((first, second), OWN, own, strict=True):
        batch.forward(model, mx.array([chunk]), its, ours=ours)
    together = [] if way is Way.SINGLE else [Batch.gather([(first, 0), (second, 0)])]

    def forward(ids: list[list[int]], **more: Any) -> mx.array:
        rows = mx.array(ids)
        if together:
            return together[0].forward(model, rows, parts, ours=ours, **more)
        pairs = zip((first, second), mx.split(rows, 2), strict=True)
        return mx.concatenate([batch.forward(model, its, ours=ours) for batch, its in pairs])

    return steps(together[0] if together else first, forward)
