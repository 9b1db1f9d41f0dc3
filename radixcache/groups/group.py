"""Group: many requests at a time on one PrefixCache, a row each, which decode together straight from the tree.

    admit          a row comes to stand on the path of the tree that has its prompt; nothing is copied
    prefill        evaluates the row's next prompt tokens, a chunk at a time
    prefill_many   does so for several rows, which go through a pass together where it has few tokens of each
    step           evaluates one token of each of many rows, in one forward pass: see ways.py
    close          what the row evaluated, and the tree does not hold, is copied into the tree

Invariants, asserted by `check`:

  G1  A row that is open has a place in one batch, and has evaluated no more tokens than are known of it.
  G2  What a row reads in place and what is in its tails are its tokens, each once.
  G3  The nodes of a row's path count it as a reader.
  G4  What the cache has booked for the group is `nbytes`, and the rows' checkpoints, once a call is over.

Not thread-safe: a group belongs to one thread at a time. The cache's lock is taken where the tree or the budget are
touched; forward passes run outside of it.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from radixcache.adapters.span import owned
from radixcache.core import Core
from radixcache.errors import BudgetFullError, SessionClosedError, refuse_copy
from radixcache.groups.admission import Admission, RowStoring, segment_bytes
from radixcache.groups.batch import Batch
from radixcache.groups.passes import Passes, Way, WayTrial, way_of
from radixcache.groups.removal import Removal
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.tails import CASCADE_TOKENS
from radixcache.layers.layout import Layout, is_evaluation_failure, one_each
from radixcache.layers.sizes import SizedLayout
from radixcache.paging.evictor import Evictor
from radixcache.paging.pager import Pager
from radixcache.paging.resume import OwnState, PrefixRequest, checkpoint_stops
from radixcache.settings import require_count, require_group
from radixcache.tokens import Keys, checked_prompt, common_length, require_namespace
from radixcache.tree.state_tree import StateTree

#: A pass's logits are (R, T, V), all of them at once: beyond so many tokens the last goes by itself for its own.
LOGITS_TOKENS = 32
#: Rows whose tails have no more columns are prefilled side by side where a pass has no more tokens of each than cascade
#: attention takes: longer tails are not worth the copy.
TOGETHER_COLUMNS = 2048
# What is evaluated at first of a model that nobody has seen run, before the bytes of a token are known.
FIRST_TOKENS = 64


class Group:
    """Requests that decode together; made by PrefixCache.begin_many(), used as a context manager.

    Attributes:
        namespace, priority: of its rows; `admit` may name another namespace for one.
        is_closed: whether the group was closed.
        is_lost: whether an evaluation failed, and with it the rows' state.
    """

    def __init__(
        self,
        core: Core,
        states: StateTree,
        evictor: Evictor,
        pager: Pager,
        capacity: int,
        namespace: str,
        priority: int,
        least_bytes: int | None,
    ) -> None:
        layout = _require_rows(core)
        self.namespace = namespace
        self.priority = priority
        self.is_lost = False
        self._core, self._states, self._evictor = core, states, evictor
        self._layout = layout
        self._lock = core.lock
        Batch.of_one(layout.fresh(), None)  # raises for what can be in none
        with self._lock:
            core.reclaim_vanished()
            self._room = Room(core, states, evictor, pager, layout, core.open_booking(self), capacity)
        self._storing = RowStoring(self._room)
        self._admission = Admission(self._room, self._storing, segment_bytes() if least_bytes is None else least_bytes)
        self._passes = Passes(self._room)
        self._next_id = 0
        self._tried: tuple[Any, WayTrial] | None = None
        self.is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "lost" if self.is_lost else "open"
        return f"<Group {state}: {len(self.rows)} rows, {self.used_tokens} of {self._room.capacity} tokens>"

    __reduce_ex__ = refuse_copy

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_after(error)

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True) and not sys.is_finalizing():
            self._lock.when_free(self._close_unattended)

    @property
    def rows(self) -> list[Row]:
        """The open rows, in order of admission."""
        return list(self._room.rows.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tails and of the rows' own states; what rows read in place is the tree's."""
        return self._room.nbytes

    @property
    def used_tokens(self) -> int:
        """Tokens that the rows hold; one that several share counts once."""
        return self._room.used_tokens()

    def has_bytes_for(self, ends: Mapping[Row, int], keys: Keys, end: int, namespace: str | None = None) -> bool:
        """Whether the byte budget can hold some rows at their ends, and one more, all that is evictable gone.

        True as well before the first forward pass, which shows what a token takes. Evicts nothing.

        Args:
            ends: where each of the open rows will stand in the end.
            keys, end: of the new row's prompt, and where it will stand.
            namespace: the new row's; None: the group's.
        """
        namespace = self.namespace if namespace is None else namespace
        tails = [stop - row.batch.columns.in_place[row.at] for row, stop in ends.items()]
        with self._lock:
            shared = self._admission.sharable_tokens(keys, namespace)
            match = self._states.match(self._core.unquarantined(keys, namespace), namespace)
            kept = max((node.end for node in match.path if node.payload.readers), default=0)
            own = end - shared if self._admission.is_long(shared) else end
            return self._room.has_bytes_for([*tails, own], max([*ends.values(), end]), max(0, shared - kept))

    def refusal_of(self, tokens: int) -> BudgetFullError | None:
        """Why a row of so many tokens would not fit the byte budget even if there were nothing else; None: it would.

        None as well before the first forward pass.
        """
        with self._lock:
            return self._room.refusal_of(tokens)

    def sharable_tokens(self, keys: Keys, namespace: str | None = None) -> int:
        """How many tokens of a prompt with these keys would share what the open rows hold, were it admitted now.

        Args:
            namespace: the prompt's; None: the group's. The rows of others do not count.
        """
        with self._lock:
            return self._admission.sharable_tokens(keys, self.namespace if namespace is None else namespace)

    def sharable_later(self, keys: Keys, row: Row, chunk_tokens: int) -> int:
        """How many it would share with one row of its namespace, were it admitted at the best moment of its prefill.

        Args:
            chunk_tokens: what each call of `prefill` evaluates.
        """
        with self._lock:
            allowed = self._core.unquarantined(keys, row.request.namespace)
            return row.common_later(allowed[: len(keys) - 1], chunk_tokens, self._layout.has_states)

    def admit(self, tokens: Any, keys: Any = None, marks: Sequence[int] = (), *, namespace: str | None = None) -> Row:
        """Open a row on a prompt, where what is there of it ends.

        What other rows have evaluated of it becomes part of the tree first. Nothing is copied but the state of windows
        and recurrent layers, and later, before the first forward pass, spans that are too short to be read in place.

        Args:
            tokens: token ids of the whole prompt: list, tuple, np.ndarray or mx.array.
            keys: int64, one per token: what the tree goes by where a position stands for more than its token id.
            marks: offsets worth a checkpoint, such as the end of the system prompt and of each message.
            namespace: None: the group's. Rows share nothing with those of another one but the forward passes.

        Raises:
            ValueError: tokens, keys, marks or the namespace out of their range.
            CacheFullError: the rows hold too many tokens for those that would be restored.
            BudgetFullError: the state to restore does not fit the byte budget.
            SessionClosedError: the group is closed, or its rows' state was lost.
        """
        self._require_open()
        prompt, prompt_keys = checked_prompt(tokens, keys, marks, self._core.settings.vocab_size)
        namespace = self.namespace if namespace is None else namespace
        require_namespace(namespace)
        with self._lock:
            self._core.reclaim_vanished()
            use = self._core.next_use(self.priority)
            row = self._opened(PrefixRequest(prompt, prompt_keys, namespace, use, tuple(map(int, marks))))
            self._room.rows[row.id] = row
            self._room.book()
        return row

    def prefill(self, model: Any, row: Row, tokens: int | None = None) -> mx.array | None:
        """Evaluate the next tokens of a row's prompt, with checkpoints of point state on the way.

        A row's first call takes up what other rows have evaluated of its prompt since it was admitted: of prompts that
        begin alike, prefilled one after the other, the beginning is evaluated and held once.

        Args:
            model: the mlx-lm model; called as model(tokens (1, T), cache=...).
            tokens: how many, at most what is left; None: all that is left.

        Returns:
            Logits (1, 1, V) of the prompt's last token, evaluated, from the chunk that ends there; else None.

        Raises:
            ValueError: tokens is below 1, the prompt is through, or the row is another group's.
            CacheFullError, BudgetFullError: no room for the chunk; nothing of it was evaluated, or its first tokens if
                this was the first forward pass of the cache: it shows what a token takes.
            SessionClosedError: row or group is closed, or its state was lost.
        """
        return next((logits for _, logits in self.prefill_many(model, [row], tokens)), None)

    def prefill_many(
        self, model: Any, rows: Sequence[Row], tokens: int | None = None, *, leaves_last: bool = False
    ) -> Iterator[tuple[Row, mx.array]]:
        """Evaluate the next tokens of the prompts of several rows, side by side where that is the faster way.

        Args:
            model, tokens: as in `prefill`; so many tokens of each.
            leaves_last: where a prompt's last token would go through a pass of its own, leave it to `step`, in which it
                goes with those of others.

        Yields:
            Each row whose prompt is through, once it is, with logits as `prefill` returns them.

        Raises:
            As `prefill`, on the way: each row's chunk is evaluated as far as its position says.
        """
        for row in rows:
            self._require_row(row)
            if row.prompt_left == 0:
                raise ValueError(f"row {row.id}: all {len(row.prompt)} tokens of its prompt are evaluated; use step().")
        wanted = None if tokens is None else require_count("tokens", tokens, "tokens")
        self._start(model, rows)
        ends = {}
        for row in rows:
            ends[row] = row.position + min(row.prompt_left, wanted or row.prompt_left)
            is_long = len(rows) * (ends[row] - row.position) > LOGITS_TOKENS
            ends[row] -= leaves_last and is_long and ends[row] - row.position == row.prompt_left
        self._room.require_tokens(sum(end - row.position for row, end in ends.items()))
        if not self._layout.is_known:
            row = rows[0]
            yield from self._prefill_to(model, {row: min(ends[row], row.position + FIRST_TOKENS)})
        yield from self._prefill_to(model, ends)

    def step(self, model: Any, rows: Sequence[Row], tokens: Any) -> mx.array:
        """Evaluate one more token of each of some rows, in one forward pass where the model can.

        Args:
            model: as in `prefill`.
            rows: N >= 1 of the open rows.
            tokens: their next tokens' ids, shape (N,) or (N, 1): the rest of a prompt first, then sampled ones; an
                mx.array need not be evaluated once the prompts are through: nothing here waits for it.

        Returns:
            Logits (N, 1, V), not evaluated.

        Raises:
            ValueError: no rows, one twice or another group's, another number of tokens, tokens that are no integers
                or contradict the rest of a prompt.
            CacheFullError, BudgetFullError: no room for N tokens; nothing was evaluated.
            SessionClosedError: a row or the group is closed, or its state was lost.
        """
        if not rows:
            raise ValueError("no rows to step; wanted at least one.")
        for row in rows:
            self._require_row(row)
        array = one_each(tokens, len(rows), self._core.settings.vocab_size)
        self._require_prompts(rows, array)
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows {[row.id for row in rows]}: one of them is there twice.")
        self._start(model, rows)
        self._room.require_tokens(len(rows))
        side_by_side = self._way(model).way is not Way.SINGLE
        logits: mx.array = self._run(lambda: self._passes.step(model, rows, array, side_by_side=side_by_side))
        for index, row in enumerate(rows):
            if row.position > row.known_tokens:
                row.report(array, index)
        self._room.measure()
        return logits

    def remove(self, model: Any, row: Row, begin: int, end: int) -> None:
        """Take the tokens [begin, end), all evaluated, out of a row; what follows moves up (context shift).

        At the end of the row this is a rewind. Else the row's state from `begin` on is not what its tokens alone would
        have given: of what is behind nothing is stored or shared.

        Raises:
            ValueError: the row does not hold all of the range, or is another group's.
            ShiftError: the model's keys cannot be rotated, it has recurrent layers, or windows that would need what
                they have lost.
            BudgetFullError: no room for copies of what was read in place.
            SessionClosedError: row or group is closed, or its state was lost.
        """
        self._require_row(row)
        if not 0 <= begin <= end <= row.position:
            raise ValueError(f"row {row.id} has tokens [0, {row.position}); [{begin}, {end}) is not in there.")
        if begin == end:
            return
        self._start(model, [row])
        with self._lock:
            self._run(lambda: Removal(self._room, self._layout, row, begin, end).run(model))
            row.cut(begin, end)
            row.own.cut(0, begin)  # the tokens behind it are others now
            self._room.book()

    def close(self) -> None:
        """Close all rows: store what they evaluated, and let go of their state. Closing twice is fine."""
        if self.is_closed:
            return
        with self._lock:
            self.is_closed = True
            rows = self.rows
            try:
                self._storing.close(rows, self._is_intact(rows))
            finally:
                self._room.rows.clear()
                self._core.close_booking(self._room.booking)
                self._layout.release()
                self._core.enforce_budget()

    def close_after(self, error: BaseException | None) -> None:
        """Close the group after an error; where that is of an evaluation, nothing of its rows is stored."""
        if is_evaluation_failure(error):
            # Also the caller's own evaluation of what step() returned: the rows' state was part of it.
            self.is_lost = True
        self.close()

    def abandon(self) -> None:
        """The cache is about to close: the rows go, and nothing of them is stored."""
        self.is_lost = True
        self.close()

    def close_rows(self, rows: Sequence[Row]) -> None:
        """Close some rows: store what they evaluated, each after the other, and let go of their state."""
        with self._lock:
            rows = [row for row in rows if not row.is_closed]
            try:
                self._storing.close(rows, self._is_intact(rows))
            finally:
                for row in rows:
                    self._room.rows.pop(row.id, None)
                self._room.booking.book_live(self.nbytes)
                if self._evictor.over_bytes():
                    self._passes.settle()
                self._core.enforce_budget()

    def distrust(self, keys: Keys, start: int, namespace: str) -> None:
        """What begins with these keys was found wrong from `start` on: rows that were admitted on it give none away."""
        for row in self._room.rows_of(namespace):
            common = common_length(row.prompt_keys, keys)
            if min(row.cached_tokens, common) > start:
                row.distrust_from(start)
            if min(row.path_end, common) > start:
                self._admission.orphan(row, start)
        self._room.booking.book_live(self.nbytes)

    def check(self) -> None:
        """Assert G1 to G4."""
        readers: dict[int, int] = {}
        for row in self._room.rows.values():
            assert row.position <= row.known_tokens, (row.id, row.position, row.known_tokens)
            assert all(each.offset <= row.position for each in row.own.checkpoints), (row.id, row.position)
            assert row.path_end <= row.position, (row.id, row.path_end, row.position)
            for node in [] if row.node is None else row.node.path():
                readers[id(node)] = readers.get(id(node), 0) + 1
            if not row.is_fresh:
                reads = sum(spans.end - spans.start for spans in row.reads())
                away = row.batch.columns.in_place[row.at]
                assert reads == away or not self._layout.token_bytes, (row.id, reads, away, row.in_place)
        if all(group is self for group in self._core.groups()):
            found = {id(node): node.payload.readers for node in self._states.tree.nodes() if node.payload.readers}
            assert found == readers, (found, readers)
        checkpoint_bytes = sum(row.own.nbytes for row in self._room.rows.values())
        assert self._room.booking.amounts == (self.nbytes, checkpoint_bytes, 0), self._room.booking.amounts

    # Private

    def _opened(self, request: PrefixRequest) -> Row:
        """A row on a prompt, restored."""
        core = self._core
        row = Row(self._next_id, request, core.settings.vocab_size, weakref.WeakMethod(self.close_rows))
        row.own = OwnState(self._layout, self._room.booking)
        self._run(lambda: self._admission.restore(row))
        row.own.start = row.position
        self._next_id += 1
        if self._layout.has_points:
            length, limit = len(request.prompt), request.limit
            stops = checkpoint_stops(core.settings, length, request.marks, row.matched_tokens, row.position, limit)
            row.stops = {at: kind for at, kind in sorted(stops.items()) if row.position < at <= limit}
        return row

    def _way(self, model: Any) -> WayTrial:
        own = self._core.settings.model
        # A callable that is no model passes for the cache's own.
        tried = model if own is None or isinstance(model, nn.Module) else own
        if self._tried is None or self._tried[0] is not tried:
            self._tried = tried, way_of(tried, self._layout.fresh)
        return self._tried[1]

    def _start(self, model: Any, rows: Sequence[Row]) -> None:
        """Before the first forward pass of a row: it takes up what others have of its prompt by now."""
        self._core.settings.require_model(model)
        for row in rows:
            if row.is_fresh:
                in_segments = self._way(model).way is Way.SEGMENTS
                with self._lock:
                    self._run(partial(self._admission.share_more, row))
                    self._run(partial(self._admission.place, row, in_segments=in_segments))
                    row.is_fresh = False
                    self._room.book()

    def _is_intact(self, rows: Sequence[Row]) -> bool:
        """Whether there is anything to store: rows, and state in which what is pending was evaluated."""
        if rows and not self.is_lost:
            try:
                mx.eval([row.batch.arrays for row in rows])
            except Exception:  # whatever MLX raised: the state behind it is gone, and that is what counts here
                self.is_lost = True
        return not self.is_lost

    def _require_open(self) -> None:
        if self.is_closed:
            raise SessionClosedError("the group is closed; begin_many() another one.")
        if self.is_lost:
            raise SessionClosedError("the rows' state was lost to a failure; close the group and begin_many() again.")

    def _require_row(self, row: Row) -> None:
        self._require_open()
        if not isinstance(row, Row):
            raise ValueError(f"a {type(row).__name__} is no row; wanted one of the group's.")
        if row.is_closed:
            raise SessionClosedError(f"row {row.id} is closed; admit() another one.")
        if self._room.rows.get(row.id) is not row:
            raise ValueError(f"row {row.id} is of another group.")
        if row.lost is not None:
            raise SessionClosedError(f"row {row.id}: {row.lost}. Close it and admit() another one.")

    def _require_prompts(self, rows: Sequence[Row], tokens: mx.array) -> None:
        """Raise ValueError where a token is not the next of a prompt that is not through; waits only for those."""
        for index, row in enumerate(rows):
            if row.prompt_left:
                wanted, found = int(row.next_ids(1)[0]), int(np.asarray(tokens)[index, 0])
                if wanted != found:
                    raise ValueError(f"row {row.id}: token {row.position} is {found}; {wanted} follows in its prompt.")

    def _run(self, forward: Callable[[], Any]) -> Any:
        """Run what touches the rows' state; one that fails in an evaluation loses it."""
        try:
            return forward()
        except BaseException as error:
            if is_evaluation_failure(error):
                self.is_lost = True
            self._room.measure()  # room that was asked for, and not taken
            raise

    def _prefill_to(self, model: Any, ends: Mapping[Row, int]) -> Iterator[tuple[Row, mx.array]]:
        """Evaluate the prompts of some rows up to their ends; yields those that are through, with logits."""
        while left := [row for row, end in ends.items() if row.position < end and not row.is_closed]:
            counts = {row: self._cut(row, ends[row], len(left)) - row.position for row in left}
            # Those that have the most to do go first: at the end of their prompts the rows come together.
            first = max(left, key=lambda row: ends[row] - row.position)
            count = counts[first]
            rows = [row for row in left if row is first or (counts[row] == count and self._can_join(model, row, count))]
            rows = rows if self._can_join(model, first, count) else [first]
            logits = self._evaluate(model, rows, count)
            if logits is None:
                rows = [first]
                logits = self._evaluate(model, rows, count)
            assert logits is not None
            # First: a checkpoint would take buffers of the chunk's, which are larger than it is.
            self._layout.release()
            if self._layout.has_states:
                for row in rows:
                    self._take_checkpoints(row, count)
            yield from ((row, logits[at : at + 1]) for at, row in enumerate(rows) if not row.prompt_left)

    def _cut(self, row: Row, end: int, rows: int) -> int:
        """Where the next pass of a row ends that is to be evaluated up to `end`, and so many rows with it."""
        position = row.position
        # Windows still have what was needed on the way once the pass is over.
        stops = row.stops if self._layout.has_states else ()
        last = max([position, *(at for at in stops if at < end)])
        is_long = end - position == row.prompt_left and rows * (end - last) > LOGITS_TOKENS
        cuts = {end, *stops} | ({end - 1} if is_long else set())
        return min(at for at in cuts if at > position)

    def _can_join(self, model: Any, row: Row, count: int) -> bool:
        is_short = count <= CASCADE_TOKENS and row.batch.columns.lengths[row.at] <= TOGETHER_COLUMNS
        return is_short and self._way(model).is_wide

    def _evaluate(self, model: Any, rows: Sequence[Row], count: int) -> mx.array | None:
        """Evaluate so many prompt tokens of each row; logits (R, 1, V); None: there is no room for them together."""
        ids = mx.array(np.stack([row.next_ids(count) for row in rows]))
        row = rows[0]
        start, end = row.position, row.position + count
        with nullcontext() if len(rows) > 1 else self._core.timing_prefill(start, end):
            found = self._run(lambda: self._passes.prefill(model, rows, ids))
            if found is None:
                return None
            logits, batch = owned(found[:, -1:]), row.batch
            # With the logits, which otherwise would hold the buffers and have the next write copy them.
            pending = [*batch.arrays, *([] if all(row.prompt_left for row in rows) else [logits])]
            self._change(lambda: mx.eval(pending))
            if self._layout.windows:
                self._keep_windows(rows, count)
            self._change(batch.own_points)
            with self._lock:
                self._layout.learn(batch.specimen(self._layout.fresh()))
                self._room.book()
        return logits

    def _change(self, change: Callable[[], None]) -> None:
        """Evaluate what becomes the rows' state; it is lost where that fails."""
        try:
            change()
        except Exception:
            self.is_lost = True
            raise

    def _keep_windows(self, rows: Sequence[Row], count: int) -> None:
        """Keep what windows have of the last tokens, before they are cut to what they read."""
        with self._lock:
            self._layout.learn(rows[0].batch.specimen(self._layout.fresh()))
            for row in rows:
                points = row.batch.points(row.at, self._layout.fresh())
                start, end = row.position - count, row.position
                is_last = row.prompt_left <= 1 or any(start < at <= end for at in row.stops)
                self._core.copy_windows(row.own, points, start, end, is_last=is_last)
                if not self._layout.has_states:
                    self._take_checkpoints(row, count)

    def _take_checkpoints(self, row: Row, count: int) -> None:
        """Copy and book the point state of a row where its last tokens had stops, as far as that fits the budget."""
        with self._lock:
            for at, kind in row.stops.items():
                is_here = row.position - count < at <= row.position
                if is_here and self._evictor.find_room(self._room.point_bytes(at)):
                    self._storing.take_checkpoint(row, at, kind)

    def _close_unattended(self) -> None:
        try:
            self.close()
        except Exception as error:
            # Nobody waits for this; whoever runs into it called for something else.
            warnings.warn(f"a group that nobody closed could not be stored: {error}", ResourceWarning, stacklevel=1)


