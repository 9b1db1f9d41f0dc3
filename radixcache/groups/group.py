"""Group: requests on one PrefixCache that decode together, one row each. Rows read their prefixes from the tree.

    admit           open a row on the tree's path with its prefix; copies no tokens
    prefill_many    evaluate the next prompt tokens of rows, chunk by chunk; rows share a pass if that is faster
    step            evaluate one token of each row, in one pass if the model can: see passes.py
    draft           let a draft model propose tokens after the next token of each row
    check_drafts    evaluate the next token and drafted tokens of each row; keep as many as the caller accepts
    close           copy evaluated tokens that the tree lacks into the tree: see sharing.py

Invariants, asserted by `check`:

  G1  An open row is in exactly one batch. All its evaluated tokens are known: from the prompt, or given by the caller.
  G2  Each token of a row is held once: in a span that the row reads in place, or in the row's tail.
  G3  Each node on a row's path counts the row as a reader.
  G4  Between calls, the cache's ledger has booked the group's `nbytes` and the rows' checkpoints.

Not thread-safe: a group belongs to one thread at a time. It takes the cache's lock to touch the tree or the budget;
forward passes run without it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import add
from typing import Any
from weakref import WeakMethod

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from radixcache.adapters.span import owned
from radixcache.chat_parts import Chat, ChatLog
from radixcache.errors import RequestTooLargeError, SessionClosedError, refuse_copy
from radixcache.groups.attention import BLOCK_TOKENS
from radixcache.groups.batch import CASCADE_TOKENS, Batch
from radixcache.groups.checks import RowChecks
from radixcache.groups.passes import Accept, Passes, Removal, Way, WayTrial, way_of
from radixcache.groups.row import OverBudgetError, Room, Row
from radixcache.groups.sharing import Sharing
from radixcache.layers.layout import is_evaluation_failure, one_each
from radixcache.layers.trials import BothModels
from radixcache.ledger import FORKED
from radixcache.paging.pager import OwnState
from radixcache.paging.resume import PrefixRequest
from radixcache.settings import require_count
from radixcache.tokens import Keys, TokenIds, checked_prompt, common_length, require_namespace, token_ids

#: A pass computes logits (R, T, V) for all its tokens. Beyond this many tokens, the last one has its own pass.
LOGITS_TOKENS = 32
#: Rows with longer tails are prefilled alone: copying the tail into a shared batch costs more than it saves.
TOGETHER_COLUMNS = 2048
#: The first pass of a cache has this many tokens, to learn how many bytes a token takes.
FIRST_TOKENS = 64


class RowProgress:
    """Evaluates the rows of one group: places them before their first pass, then runs prompts, steps and checks.

    `is_lost`: the rows' state was lost, because an evaluation failed.
    """

    def __init__(self, room: Room, sharing: Sharing) -> None:
        self._room, self._core, self._layout, self._lock = room, room.core, room.layout, room.core.lock
        self._sharing, self._passes, self.checks = sharing, Passes(room), RowChecks(room)
        self._tried: tuple[Any, WayTrial] | None = None
        self.is_lost = False

    def start(self, model: Any, rows: Sequence[Row], *, is_prefill: bool = False) -> None:
        """Place rows before their first pass, and verify the state that they resumed on. Wrong rows restart at 0.

        `is_prefill`: first move new rows to the longest prefix that other rows have computed; restarted rows stay at 0.
        Otherwise the caller's token or range belongs at the old position: restarted rows evaluate up to there.
        """
        self._core.settings.require_model(model)
        fresh = [row for row in rows if row.is_fresh]
        for row in fresh:
            in_segments = self.way(model).way is Way.SEGMENTS
            with self._lock:
                self._leave_wrong_state(row)
                if is_prefill:
                    self.run(partial(self._sharing.restore_more, row))
                self.run(partial(self._sharing.place, row, in_segments=in_segments))
                row.is_fresh = False
                self._room.book()
            self.checks.compare_restored(model, row)
        for row in fresh:
            with self._lock:
                self._leave_wrong_state(row)  # the check of another row may have found it wrong
        if not is_prefill:
            self.catch_up(model, rows)
        for row in rows:
            row.due = 0

    def _leave_wrong_state(self, row: Row) -> None:
        """Restart a new row at 0 if the state that it resumed on was found wrong. The lock is held."""
        if row.right_tokens is not None:
            self._core.count_more_hits(-row.position)
            self._room.start_over(row)
            self._room.book()

    def catch_up(self, model: Any, rows: Sequence[Row]) -> None:
        """Evaluate the prompts of restarted rows again, up to the positions that the caller has seen."""
        for row in rows:
            if row.position < row.due:
                for _ in self._prefill_to(model, {row: row.due}):
                    pass

    def prefill(
        self, model: Any, rows: Sequence[Row], wanted: int | None, *, leaves_last: bool
    ) -> Iterator[tuple[Row, mx.array]]:
        """As Group.prefill_many. `wanted`: how many tokens of each row; None: all that are left."""
        self.start(model, rows, is_prefill=True)
        ends = {}
        for row in rows:
            ends[row] = row.position + min(row.prompt_left, wanted or row.prompt_left)
            ends[row] -= leaves_last and self._parts_with_last(row, ends[row], len(rows))
        self._room.require_tokens(sum(end - row.position for row, end in ends.items()))
        if not self._layout.is_known:
            row = rows[0]
            yield from self._prefill_and_compare(model, {row: min(ends[row], row.position + FIRST_TOKENS)})
        with self._lock:
            for row in rows:
                self._room.require_row(len(row.prompt))
        yield from self._prefill_and_compare(model, ends)

    def _prefill_and_compare(self, model: Any, ends: Mapping[Row, int]) -> Iterator[tuple[Row, mx.array]]:
        """As `_prefill_to`. After a mismatch, evaluate the row's prompt again and yield the logits of the cold run."""
        for row, logits in self._prefill_to(model, ends):
            cold = self.checks.compare_last(row, logits, row.position - 1)
            self.checks.begin_again([row])
            self.catch_up(model, [row])
            logits = logits if cold is None else cold[None, None]
            self.checks.note(row, logits[0, 0], is_wide=False)
            yield row, logits

    def _prefill_to(self, model: Any, ends: Mapping[Row, int]) -> Iterator[tuple[Row, mx.array]]:
        """Evaluate each row's prompt up to its end in `ends`. Yields each row with no prompt left, with its logits."""
        while left := [row for row, end in ends.items() if row.position < end and not row.is_closed]:
            counts = {row: self._cut(row, ends[row], len(left)) - row.position for row in left}
            # The row with the most tokens left goes first. So all rows end at the same time, and share passes.
            first = max(left, key=lambda row: ends[row] - row.position)
            count = counts[first]
            alike = [row for row in left if counts[row] == count and row.has_states_like(first)]
            rows = [row for row in alike if row is first or self._can_join(model, row, count)]
            rows = rows if self._can_join(model, first, count) else [first]
            if (logits := self._run_prompts(model, rows, count)) is None:
                rows = [first]
                logits = self._run_prompts(model, rows, count)
            assert logits is not None
            self._layout.release()  # else MLX puts a checkpoint in a larger freed buffer
            if self._layout.has_states:
                for row in rows:
                    self._take_checkpoints(row, count)
            yield from ((row, logits[at : at + 1]) for at, row in enumerate(rows) if not row.prompt_left)

    def _cut(self, row: Row, end: int, rows: int) -> int:
        """Where the next pass of a row ends, if its prefill ends at `end`. `rows`: how many rows still prefill."""
        cuts = {end, *self._stops(row)} | ({end - 1} if self._parts_with_last(row, end, rows) else set())
        return min(at for at in cuts if at > row.position)

    def _parts_with_last(self, row: Row, end: int, rows: int) -> bool:
        """Whether the prompt ends at `end` and its last token needs its own pass, as logits of all tokens are slow."""
        last = max([row.position, *(at for at in self._stops(row) if at < end)])
        return end - row.position == row.prompt_left and rows * (end - last) > LOGITS_TOKENS

    def _stops(self, row: Row) -> Collection[int]:
        return row.stops if self._layout.has_states else ()  # windows are copied after the pass

    def _can_join(self, model: Any, row: Row, count: int) -> bool:
        is_short = count <= CASCADE_TOKENS and row.tail_tokens <= TOGETHER_COLUMNS
        return is_short and self.way(model).is_wide

    def _run_prompts(self, model: Any, rows: Sequence[Row], count: int) -> mx.array | None:
        """Evaluate `count` prompt tokens of each row; logits (R, 1, V). None: the rows do not fit in one batch."""
        ids = mx.array(np.stack([row.next_ids(count) for row in rows]))
        start = rows[0].position
        with nullcontext() if len(rows) > 1 else self._core.timing_prefill(start, start + count):
            found = self.run(lambda: self._passes.prefill(model, rows, ids))
            if found is None:
                return None
            logits, batch = owned(found[:, -1:]), rows[0].batch
            # Together with the logits: unevaluated logits hold the old buffers, and the next write would copy these.
            pending = [*batch.arrays, *([] if all(row.prompt_left for row in rows) else [logits])]
            self.run(lambda: mx.eval(pending), makes_state=True)
            with self._lock:
                self._layout.learn(batch.specimen(self._layout.fresh()))
                for row in rows if self._layout.windows else ():
                    self._copy_windows(row, count)
            self.run(batch.own_points, makes_state=True)
            with self._lock:
                self._room.book()
        return logits

    def _copy_windows(self, row: Row, count: int) -> None:
        """Copy the last tokens out of windows before the windows are cut."""
        points, start, end = self._room.points_of(row), row.position - count, row.position
        is_last = row.prompt_left <= 1 or any(start < at <= end for at in row.stops)
        self._core.pager.copy_windows(row.own, points, start, end, is_last=is_last)
        if not self._layout.has_states:
            self._take_checkpoints(row, count)

    def _take_checkpoints(self, row: Row, count: int) -> None:
        """Take a checkpoint at each stop among a row's last `count` tokens, if the budget has room."""
        with self._lock:
            for at, kind in row.stops.items():
                is_here = row.position - count < at <= row.position
                if is_here and self._room.has_room_for_checkpoint(row, at):
                    self._core.pager.take_checkpoint(row.own, row.path(), self._room.points_of(row), at, kind)

    def step(self, model: Any, rows: Sequence[Row], array: mx.array) -> mx.array:
        """As Group.step, with the tokens as an array (N, 1)."""
        if any(row.owed_tokens for row in rows):
            found: list[mx.array] = []

            def keep(logits: mx.array) -> list[int]:
                found.append(logits)
                return [1] * len(rows)

            self.check(model, rows, list(np.asarray(array)), keep)
            return found[0]
        self.start(model, rows)
        self._room.require_tokens(len(rows))
        side_by_side = self.way(model).way is not Way.SINGLE
        logits: mx.array = self.run(lambda: self._passes.step(model, rows, array, side_by_side=side_by_side))
        if not self._layout.is_known:
            with self._lock:
                self._layout.learn(rows[0].batch.specimen(self._layout.fresh()))
        for index, row in enumerate(rows):
            if row.position > row.known_tokens:
                row.known.report(array, index, index + 1)
        for index, row in enumerate(rows if self.checks else ()):
            if (cold := self.checks.compare_last(row, logits[index : index + 1], row.position - 1)) is not None:
                logits[index, 0] = cold
            self.checks.note(row, logits[index, 0], is_wide=False)
        self.checks.begin_again(rows)
        self._index_replies(rows)
        self._room.measure()
        return logits

    def check(self, model: Any, rows: Sequence[Row], given: Sequence[TokenIds], accept: Accept) -> list[int]:
        """As Group.check_drafts, but rows may be new, or have more prompt tokens left."""
        owed = [row.owed_tokens for row in rows]
        ids = [np.append(row.next_ids(count), its) for row, count, its in zip(rows, owed, given, strict=True)]
        longest = max(map(len, ids))
        if longest > BLOCK_TOKENS:
            raise ValueError(f"a check of {longest} tokens of a row; wanted at most {BLOCK_TOKENS}.")
        self.start(model, rows)
        self._room.require_tokens(len(rows) * longest)
        counts, answers = list[int](), list[mx.array]()

        def kept(logits: mx.array) -> list[int]:
            found = _behind(logits, owed, max(map(len, given)))
            for index, row in enumerate(rows if self.checks else ()):
                last = len(row.prompt) - in_prompt[index]
                if (cold := self.checks.compare_last(row, found[index : index + 1, :1], last)) is not None:
                    found[index, 0] = cold
            answers.append(found)
            counts.extend(accept(found))
            pairs = zip(counts, given, strict=False)
            if len(counts) != len(given) or any(not 1 <= count <= len(its) for count, its in pairs):
                raise ValueError(
                    f"accept keeps {counts} of {[*map(len, given)]} tokens; wanted at least one of each row."
                )
            return list(map(add, counts, owed))

        array = mx.array(np.stack([np.pad(its, (0, longest - len(its))) for its in ids]))
        lengths, side_by_side = [*map(len, ids)], self.way(model).is_ragged
        in_prompt = [row.prompt_left for row in rows]
        self.run(lambda: self._passes.check(model, rows, array, lengths, kept, side_by_side=side_by_side))
        for row, its, known, count in zip(rows, given, in_prompt, counts, strict=True):
            row.known.report(its, min(known, count), count)
        for index, row in enumerate(rows if self.checks else ()):
            self.checks.note(row, answers[0][index, counts[index] - 1], is_wide=longest > 1)
        self.checks.begin_again(rows)
        self._index_replies(rows)
        self._room.measure()
        return counts

    def draft(
        self, both: BothModels, rows: Sequence[Row], array: mx.array, count: int
    ) -> list[tuple[list[int], list[float]]]:
        """As Group.draft, with the next tokens as an array (N, 1)."""
        self.start(both, rows)
        self._room.require_tokens(len(rows) * count)
        try:
            found = self.run(lambda: self._passes.draft(both, rows, array, count))
        except OverBudgetError:
            return []
        self._room.measure()
        return list(zip(*found, strict=True))

    def remove(self, model: Any, row: Row, begin: int, end: int) -> None:
        """As Group.remove."""
        self.start(model, [row])
        with self._lock:
            self.run(lambda: Removal(self._room, row, begin, end).run(model))
            row.cut(begin, end)
            row.own.cut(0, begin)
            self.checks.forget_logits(row)
            self._room.book()

    def compare_ends(self, rows: Sequence[Row]) -> None:
        """Verify what rows have evaluated, before they are closed."""
        if self.checks.has_any(rows) and not (self.is_lost or self._lock.is_foreign):
            self.evaluate(rows)
            self.checks.compare_ends(() if self.is_lost else rows)

    def evaluate(self, rows: Sequence[Row]) -> None:
        try:
            mx.eval([row.batch.arrays for row in rows if not row.is_closed])
        except Exception:  # whatever MLX raised: the state is lost
            self.is_lost = True

    def settle(self) -> None:
        """Free the spare columns and holes of all batches."""
        self._passes.settle()

    def _index_replies(self, rows: Sequence[Row]) -> None:
        """Add each row's new tokens to the suffix index, once there are enough of them."""
        core = self._core
        for row in rows:
            if core.draft_index.has_more(row.known, row.clean_tokens):
                with self._lock:
                    core.draft_index.add(
                        row.known, row.clean_keys(), row.matched_tokens, row.request.namespace, is_growing=True
                    )

    def way(self, model: Any) -> WayTrial:
        own = self._core.settings.model
        tried = model if own is None or isinstance(model, nn.Module) else own  # a function may wrap the model
        if self._tried is None or self._tried[0] is not tried:
            self._tried = tried, way_of(tried, self._layout.fresh)
        return self._tried[1]

    def run(self, call: Callable[[], Any], *, makes_state: bool = False) -> Any:
        """Run `call` on the rows' state. A failed evaluation loses the state; with `makes_state`, any Exception."""
        try:
            return call()
        except BaseException as error:
            if is_evaluation_failure(error) or (makes_state and isinstance(error, Exception)):
                self.is_lost = True
            self._room.measure()  # bytes may be booked for buffers that were not made
            raise


