"""Row: one request of a Group, and where its state is. Room: the open rows of a group, and what they hold.

    prompt          cached_tokens | remaining
    state           [0, position); the first clean_tokens have the state of a cold run
                    in place: spans of nodes on the row's path; the rest in columns of a batch
    known           the prompt, and the tokens passed to step(), which need not be evaluated yet

Room counts tokens against the capacity and asks for bytes before any evaluation. Rows that do not fit the budget side
by side run one by one. They may then exceed the budget, if the device has memory. Callers hold the cache's lock, except
where a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import mlx.core as mx

from radixcache.adapters.contract import Spans
from radixcache.core import Core
from radixcache.errors import CacheFullError, RequestTooLargeError, refuse_copy
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch, TailLayer
from radixcache.layers.layout import Layout
from radixcache.ledger import Booking
from radixcache.paging.pager import OwnState
from radixcache.paging.resume import PrefixRequest, Reason, checkpoint_stops
from radixcache.tokens import Keys, KnownTokens, TokenIds, common_length
from radixcache.tree.state_tree import StateNode
from radixcache.verify import Mismatch

#: Keys and values of the tokens [start, start + T).
Piece = tuple[int, Pair]


class Row:
    """A request of a Group; made by Group.admit().

    Attributes:
        id: unique in the group.
        prompt: int32 token ids of the whole prompt.
        cached_tokens: prompt tokens that were cached. The first prefill() of a row may find more of them.
        matched_tokens: prompt tokens that tree and rows held, at least cached_tokens.
        reason: why the row resumes before the end of the match, from Reason; None: it resumes at the end.
        remaining: int32 token ids after the first cached_tokens, never empty.
        mismatch: what verification found wrong; None: nothing. If it was the restored state, or the logits of the
            prompt's last token, the row began again at 0, and cached_tokens and matched_tokens are 0.
        is_closed: whether the row was closed and its state released.
    """

    def __init__(self, row_id: int, request: PrefixRequest, vocab_size: int | None, close: WeakMethod[Any]) -> None:
        self.id = row_id
        self.request = request
        self.prompt = request.prompt
        self.cached_tokens = self.matched_tokens = 0
        self.reason: Reason | None = None
        self.remaining = request.prompt
        self.mismatch: Mismatch | None = None
        self.is_closed = False
        self.is_fresh = True  # only admit() has run on it
        self.due = 0  # where the caller expects the row: after a restart at 0, it first evaluates its prompt up to here
        self.mark_tokens = 1  # as given to admit()
        self.batch: Batch  # has all state that the row does not read in place
        self.at = 0  # the row's number there
        self.node: StateNode | None = None  # the end of the path that it guards in the tree
        self.in_place: list[tuple[int, int]] = []  # tokens [start, end) on that path that are read in place, in order
        self.in_segments = False  # whether long spans are read in place; False before its first forward pass
        self.orphans: list[Spans] = []  # spans after that path that the row reads in place, and the tree has dropped
        self.own: OwnState  # checkpoints and windows that the tree does not have yet
        self.stops: dict[int, str] = {}  # where its prefill is cut for a checkpoint, with the reason
        self.right_tokens: int | None = None  # how many tokens are right, if later ones were found wrong
        self.lost: str | None = None  # why its state was lost
        self._tainted: int | None = None
        self.known = KnownTokens(request.prompt, request.keys, vocab_size)
        self._prompt_end = len(request.prompt)
        self._close = close  # weak, so that a group closes as soon as nothing else refers to it

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"at {self.position}"
        return f"<Row {self.id} {state}: prompt of {len(self.prompt)} tokens, {self.cached_tokens} cached>"

    __reduce_ex__ = refuse_copy

    @property
    def position(self) -> int:
        """Tokens that are evaluated or restored; 0 once closed."""
        if self.is_closed:
            return 0
        columns, at = self.batch.columns, self.at
        return columns.lengths[at] + columns.in_place[at]

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not evaluated yet; 0 once closed."""
        return 0 if self.is_closed else max(0, self._prompt_end - self.position)

    @property
    def known_tokens(self) -> int:
        """Prompt tokens and tokens passed to step(), without removed tokens."""
        return self.known.count

    @property
    def owed_tokens(self) -> int:
        """Known tokens after the prompt that the row's next pass evaluates again, before the next token."""
        return 0 if self.is_closed or self.prompt_left else self.known.count - self.position

    @property
    def may_draft(self) -> bool:
        """Whether the row's next pass may check drafts: no prompt token and no owed token is left."""
        return not self.prompt_left and not self.owed_tokens

    @property
    def clean_tokens(self) -> int:
        """How many tokens, from the first on, have the state of a cold run."""
        limits = (self.position, self._tainted, self.right_tokens)
        return min(limit for limit in limits if limit is not None)

    def close(self) -> None:
        """Store what the row evaluated and release its state. Closing twice is fine."""
        close = self._close()
        if not self.is_closed and close is not None:
            close([self])

    def distrust_from(self, offset: int) -> None:
        """Stop storing and sharing state from an offset on: it was found wrong."""
        self.right_tokens = offset if self.right_tokens is None else min(offset, self.right_tokens)

    # For the group

    @property
    def tail_tokens(self) -> int:
        """Tokens in its columns of the batch."""
        return self.batch.columns.lengths[self.at]

    @property
    def path_end(self) -> int:
        """How many of its tokens are on its path of the tree."""
        return 0 if self.node is None else self.node.end

    def path(self) -> list[StateNode]:
        """Its path of the tree, root side first."""
        return [] if self.node is None else self.node.path()

    def reads(self) -> list[Spans]:
        """The spans that the row reads in place, in order. The lock is held."""
        nodes = [node for node in self.path() if any(start <= node.start < end for start, end in self.in_place)]
        return [node.payload.spans for node in nodes if node.payload.spans is not None] + self.orphans

    def pieces(self, index: int, start: int) -> list[Piece]:
        """Keys and values of one layer, in order, except spans that end by `start`. The lock is held."""
        leaf, found, column, position = self.batch.leaves[index], list[Piece](), 0, 0
        if not isinstance(leaf, TailLayer) or (leaf.empty() and not self.reads()):
            return []
        for spans in self.reads():
            if spans.start > position:
                found.append((position, leaf.columns_of(self.at, column, column + spans.start - position)))
                column += spans.start - position
            if spans.end > start and (its := spans.leaves[index]) is not None:
                found += [(first, pair) for first, _, pair in its.parts(spans.start, spans.end)]
            position = spans.end
        if position < self.position:
            found.append((position, leaf.columns_of(self.at, column, column + self.position - position)))
        return found

    def has_states_like(self, other: Row) -> bool:
        """Whether recurrent states have the same shapes, so that both may share a pass. At offset 0 there are none."""
        return self.batch is other.batch or self.batch.state_shapes == other.batch.state_shapes

    def leave_others(self) -> None:
        """Move into a batch of its own, unless it is alone."""
        if len(self.batch.rows) > 1:
            Batch.gather([(self.batch, self.at)]).take_over()

    def next_ids(self, count: int) -> TokenIds:
        position = self.position
        return self.known.ids()[position : position + count]

    def known_keys(self) -> Keys:
        """Keys of all known tokens, up to the first that is no token id. Waits for evaluation."""
        return self.known.keys()

    def clean_keys(self) -> Keys:
        return self.known_keys()[: self.clean_tokens]

    def common(self, keys: Keys) -> int:
        """Length of the common prefix of `keys` and the clean tokens. Waits for tokens if the whole prompt matches."""
        return self.known.common(keys, self.clean_tokens)

    def common_later(self, keys: Keys, chunk_tokens: int, has_states: bool) -> int:
        """The most tokens of a prompt with these keys that the row can share at some moment of its prefill.

        With recurrent layers, the shared tokens end with a chunk or at a later checkpoint.
        """
        position, clean = self.position, self.clean_tokens
        prompt = self.known.read_keys
        common = common_length(prompt if clean == position else prompt[:clean], keys)
        if not has_states:
            return common
        ends = [at for at in self.stops if position < at <= common]
        if position <= common:
            ends.append(position + (common - position) // chunk_tokens * chunk_tokens)
        return max(ends, default=0)

    def cut(self, begin: int, end: int) -> None:
        """Forget the tokens [begin, end), which were taken out of the state."""
        self.is_fresh = False
        if end < self.known.count:
            self._tainted = begin if self._tainted is None else min(begin, self._tainted)
        elif self._tainted is not None and self._tainted >= begin:
            self._tainted = None
        self.known.remove(begin, end)
        self._prompt_end -= max(0, min(end, self._prompt_end) - begin)
        self.stops = {}


class OverBudgetError(Exception):
    """Rows do not fit the budget side by side, or their states differ in shape; run them one by one."""


class Room:
    """The open rows of one group, with their tokens and bytes; `capacity` is in tokens of all rows together."""

    def __init__(self, core: Core, capacity: int) -> None:
        self.core, self.states, self.evictor, self.pager = core, core.states, core.evictor, core.pager
        layout = core.layout
        if not isinstance(layout, Layout):
            raise ValueError("begin_many() needs the state of a model; this cache has only sizes.")
        self.layout = layout
        self.capacity = capacity
        self.rows: dict[int, Row] = {}  # by id, in order of admission
        self.booking: Booking
        adapters = layout.leaves(layout.fresh())
        #: For each leaf the length of its window; 0: it has none; None: it is a tail.
        self._windows = [getattr(leaf, "max_size", 0) if adapter.is_point else None for leaf, adapter in adapters]
        self.tail_layers = self._windows.count(None)
        self._longest_window = max((window for window in self._windows if window is not None), default=0)

    def rows_of(self, namespace: str) -> list[Row]:
        """The open rows of a namespace; takes no lock."""
        return [row for row in self.rows.values() if row.request.namespace == namespace]

    def batches(self) -> list[Batch]:
        return list({id(row.batch): row.batch for row in self.rows.values()}.values())

    def points_of(self, row: Row) -> list[Any]:
        """Fresh mlx-lm caches with the row's state in all layers without tails."""
        return row.batch.points(row.at, self.layout.fresh())

    def caches_of(self, row: Row) -> list[Any]:
        """Fresh mlx-lm caches with all state of a row; keys and values are copies, not evaluated. The lock is held."""
        caches = self.points_of(row)
        for index, (cache, adapter) in enumerate(self.layout.leaves(caches)):
            pairs = [] if adapter.is_point else [pair for _, pair in row.pieces(index, 0)]
            if pairs:
                cache.keys, cache.values = (mx.concatenate(list(arrays), axis=2) for arrays in zip(*pairs, strict=True))
                cache.offset = row.position
        return caches

    def plan_stops(self, row: Row) -> None:
        """Choose where the prefill of a row is cut for checkpoints."""
        kept, settings = self.core.budget.kept_tokens(len(row.prompt)), self.core.settings
        least = row.mark_tokens if self.layout.has_states else 1  # with windows, a checkpoint cuts no pass
        found = {"matched": row.matched_tokens, "resumed": row.position, "kept": kept, "least_tokens": least}
        row.stops = checkpoint_stops(settings, row.request, row.position, row.request.limit, **found)

    def start_over(self, row: Row) -> None:
        """Move a row to 0, without state, as if no part of its prompt were stored."""
        node, row.due = row.node, row.position
        self.retreat(row, 0)
        row.batch.rows[row.at] = None
        row.batch, row.at = Batch.of_one(self.layout.fresh(), row), 0
        row.in_place, row.orphans, row.right_tokens = [], [], None
        row.cached_tokens = row.matched_tokens = row.own.start = 0
        row.reason, row.remaining = None, row.prompt.copy()
        row.own.clear()
        if self.layout.has_points:
            self.plan_stops(row)
        if node is not None:
            self.evictor.tidy(node)

    def stand(self, row: Row, node: StateNode | None) -> None:
        """Let a row guard the path to a node in place of the present path."""
        before, row.node = row.node, node
        if node is not None:
            self.states.read(node, 1)
        if before is not None:
            self.states.read(before, -1)

    def retreat(self, row: Row, offset: int) -> None:
        """Let a row guard only the nodes of its path that end at or before an offset."""
        node = row.node
        while node is not None and node.end > offset:
            node = None if node.parent is None or node.parent.is_root else node.parent
        if node is not row.node:
            self.stand(row, node)

    def used_tokens(self, more: StateNode | None = None) -> int:
        """Tokens of the rows and of one more path. A token that several share counts once. Takes no lock."""
        ends = {id(row.node): row.node for row in self.rows.values()} | {id(more): more}
        nodes = {id(node): node for end in ends.values() if end is not None for node in end.path()}
        own = sum(row.position - row.path_end for row in self.rows.values())
        return sum(node.end - node.start for node in nodes.values()) + own

    def require_tokens(self, wanted: int) -> None:
        """Raise CacheFullError if `wanted` more tokens exceed the capacity; takes no lock."""
        used = self.used_tokens()
        if used + wanted > self.capacity:
            raise CacheFullError(self.capacity, used, None, wanted)

    def point_bytes(self, position: int) -> int:
        """Bytes of a row's state at `position` in the layers without tails; 0 before the first pass."""
        windows = ((leaf, window) for leaf, window in enumerate(self._windows) if window is not None)
        return sum(self.layout.leaf_bytes(leaf) * (min(window, position) if window else 1) for leaf, window in windows)

    def has_room_for_checkpoint(self, row: Row, position: int) -> bool:
        """Whether the budget has room for a checkpoint. For a row beyond the budget: room for the row up to there."""
        nbytes, length, budget = self.point_bytes(position), len(row.prompt), self.core.budget
        if budget.can_keep(self.bytes_of(1, length, length)):
            return self.evictor.find_room(nbytes)
        # Twice: the point state is live, too.
        return budget.can_keep(position * self.layout.token_bytes + 2 * nbytes)

    def grows_at(self, position: int) -> bool:
        """Whether the layers without tails take more bytes after this position."""
        return position == 0 or position < self._longest_window

    def bytes_of(self, rows: int, columns: int, position: int) -> int:
        """Bytes of a batch of `rows` rows with room for `columns` columns. `position`: of the furthest row."""
        return rows * (columns * self.layout.token_bytes + self.point_bytes(position))

    def refusal_of(self, tokens: int) -> RequestTooLargeError | None:
        """The error if a row of `tokens` tokens does not fit in memory even alone; None: it may fit."""
        return self.core.budget.fits(self.bytes_of(1, tokens, tokens), who="alone").refusal

    def require_row(self, tokens: int) -> None:
        self.core.budget.fits(self.bytes_of(1, tokens, tokens), who="alone").require()

    def ask(
        self, nbytes: Callable[[int], int], spare: int, freed_bytes: int = 0, *, owed: int = 0, is_strict: bool = False
    ) -> int:
        """Make room for new buffers and book their bytes until `book` measures them. Returns their spare columns.

        `nbytes` takes a count of spare columns and returns the buffers' bytes. `freed_bytes`: of the buffers that they
        replace. If the budget is short, spare columns go first, then the rows' checkpoints. Then the budget is exceeded
        with all spare columns, or with the `owed` ones that a prompt needs. RequestTooLargeError: the device has no
        memory even for these. OverBudgetError: `is_strict`, and the budget would be exceeded.
        """
        budget, evictor, need = self.core.budget, self.evictor, nbytes(0) - freed_bytes
        if not budget.over_bytes(nbytes(spare) - freed_bytes):
            return self._book_more(nbytes, spare, freed_bytes)
        if need <= 0 or evictor.find_room(need):
            return self._book_more(nbytes, 0, freed_bytes)
        if budget.fits(need, self.booking.checkpoint_bytes, "eviction").is_ok:
            for row in self.rows.values():
                row.own.clear()
            if evictor.find_room(need):
                return self._book_more(nbytes, 0, freed_bytes)
        if is_strict:
            raise OverBudgetError
        if not budget.fits(nbytes(spare), freed_bytes, "rows").is_ok:
            spare = owed
            budget.fits(nbytes(spare), freed_bytes, "rows").require()
        evictor.make_room(max(0, nbytes(spare) - freed_bytes))
        return self._book_more(nbytes, spare, freed_bytes)

    def _book_more(self, nbytes: Callable[[int], int], spare: int, freed_bytes: int) -> int:
        self.booking.book_live(self.booking.live_bytes + max(0, nbytes(spare) - freed_bytes))
        return spare

    @property
    def nbytes(self) -> int:
        """Bytes of all tails, of the rows' own states and of orphans."""
        orphans = {id(spans): spans for row in self.rows.values() for spans in row.orphans}
        return sum(batch.nbytes for batch in self.batches()) + sum(spans.nbytes for spans in orphans.values())

    def book(self) -> None:
        """Book what the rows hold now, and enforce the budget."""
        self.booking.book_live(self.nbytes)
        self.evictor.make_room()

    def measure(self) -> None:
        """Book what the rows hold now, if it has changed; takes the lock only then."""
        if self.booking.live_bytes != self.nbytes:
            with self.core.lock:
                self.book()