def open_group(
    core: Core,
    states: StateTree,
    evictor: Evictor,
    pager: Pager,
    prompts: Iterable[Any],
    capacity: int,
    namespace: str,
    priority: int,
    least_bytes: int | None,
) -> Group:
    """Make a group and admit these prompts; it is closed again where one of them cannot be."""
    capacity, priority = require_group(capacity, priority, prompts)
    group = None
    try:
        group = Group(core, states, evictor, pager, capacity, namespace, priority, least_bytes)
        for prompt in prompts:
            group.admit(prompt)
    except BaseException:
        if group is not None:
            group.close()
        raise
    return group


def _require_rows(core: Core) -> Layout:
    """Raise ValueError where rows cannot go together whatever the layers; returns the layout."""
    if core.settings.exact:
        raise ValueError(
            f"begin_many() on an exact cache: rows that decode together add up in another order than one alone, "
            f"and prefill goes in other chunks than {core.settings.step_size} tokens. Use begin(), or exact=False."
        )
    if isinstance(core.layout, SizedLayout):
        raise ValueError("begin_many() needs the state of a model; a layout that holds sizes has none.")
    if core.layout.is_quantized:
        raise ValueError("begin_many() with kv_bits: quantized keys and values cannot be in a batch of rows.")
    return core.layout