class Group:
    """Requests that decode together; made by PrefixCache.begin_many(), used as a context manager.

    Attributes:
        namespace, priority: of the rows. `admit` can give a row another namespace.
        is_closed: whether the group was closed.
    """

    def __init__(self, room: Room, namespace: str, priority: int, segment_bytes: int | None, chats: ChatLog) -> None:
        self.namespace, self.priority = namespace, priority
        self._chats = chats
        self._room = room
        self._core, self._layout, self._lock = room.core, room.layout, room.core.lock
        with self._lock:
            self._core.reclaim_vanished()
            room.booking = self._core.open_booking(self)
        self._sharing = Sharing(room, segment_bytes)
        self._progress = RowProgress(room, self._sharing)
        self._next_id = 0
        self.is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "lost" if self.is_lost else "open"
        return f"<Group {state}: {len(self.rows)} rows, {self.used_tokens} of {self._room.capacity} tokens>"

    __reduce_ex__ = refuse_copy

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close_after(error)

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True) and not sys.is_finalizing():
            self._lock.when_free(self._close_unattended)

    @property
    def is_lost(self) -> bool:
        """Whether the rows' state was lost, because an evaluation failed."""
        return self._progress.is_lost

    @property
    def rows(self) -> list[Row]:
        """The open rows, in order of admission."""
        return list(self._room.rows.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tails and of the rows' own states. What rows read in place counts for the tree."""
        return self._room.nbytes

    @property
    def used_tokens(self) -> int:
        """Tokens that the rows hold; one that several share counts once."""
        return self._room.used_tokens()

    def has_bytes_for(self, ends: Mapping[Row, int], keys: Keys, end: int, namespace: str | None = None) -> bool:
        """Whether open rows and a new row will fit the budget at their ends, if all evictable state is evicted.

        True before the first forward pass: the bytes of a token are not known yet. Evicts nothing.

        Args:
            ends: where each open row will end.
            keys, end, namespace: of the new row.

        Raises:
            SessionClosedError: the group is closed, or its state was lost.
        """
        self._require_open()
        with self._lock:
            need = self._sharing.bytes_with(ends, keys, end, self.namespace if namespace is None else namespace)
            return self._core.budget.fits(need, self._room.booking.live_bytes, "eviction").is_ok

    def refusal_of(self, tokens: int) -> RequestTooLargeError | None:
        """The error if even a single row of `tokens` tokens does not fit in memory; None: it fits, or is not known."""
        with self._lock:
            return self._room.refusal_of(tokens)

    @property
    def is_over_budget(self) -> bool:
        """Whether the cache exceeds its budget after evicting all evictable state."""
        return self._core.budget.over_bytes() > 0

    def sharable_tokens(self, keys: Keys, namespace: str | None = None) -> int:
        """How many tokens of a prompt with these keys would be shared with the open rows if it were admitted now."""
        with self._lock:
            return self._sharing.sharable_tokens(keys, self.namespace if namespace is None else namespace)

    def sharable_later(self, keys: Keys, row: Row, chunk_tokens: int) -> int:
        """The most tokens that `row` could share at some moment of its prefill in chunks of `chunk_tokens`."""
        with self._lock:
            allowed = self._core.before_quarantine(keys, row.request.namespace)
            return row.common_later(allowed[: len(keys) - 1], chunk_tokens, self._layout.has_states)

    def admit(
        self,
        tokens: Any,
        keys: Any = None,
        marks: Sequence[int] = (),
        *,
        namespace: str | None = None,
        chat: Chat | None = None,
        mark_tokens: int = 1,
    ) -> Row:
        """Open a row for a prompt, at the end of its longest usable prefix.

        First, the tree gets prompt tokens that other rows have evaluated.

        Args:
            tokens: token ids of the whole prompt.
            keys: as in PrefixCache.begin().
            marks: as in PrefixCache.begin().
            namespace: None: the group's. Rows of different namespaces share only forward passes.
            chat: as in PrefixCache.begin().
            mark_tokens: with recurrent layers, the fewest tokens that a checkpoint at a mark must save, because it
                cuts a forward pass in two. The first and the last mark always get a checkpoint.

        Raises:
            ValueError: an argument out of its range.
            CacheFullError: no room for the tokens to restore.
            RequestTooLargeError: no memory for the prompt, as in PrefixCache.begin().
            SessionClosedError: the group is closed, or its rows' state was lost.
        """
        self._require_open()
        core, room = self._core, self._room
        prompt, prompt_keys = checked_prompt(tokens, keys, marks, core.settings.vocab_size)
        namespace = self.namespace if namespace is None else namespace
        require_namespace(namespace)
        mark_tokens = require_count("mark_tokens", mark_tokens, "tokens")
        with self._lock:
            core.reclaim_vanished()
            room.require_row(len(prompt))
            use = core.next_use(self.priority)
            request = PrefixRequest(prompt, prompt_keys, namespace, use, tuple(map(int, marks)))
            request, moving = core.read_store(request)
            if moving is not None:  # the lock was given up
                self._require_open()
                room.require_row(len(prompt))
            row = Row(self._next_id, request, core.settings.vocab_size, WeakMethod(self.close_rows))
            row.own = OwnState(core.budget, room.booking, len(prompt))
            self._progress.run(lambda: self._sharing.restore(row))
            row.own.start = row.position
            self._next_id += 1
            row.mark_tokens = mark_tokens
            if self._layout.has_points:
                room.plan_stops(row)
            self._progress.checks.draw(row)
            room.rows[row.id] = row
            room.book()
        if chat is not None:
            self._chats.add_copy(prompt_keys, chat, namespace)
        return row

    def prefill(self, model: Any, row: Row, tokens: int | None = None) -> mx.array | None:
        """Evaluate the next tokens of a row's prompt, and take checkpoints on the way.

        The first call of a row resumes after the tokens of its prompt that other rows have evaluated by now. If the row
        was drawn for verification, the call first prefills cold beside the restored state and compares the two.

        Args:
            model: the mlx-lm model; called as model(tokens (1, T), cache=...).
            tokens: how many to evaluate, at most those left; None: all that are left.

        Returns:
            Logits (1, 1, V) of the prompt's last token, evaluated; None if the chunk ends before this token.

        Raises:
            ValueError: tokens is below 1, the prompt is evaluated, or the row belongs to another group.
            CacheFullError: no room for the chunk; nothing of it was evaluated.
            RequestTooLargeError: no memory for the prompt, or for the chunk beside other requests. Nothing of it was
                evaluated, except for the first tokens of a cache, which show how many bytes a token takes.
            SessionClosedError: row or group is closed, or its state was lost.
        """
        return next((logits for _, logits in self.prefill_many(model, [row], tokens)), None)

    def prefill_many(
        self, model: Any, rows: Sequence[Row], tokens: int | None = None, *, leaves_last: bool = False
    ) -> Iterator[tuple[Row, mx.array]]:
        """Evaluate the next tokens of the prompts of several rows, side by side if that is faster.

        Args:
            model: the mlx-lm model.
            tokens: how many tokens of each row, as in `prefill`.
            leaves_last: leave a prompt's last token to `step`, if it would need a forward pass of its own here.

        Yields:
            Each row as soon as its prompt is evaluated, with logits as `prefill` returns them.

        Raises:
            RadixCacheError: as `prefill`, also after some yields; a row's position says how far it is evaluated.
        """
        for row in rows:
            self._require_row(row)
            if row.prompt_left == 0:
                raise ValueError(f"row {row.id}: all {len(row.prompt)} tokens of its prompt are evaluated; use step().")
        wanted = None if tokens is None else require_count("tokens", tokens, "tokens")
        yield from self._progress.prefill(model, rows, wanted, leaves_last=leaves_last)

    def step(self, model: Any, rows: Sequence[Row], tokens: Any) -> mx.array:
        """Evaluate one more token of each given row, in one forward pass if the model can.

        Args:
            model: as in `prefill`.
            rows: N >= 1 of the open rows.
            tokens: their next token ids, shape (N,) or (N, 1): the rest of a prompt first, then sampled ones. After
                the prompts, an mx.array need not be evaluated.

        Returns:
            Logits (N, 1, V), not evaluated.

        Raises:
            ValueError: no rows, a row twice or of another group; not one integer each; a token contradicts a prompt.
            CacheFullError: no room for N tokens; nothing was evaluated.
            RequestTooLargeError: no memory for N tokens; nothing was evaluated.
            SessionClosedError: a row or the group is closed, or its state was lost.
        """
        self._require_rows(rows)
        self._progress.catch_up(model, rows)
        array = one_each(tokens, len(rows), self._core.settings.vocab_size)
        self._require_prompts(rows, array)
        return self._progress.step(model, rows, array)

    def with_draft_model(self, model: Any, draft_model: Any) -> BothModels:
        """Join both into the model of all passes, as `draft` needs. ValueError: the cache was not made for both."""
        return BothModels(model, draft_model, len(self._layout.fresh()))

    def draft(
        self, both: BothModels, rows: Sequence[Row], tokens: Sequence[int], count: int
    ) -> list[tuple[list[int], list[float]]]:
        """Let the draft model propose tokens after the next token of each given row. The rows keep their state.

        Args:
            both: as from `with_draft_model`.
            rows: N >= 1 of the open rows, as for `check_drafts`. Proposals for a row that owes tokens mean nothing.
            tokens: their next token ids.
            count: how many tokens to propose for each row.

        Returns:
            For each row `count` tokens, and the draft model's probability of each. Empty: the budget has no room for
            all rows in one batch.

        Raises:
            ValueError: as `step`; more than the last token of a row's prompt is left.
            CacheFullError: no room for N * count tokens.
            SessionClosedError: a row or the group is closed, or its state was lost.
        """
        self._require_rows(rows)
        self._progress.catch_up(both, rows)
        array, count = (
            one_each(tokens, len(rows), self._core.settings.vocab_size),
            require_count("count", count, "tokens"),
        )
        for row in rows:
            if not row.position or row.prompt_left > 1:
                raise ValueError(f"row {row.id}: {row.prompt_left} tokens of its prompt are left; prefill it first.")
        self._require_prompts(rows, array)
        return self._progress.draft(both, rows, array, count)

    def check_drafts(
        self, model: Any, rows: Sequence[Row], tokens: Sequence[Sequence[int]], accept: Accept
    ) -> list[int]:
        """Evaluate the next token of each given row and drafted tokens after it, in one pass if the model can.

        Rejected tokens leave nothing in the rows. With recurrent layers, a row with a rejected token evaluates its kept
        tokens again in its next pass (`Row.owed_tokens`).

        Args:
            model: as in `prefill`.
            rows: N >= 1 of the open rows, which have begun and have at most the last token of their prompt left.
            tokens: for each row its next token, then any number of drafted ones; T is the largest count of a row.
            accept: called with logits (N, T, V), not evaluated; those after a row's last token mean nothing. Returns
                how many of its tokens each row keeps, at least one.

        Returns:
            What `accept` returned.

        Raises:
            ValueError: as `step`; a row has no tokens, or more than 64 with those that it owes; drafted tokens for a
                row whose prompt is not evaluated; `accept` keeps none of a row's tokens, or more than there are.
            CacheFullError: no room for N * T tokens; nothing was evaluated.
            RequestTooLargeError: no memory for them; nothing was evaluated.
            SessionClosedError: a row or the group is closed, or its state was lost.
            Exception: what `accept` raised; the check was undone.
        """
        self._require_rows(rows)
        self._progress.catch_up(model, rows)
        given = [token_ids(its, self._core.settings.vocab_size) for its in tokens]
        if len(given) != len(rows):
            raise ValueError(f"tokens of {len(given)} rows; wanted those of {len(rows)}.")
        for row, its in zip(rows, given, strict=True):
            if not row.position or row.prompt_left > (len(its) == 1):
                raise ValueError(
                    f"row {row.id}: {row.prompt_left} tokens of its prompt are left, and {len(its)} are to be checked."
                )
        self._require_prompts(rows, mx.array(np.stack([its[:1] for its in given])))
        return self._progress.check(model, rows, given, accept)

    def drafts_together(self, model: Any) -> bool:
        """Whether several rows check drafted tokens in one pass; if not, each row has its own pass."""
        return self._progress.way(model).is_ragged

    def remove(self, model: Any, row: Row, begin: int, end: int) -> None:
        """Take the tokens [begin, end), all evaluated, out of a row; later tokens move up (context shift).

        At the end of the row this is a rewind. Otherwise the state from `begin` on differs from a cold run of the same
        tokens, and is neither stored nor shared.

        Raises:
            ValueError: the row does not hold all of the range, or is another group's.
            ShiftError: keys cannot be rotated, there are recurrent layers, or windows would need tokens that are gone.
            RequestTooLargeError: no memory for copies of state that was read in place.
            SessionClosedError: row or group is closed, or its state was lost.
        """
        self._require_row(row)
        self._progress.catch_up(model, [row])
        if not 0 <= begin <= end <= row.position:
            raise ValueError(f"row {row.id} has tokens [0, {row.position}); [{begin}, {end}) is outside.")
        if begin == end:
            return
        self._progress.remove(model, row, begin, end)

    def close(self) -> None:
        """Close all rows: store what they evaluated and release their state. Closing twice is fine."""
        try:
            self._progress.compare_ends(self.rows)
        finally:
            self._close_now()

    def close_after(self, error: BaseException | None) -> None:
        """Close the group. If `error` came from an evaluation, also one in the caller's code, store nothing."""
        if is_evaluation_failure(error):
            self._progress.is_lost = True
        if error is None:
            self.close()
        else:
            self._close_now()

    def abandon(self) -> None:
        """Close the group and store nothing: the cache is about to close."""
        self._progress.is_lost = True
        self._close_now()

    def close_rows(self, rows: Sequence[Row]) -> None:
        try:
            self._progress.compare_ends(rows)
        finally:
            with self._lock:
                try:
                    self._close([row for row in rows if not row.is_closed])
                finally:
                    self._room.booking.book_live(self.nbytes)
                    if self._core.budget.over_bytes():
                        self._progress.settle()
                    self._core.evictor.enforce_budget()

    def distrust(self, keys: Keys, start: int, namespace: str) -> None:
        """Stop rows from storing and sharing state of these keys from `start` on: it was found wrong."""
        for row in self._room.rows_of(namespace):
            if min(row.cached_tokens, common_length(row.request.keys, keys)) > start:
                row.distrust_from(start)
            # The row's path can be longer than its prompt: another prompt may contain the row's reply.
            if row.node is not None and common_length(row.node.last_keys(row.path_end), keys) > start:
                self._sharing.orphan(row, start)
        self._room.booking.book_live(self.nbytes)

    def check(self) -> None:
        """Assert G1 to G4."""
        readers: dict[int, int] = {}
        for row in self._room.rows.values():
            assert row.position <= row.known_tokens, (row.id, row.position, row.known_tokens)
            assert all(each.offset <= row.position for each in row.own.checkpoints), (row.id, row.position)
            assert row.path_end <= row.position, (row.id, row.path_end, row.position)
            for node in row.path():
                readers[id(node)] = readers.get(id(node), 0) + 1
            if not row.is_fresh:
                reads = sum(spans.end - spans.start for spans in row.reads())
                away = row.batch.columns.in_place[row.at]
                assert reads == away or not self._layout.token_bytes, (row.id, reads, away, row.in_place)
        if all(group is self for group in self._core.groups()):
            found = {id(node): node.payload.readers for node in self._room.states.tree.nodes() if node.payload.readers}
            assert found == readers, (found, readers)
        checkpoint_bytes = sum(row.own.nbytes for row in self._room.rows.values())
        assert self._room.booking.amounts == (self.nbytes, checkpoint_bytes, 0), self._room.booking.amounts

    def _require_rows(self, rows: Sequence[Row]) -> None:
        """Raise unless these are open rows of this group, at least one, and none twice."""
        if not rows:
            raise ValueError("no rows to step; wanted at least one.")
        for row in rows:
            self._require_row(row)
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows {[row.id for row in rows]}: one of them is listed twice.")

    def _close_now(self) -> None:
        if self.is_closed or self._lock.is_foreign:
            self.is_closed = True
            return
        with self._lock:
            self.is_closed = True
            try:
                self._close(self.rows)
            finally:
                self._core.close_booking(self._room.booking)
                self._layout.release()
                self._core.evictor.enforce_budget()

    def _close(self, rows: Sequence[Row]) -> None:
        try:
            if not self.is_lost:
                self._progress.evaluate(rows)
            self._sharing.close(rows, is_intact=not self.is_lost)
        finally:
            self._progress.checks.end(rows)
            for row in rows:
                self._room.rows.pop(row.id, None)

    def _require_open(self) -> None:
        if self.is_closed:
            raise SessionClosedError("the group is closed; make another one with begin_many().")
        if self._lock.is_foreign:
            raise SessionClosedError(FORKED)
        if self.is_lost:
            raise SessionClosedError("the rows' state was lost to a failure; close the group and begin_many() again.")

    def _require_row(self, row: Row) -> None:
        self._require_open()
        if not isinstance(row, Row):
            raise ValueError(f"a {type(row).__name__} is not a row; wanted a row of this group.")
        if row.is_closed:
            raise SessionClosedError(f"row {row.id} is closed; admit() another one.")
        if self._room.rows.get(row.id) is not row:
            raise ValueError(f"row {row.id} belongs to another group.")
        if row.lost is not None:
            raise SessionClosedError(f"row {row.id}: {row.lost}. Close it and admit() another one.")

    def _require_prompts(self, rows: Sequence[Row], tokens: mx.array) -> None:
        for index, row in enumerate(rows):
            if row.prompt_left:  # else the token need not be evaluated
                wanted, found = int(row.next_ids(1)[0]), int(np.asarray(tokens)[index, 0])
                if wanted != found:
                    raise ValueError(f"row {row.id}: token {row.position} is {found}; {wanted} follows in its prompt.")

    def _close_unattended(self) -> None:
        try:
            self._close_now()
        except Exception as error:  # in a finalizer, whose caller must not fail
            warnings.warn(
                f"a group was not closed, and its state could not be stored: {error}", ResourceWarning, stacklevel=1
            )


def _behind(logits: mx.array, owed: Sequence[int], tokens: int) -> mx.array:
    """Logits (N, tokens, V) of each row after its first `owed` tokens, padded with zeros."""
    if not any(owed):
        return logits
    rows = [logits[at : at + 1, count : count + tokens] for at, count in enumerate(owed)]
    return mx.concatenate([mx.pad(each, [(0, 0), (0, tokens - each.shape[1]), (0, 0)]) for each in rows])


def open_group(
    room: Room, prompts: Iterable[Any], namespace: str, priority: int, segment_bytes: int | None, chats: ChatLog
) -> Group:
    """Make a group and admit these prompts. If one of them raises, the group is closed."""
    core = room.core
    if core.settings.exact:
        raise ValueError(
            f"begin_many() on an exact cache: rows that decode together do not give the bits of one row, and their "
            f"prefill does not use chunks of {core.settings.step_size} tokens. Use begin(), or exact=False."
        )
    if room.layout.is_quantized:
        raise ValueError("begin_many() with kv_bits: quantized keys and values cannot be in a batch of rows.")
    Batch.of_one(core.layout.fresh(), None)  # raises for a layer that cannot be in a batch
    group = Group(room, namespace, priority, segment_bytes, chats)
    try:
        for prompt in prompts:
            group.admit(prompt)
    except BaseException:
        group.close()
        raise
    return group
