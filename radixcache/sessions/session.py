"""Session: one request on live caches, from restoring its prefix to storing its tokens.

A session belongs to one thread at a time. It takes the cache's lock itself; forward passes run outside of the lock.

Progress: how far the layers of one session are evaluated, its forward passes, and recovery after a failure.

`position` counts the tokens whose forward pass the session ran. The offsets of the layers are larger if the caller's
own loop called the model, and unequal if a forward pass broke off. `_settle` stores only tokens that are evaluated and
known.

Recurrent caches, here called blind leaves, have no offset. A forward pass gives them new arrays, layer by layer. A
complete pass changes the first and the last blind leaf. A pass that broke off does not change the last.

Invariants:

  N1  Every checkpoint was taken when all layers stood exactly at its offset.
  N2  After a forward pass that raised, the layers stand at `position` again, or they fell back to a checkpoint, or the
      session is lost, and every later call raises SessionClosedError.
  N3  In exact mode the state up to `_grid_end` was made in whole chunks from offset 0; no more than that is stored.
  N4  After `_take_back`, nothing is left of the tokens after the offset that it returns.

Recurrent layers cannot be rewound. So the arrays from before a pass of several tokens, such as a check of drafts, are
held until the next pass (`HeldPass`): the whole pass can be undone. In exact mode, arrays of windows are held too: in a
ring that is filled in another order, sums have another order, and so other bits.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import is_not
from types import TracebackType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from radixcache.adapters.contract import Checkpoint
from radixcache.adapters.point import arrays_in
from radixcache.core import Core
from radixcache.errors import NoRoomError, RequestTooLargeError, SessionClosedError, SnapshotError, refuse_copy
from radixcache.layers.layout import Layout, is_evaluation_failure
from radixcache.ledger import FORKED
from radixcache.paging.pager import OwnState
from radixcache.paging.resume import (
    LivePath,
    PrefixRequest,
    Reason,
    ResumePlan,
    checkpoint_stops,
    floor,
)
from radixcache.settings import require_count
from radixcache.speculate.suffix_index import TAIL_TOKENS
from radixcache.tokens import Keys, KnownTokens, TokenIds, token_ids
from radixcache.tree.state_tree import Use
from radixcache.verify import Check, Finding, Mismatch


class HeldPass(NamedTuple):
    """What `Layout.roll_back` needs to undo the pass that began at an offset, and its bytes."""

    offset: int
    held: list[Any]
    nbytes: int


class Progress:
    """The layers of one request. The subclass Session adds the tokens."""

    def __init__(self, core: Core, live: LivePath, request: PrefixRequest, offset: int) -> None:
        self._core, self._live, self._request = core, live, request
        self._layout = core.layout
        self._is_exact = core.settings.exact
        self._step_size = core.settings.step_size
        #: Checkpoints and window tokens that the session has taken and the tree lacks.
        self._own = OwnState(core.budget, live.booking, len(request.prompt))
        self.is_lost = False
        #: The last error of a forward pass that was handled here.
        self._raised: BaseException | None = None
        self._held_pass: HeldPass | None = None
        self._stand_at(offset)

    def _stand_at(self, offset: int) -> None:
        """Note that the live path was moved to an offset."""
        self.caches: list[Any] = list(self._live.caches)
        self.position = self._grid_end = self._own.start = offset
        #: Whether layers may hold the arrays of their first forward pass.
        self._was_empty = offset == 0
        self._span_capacity = 0
        self._recheck_at = -1
        self._note_leaves()

    def _sync(self, known_tokens: int) -> None:
        """Note the forward passes that the caller's own loop ran; ValueError: they went beyond the known tokens."""
        offset = self._layout.first_offset(self.caches)
        if offset is None:
            return
        if not self._agree(self.caches, offset):
            self._fall_back(min(offset, self.position))
            return
        if offset == self.position:
            return
        self._grid_end = min(self._grid_end, floor(offset, self._step_size))
        if offset > known_tokens:
            raise ValueError(
                f"the caches are at offset {offset}, and only {known_tokens} tokens are known; call extend() first."
            )
        self.position = offset
        self._note_leaves()

    def _prefill_chunk(self, model: Any, chunk: TokenIds) -> None:
        """Evaluate a chunk of the prompt, and wait for it."""
        start, step_size = self.position, self._step_size
        _, held = self._forward(model, mx.array(chunk)[None], len(chunk))
        is_whole = start == self._grid_end and len(chunk) == step_size
        try:
            if self._layout.windows and (is_whole or not self._is_exact):
                self._copy_windows(start, is_last=len(chunk) < step_size or self.position == self._request.limit)
            if len(chunk) == 1 < step_size and self._is_exact:
                # A full ring buffer keeps its order: mlx-lm also continues from it, and its sums have that order.
                self._layout.evaluate(self.caches)
            else:
                self._layout.own(self.caches, was_empty=self._was_empty)
                self._was_empty = False
        except Exception as error:
            self.is_lost = True
            self._raised = error
            raise
        except BaseException:
            with self._core.lock:
                self.position = start
                self._undo(held, probe=True)
            raise
        self._measure(wait=True)
        # Before a checkpoint: MLX would put it in one of the chunk's freed buffers, which are larger.
        self._layout.release()
        if is_whole:
            self._grid_end = self.position

    def _take_checkpoint(self, kind: str) -> None:
        """Copy the point state at `position`, unless an exact cache would not resume there."""
        if not self._is_exact or self.position == self._grid_end:
            with self._core.lock:
                self._core.pager.take_checkpoint(self._own, self._live.nodes(), self.caches, self.position, kind)

    def _settle(self, known: int, broke_off: bool) -> tuple[int, int]:
        """Move the live caches to the end of what can be stored, at most `known`. Returns it and the evaluated end.

        `broke_off`: the caller's own loop raised, perhaps in the middle of a forward pass.
        """
        caches = self._live.caches
        target = self._evaluated_end(caches, known, broke_off)
        if target is None:
            low = (self._layout.offsets(caches) or (known, known))[0]
            fallen = self._fall_back(min(known, low, self.position))
            return fallen, fallen
        if target == 0:  # The first forward pass broke off: the layers that it reached hold something.
            self._layout.restore_points(caches, None, 0)
        end = target
        if self._is_exact:  # Back to what a cold run would store.
            end = min(self._grid_end, floor(target, self._step_size))
            if end > 0 and self._layout.can_rewind(caches, target, end):
                self._layout.rewind(caches, target, end)
            else:
                end = self._core.pager.fall_back(self._live, self._own, end)
        self._layout.own(self._live.caches, was_empty=self._was_empty)
        return end, target

    def _forward(self, model: Any, array: mx.array, count: int) -> tuple[mx.array, list[Any]]:
        """Dispatch the forward pass of tokens (1, T); returns logits (1, T, V) and what `_undo` needs."""
        self._drop_held_pass()
        held = self._layout.hold(self.caches, count)
        if self._span_capacity and self.position + count >= self._span_capacity:
            with self._core.lock, self._noting_refusal():
                # Make room for these tokens and more. This copies the buffers once; the copy is not evaluated yet.
                self._core.pager.grow(self._live, self.position + count)
                self._span_capacity = self._layout.span_capacity(self.caches)
        try:
            logits: mx.array = model(array, cache=self.caches)
        except BaseException as error:
            with self._core.lock:
                self._raised = error
                if is_evaluation_failure(error):
                    self.is_lost = True
                else:
                    self._undo(held, probe=False)
            raise
        self.position += count
        if self._noted:
            self._note_leaves()
        return logits, held

    @contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        """Note a refusal in `_raised`: the session has lost nothing, and its evaluated state is right."""
        try:
            yield
        except RequestTooLargeError as error:
            self._raised = error
            raise

    def _hold_pass(self, offset: int, held: list[Any]) -> None:
        """Keep what undoes the last pass, if its start cannot be reached otherwise. The lock is held."""
        if self._layout.has_states or (self._is_exact and self._layout.has_points):
            self._held_pass = HeldPass(offset, held, sum(array.nbytes for array in arrays_in(held)))
            self._live.booking.book_checkpoint(self._held_pass.nbytes)

    def _drop_held_pass(self) -> None:
        if self._held_pass is not None:
            with self._core.lock:
                self._live.booking.book_checkpoint(-self._held_pass.nbytes)
                self._held_pass = None

    def _take_back(self, offset: int, least: int) -> int:
        """Move all layers to the deepest offset at or below `offset` that can be reached, and return it.

        SnapshotError: that offset is below `least`; nothing was changed.
        """
        core, live, layout, caches, last = self._core, self._live, self._layout, self.caches, self._held_pass
        low, high = layout.offsets(caches) or (self.position, self.position)
        is_intact = low == high and self._agree(caches, high)
        target, on_grid = min(offset, low), min(offset, low)
        if self._is_exact:
            on_grid = floor(min(on_grid, self._grid_end), self._step_size)
            # Inside the prompt, other chunks give other bits. The prompt's last token has its own pass anyway.
            target = target if target >= self._request.limit else on_grid
        checkpoint, is_undone = None, False
        in_place = (is_intact or not layout.has_points) and layout.can_rewind(caches, high, target)
        if not in_place:
            if self._has_replaced_caches():
                raise SnapshotError("the caller has replaced caches of the session, whose state cannot be restored.")
            limit = min(on_grid, high if is_intact else self.position)
            held = layout.held(live.caches) if is_intact else None
            reached, checkpoint = core.pager.reach(live.nodes(), self._own, limit, held)
            is_undone = last is not None and reached < last.offset <= target
            target = last.offset if last is not None and is_undone else reached
        if target < least:
            raise SnapshotError(f"only offset {target} can be reached of {offset}; wanted at least {least}.")
        if in_place and target == high == self.position:
            return target
        try:
            if in_place:
                core.pager.retreat(live, target)
                layout.rewind(caches, high, target)
            elif last is not None and is_undone:
                intact = layout.roll_back(caches, last.held)
                assert intact, last.offset
            else:
                core.pager.go_back(live, self._own, target, checkpoint)
            self._own.cut(0, target)
        except BaseException:
            self.is_lost = True
            raise
        self._drop_held_pass()
        self._own.start = min(self._own.start, target)
        self._grid_end = min(self._grid_end, floor(target, self._step_size))
        self._was_empty |= target == 0
        self._recheck_at = self._recheck_at if in_place else -1
        self.position = target
        live.measure(caches)
        self._note_leaves()
        return target

    def _drop_drafts(self, known: int) -> None:
        """Take back what the last pass evaluated beyond the `known` tokens; the lock is held."""
        if self.position > known:
            # SnapshotError: the caller has replaced caches. `_settle` finds how much of them is certain.
            with suppress(SnapshotError):
                self._take_back(known, 0)

    def _copy_windows(self, start: int, *, is_last: bool) -> None:
        """Copy tokens from `start` on out of windows, before the windows are cut."""
        self._layout.evaluate(self.caches)
        with self._core.lock:
            self._layout.learn(self.caches)
            self._core.pager.copy_windows(self._own, self.caches, start, self.position, is_last=is_last)

    def _measure(self, wait: bool) -> None:
        """Book the bytes of the live buffers and enforce the budget; `wait`: may evaluate."""
        with self._core.lock:
            self._core.pager.after_forward(self._live, self.caches, self._request, self._own, wait)
        self._span_capacity = self._layout.span_capacity(self.caches)
        self._recheck_at = self._layout.capacity(self.caches)
        self._note_leaves()

    def _note_leaves(self) -> None:
        self._noted = self._layout.identities(self.caches)

    def _has_replaced_caches(self) -> bool:
        """Whether the caller has put other caches in the place of live ones."""
        ours, live = self.caches, self._live.caches
        return len(ours) != len(live) or any(map(is_not, ours, live))

    def _changes(self, caches: list[Any]) -> set[bool]:
        """{True}: the noted blind leaves have new arrays; {False}: they have not; both values: only some have."""
        now = self._layout.identities(caches)
        if len(now) != len(self._noted):
            return {False, True}
        return {list(map(id, old)) != list(map(id, new)) for old, new in zip(self._noted, now, strict=True)}

    def _agree(self, caches: list[Any], offset: int) -> bool:
        """Whether the blind leaves may stand at `offset`. A pass that broke off after complete passes stays hidden."""
        return self._changes(caches) <= {offset != self.position}

    def _undo(self, held: list[Any], probe: bool) -> None:
        """Bring the layers back to `position` after a forward pass that raised."""
        intact = self._layout.roll_back(self.caches, held)
        if probe:
            try:
                self._layout.evaluate(self.caches)
            except Exception:  # The failed write is still in the graph of a buffer: that buffer is lost.
                self.is_lost = True
                return
        if not intact:
            self._fall_back(self.position)
        else:
            self._note_leaves()

    def _fall_back(self, limit: int) -> int:
        """Return to the last checkpoint at or below `limit`, or to 0."""
        with self._core.lock:
            limit = min(limit, self._grid_end) if self._is_exact else limit
            self.position = self._core.pager.fall_back(self._live, self._own, limit)
        self._grid_end = min(self._grid_end, self.position)
        self._was_empty |= self.position == 0
        self.caches = list(self._live.caches)
        self._note_leaves()
        return self.position

    def _evaluated_end(self, caches: list[Any], known: int, broke_off: bool) -> int | None:
        """Rewind the caches to the end of what can be stored, and return it; None: only a checkpoint is certain."""
        offsets = self._layout.offsets(caches)
        changes = self._changes(caches)
        has_changed = True in changes
        if (self._layout.has_points and self._has_replaced_caches()) or (broke_off and has_changed):
            return None
        if offsets is None:
            return None if has_changed or self.position > known else self.position
        low, high = offsets
        if low != high:
            if self._layout.has_points:
                return None
            self._layout.rewind_spans(caches, min(low, known))
            return min(low, known)
        if changes - {high != self.position} or (high > known and not self._layout.can_rewind(caches, high, known)):
            return None
        if high > known:
            self._layout.rewind(caches, high, known)
        return min(high, known)


class Session(Progress):
    """A request in progress; made by PrefixCache.begin(), used as a context manager.

    Attributes:
        caches: the live mlx-lm caches. Read it again after each forward pass and keep no arrays out of it.
        position: tokens evaluated so far, as far as the session knows.
        cached_tokens: prompt tokens restored, not prefilled.
        matched_tokens: prompt tokens that the tree held; more than cached_tokens when `reason` says why.
        reason: why the request resumes before the end of the match, from Reason; None: it resumes at the end.
        prompt: int32 token ids of the whole prompt.
        remaining: int32 token ids that were left to evaluate at begin, never empty.
        namespace, use: as given to begin().
        mismatch: what verification found wrong with the restored state; the session then started over at offset 0, and
            cached_tokens and matched_tokens are 0.
        is_closed: whether it was closed.
        is_lost: whether the live state was lost to a failure.
        thread: the thread that began or last used the session; sessions of other threads do not read its buffers.
    """

    at, is_fresh = 0, False  # as the one row of a Solo

    def __init__(
        self, core: Core, live: LivePath, plan: ResumePlan, request: PrefixRequest, check: Check | None
    ) -> None:
        super().__init__(core, live, request, plan.resume)
        self.cached_tokens = plan.resume
        self.matched_tokens = plan.matched
        self.reason: Reason | None = plan.reason
        self.prompt: TokenIds = request.prompt
        self.remaining: TokenIds = request.prompt[plan.resume :].copy()
        self.namespace = request.namespace
        self.use: Use = request.use
        self.mismatch: Mismatch | None = None
        self.is_closed = False
        self.thread = threading.current_thread()
        self._check = check
        self._seat = live.seats
        self._known = KnownTokens(request.prompt, request.keys, core.settings.vocab_size)
        self._broke_off = False
        #: Prompt tokens to evaluate again after the session started over.
        self._owed = 0

    def __repr__(self) -> str:
        is_open = not self.is_closed and self._live.is_seat_of(self._seat)
        state = "closed" if not is_open else "lost" if self.is_lost else "open"
        return (
            f"<Session {state}: prompt of {len(self.prompt)} tokens, {self.cached_tokens} cached, at {self.position}>"
        )

    __reduce_ex__ = refuse_copy

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and error is not self._raised:
            # The caller's loop raised, perhaps in the middle of a forward pass or while evaluating logits.
            self._broke_off = True
            self.is_lost = self.is_lost or is_evaluation_failure(error)
        self.close()

    def __del__(self) -> None:
        # An interrupt between begin() and the with block leaves the session open. Garbage may be collected at any
        # moment, also in the middle of an operation of this thread.
        if not getattr(self, "is_closed", True) and not sys.is_finalizing():
            self._core.lock.when_free(self._close_unattended)

    @property
    def known_tokens(self) -> int:
        """Prompt tokens plus the tokens reported by step() and extend()."""
        return self._known.count

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not evaluated yet."""
        return max(0, len(self.prompt) - self.position)

    @property
    def owed_tokens(self) -> int:
        """Known tokens after the prompt that are not evaluated: step() takes them first."""
        return 0 if self.prompt_left else self.known_tokens - self.position

    @property
    def owed(self) -> TokenIds:
        """Ids of the owed tokens. Waits for evaluation."""
        return self._known.ids()[max(self.position, len(self.prompt)) :]

    @property
    def may_draft(self) -> bool:
        """Whether the next pass may check drafts: the prompt is evaluated, and fewer than TAIL_TOKENS tokens are owed.

        Drafting reads at most that many tokens. If all layers can return to any offset, one prompt token may be left.
        """
        return self.owed_tokens < TAIL_TOKENS and self.prompt_left <= (not self._layout.has_points)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints taken on the way, which the tree does not have yet."""
        return self._own.checkpoints

    def prefill(
        self, model: Any, step_size: int | None = None, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Evaluate the prompt up to its last token, in chunks, and take checkpoints on the way.

        A session that was drawn for verification first prefills cold beside the restored state and compares the two.

        Args:
            model: the mlx-lm model; called as model(tokens (1, T), cache=caches).
            step_size: tokens per forward pass; chunks end at its multiples, counted from offset 0. By default the
                cache's own.
            on_progress: called with (tokens evaluated, prompt tokens) before the first chunk and after each.

        Raises:
            ValueError: step_size is below 1, or in exact mode differs from the cache's.
            SessionClosedError: the session is closed, or its state was lost.
        """
        for position in self.prefill_chunks(model, step_size):
            if on_progress is not None:
                on_progress(position, len(self.prompt))

    def prefill_chunks(self, model: Any, step_size: int | None = None) -> Iterator[int]:
        """As `prefill`, one chunk at a time. Yields the tokens evaluated, before the first chunk and after each."""
        settings = self._core.settings
        settings.require_model(model)
        step_size = settings.step_size if step_size is None else require_count("step_size", step_size, "tokens")
        if settings.exact and step_size != settings.step_size:
            raise ValueError(
                f"step_size is {step_size}; the exact cache was made with {settings.step_size} and stores only "
                "state that was prefilled in chunks of that many tokens."
            )
        self._require_open()
        self._step_size = step_size
        self._compare_restored(model)
        self._sync(self.known_tokens)
        yield from self._evaluate_prompt(model, len(self.prompt) - 1)
        self._owed = 0

    def step(self, model: Any, tokens: Any, *, drafted: int = 0) -> mx.array:
        """Run the forward pass of the next tokens: the rest of the prompt first, then sampled ones.

        Args:
            tokens: token ids, a sequence or an mx.array of shape (T,) or (1, T). An array need not be evaluated
                once the prompt is done: nothing here waits for it.
            drafted: how many of the last tokens are a draft. Before the next step(), report the right ones by extend(),
                and take back the others by rewind(). close() stores only reported tokens.

        Returns:
            Logits (1, T, V), unevaluated. A session that is verified waits for those of the prompt's last token.

        Raises:
            ValueError: tokens that contradict the rest of the prompt, or what was reported by extend(); or drafted
                tokens of the last step() that were neither reported nor taken back.
            SessionClosedError: the session is closed, or its state was lost.
        """
        self._require_open()
        self._core.settings.require_model(model)
        drafted = require_count("drafted", drafted, "tokens", least=0)
        if self.position > self.known_tokens:
            raise ValueError(
                f"{self.position - self.known_tokens} drafted tokens of the last step() are neither reported by "
                f"extend() nor taken back; call rewind({self.known_tokens}) first."
            )
        self._compare_restored(model)
        self._sync(self.known_tokens)
        self._catch_up(model)
        array, count = self._next_tokens(tokens)
        start = self.position
        logits, held = self._forward(model, array, count)
        found = None if self._check is None else self._check.compare_last(logits, start)
        if found is not None:
            self._start_over(found, start)
            self._catch_up(model)
            logits, held = self._forward(model, array, count)
        if self.position - drafted > self.known_tokens:
            self._known.report(array, count - (self.position - self.known_tokens), count - drafted)
        if count > 1:
            self._hold_last_pass(start, held)
            # Cut windows back only after the first pass: rewind() may need tokens that a later pass left in them.
            self._layout.own(self.caches, was_empty=self._was_empty and start == 0, wait=False)
        if self.position > self._recheck_at or count > 1:
            self._measure(wait=False)
        if self._core.draft_index.has_more(self._known, self._live.right_tokens):
            with self._core.lock:
                self._index_tokens(self._known.keys()[: self._live.right_tokens], is_growing=True)
        return logits

    def extend(self, tokens: Any) -> None:
        """Report tokens that follow the prompt and that the caller's own loop feeds to the model, in order.

        Raises:
            ValueError: not integers in the vocabulary.
        """
        self._require_open()
        ids = token_ids(tokens, self._core.settings.vocab_size)
        self._known.report(ids, 0, len(ids))

    def rewind(self, offset: int, *, least: int = 0) -> int:
        """Take back all tokens from `offset` on, or from the last offset before it to which all layers can return.

        The session is then as if these tokens had never been given: caches, known tokens, bytes, and what close()
        stores. Only the prompt stays known, and buffers keep their capacity. Next, give step() or prefill() the tokens
        from the returned offset on.

        Layers of full attention return to any offset. A sliding window returns to an offset if live buffers, tree and
        request together still hold the window's tokens there. After a step() of 2 to 256 tokens, except the first one,
        it returns to all tokens of the step but the first. Recurrent layers return to where the last step() began, if
        it had several tokens and was the last call; otherwise to the last checkpoint, or to 0. In exact mode, an offset
        in the prompt is a multiple of `step_size`.

        Args:
            offset: tokens to keep, at most those evaluated.
            least: the smallest offset to return to.

        Returns:
            The offset reached, from `least` to `offset`; it is `position` now.

        Raises:
            ValueError: offset or least is out of its range.
            SnapshotError: the layers can only return to an offset below `least`, or the caller has replaced caches of
                the session that would have to be restored. Nothing was changed.
            SessionClosedError: the session is closed, or its state was lost, perhaps by this call.
        """
        self._require_open()
        offset = require_count("offset", offset, "tokens", least=0)
        least = require_count("least", least, "tokens", least=0)
        evaluated = self._layout.first_offset(self.caches)
        most = min(self.position if evaluated is None else evaluated, self.known_tokens)
        if not least <= offset <= most:
            raise ValueError(f"offset is {offset}; wanted {least} to {most}, as many as are evaluated and known.")
        with self._core.lock:
            reached = self._take_back(offset, least)
        self._known.cut(max(reached, len(self.prompt)))
        self._owed = 0
        return reached

    @contextmanager
    def scratch(self, first: int) -> Iterator[list[Any]]:
        """The caches from layer `first` on, for forward passes. The block leaves them as they were."""
        self._require_open()
        assert isinstance(self._layout, Layout)
        try:
            with self._layout.scratch(self.caches, first) as caches:
                yield caches
        finally:
            self._note_leaves()

    def close(self) -> None:
        """Store what was evaluated and free the live slot. Closing twice is fine."""
        if self.is_closed:
            return
        core, live = self._core, self._live
        if core.lock.is_foreign:
            self.is_closed = True
            return
        with core.lock:
            self.is_closed = True
            if not live.is_seat_of(self._seat):
                return  # The cache took the slot back.
            stored = self._request.keys[:0]
            try:
                keys = self._settle_keys()
                if keys is None:
                    core.slots.lose(live)
                else:
                    end, evaluated = self._settle(len(keys), self._broke_off)
                    core.commit(live, self._request, keys[:evaluated], end, self._own)
                    stored = keys[:end]
                    self._index_tokens(keys)
            except BaseException:
                core.slots.lose(live)
                raise
            finally:
                output_tokens = self.known_tokens - len(self.prompt)
                core.end_session(live, self._request, stored, self.cached_tokens, output_tokens)
                # A closed session that is still referenced must not hold state.
                self._own = OwnState(core.budget, live.booking)
                self.caches, self._noted, self._raised = [], [], None
                self._known.forget_pending()
                if self._check is not None:
                    self._check.close()

    def distrust_from(self, offset: int) -> None:
        """Store no state from an offset on: it was found wrong. The tree keeps what it has already."""
        with self._core.lock:
            if self._live.is_seat_of(self._seat):
                right, offset = self._live.right_tokens, max(offset, self._live.offset)
                self._live.right_tokens = offset if right is None else min(offset, right)

    def drop_checkpoints(self, kind: str) -> None:
        """Drop the checkpoints of a kind that were taken on the way; the lock is held."""
        self._own.drop(lambda each: each.kind == kind)

    def checkpoint_bytes(self, offset: int) -> int:
        """Bytes of the checkpoint that was taken at an offset; 0: there is none."""
        return self._own.bytes_at(offset)

    def _close_unattended(self) -> None:
        try:
            self.close()
        except Exception as error:
            warnings.warn(
                f"a session was not closed, and its state could not be stored: {error}", ResourceWarning, stacklevel=1
            )

    def _settle_keys(self) -> Keys | None:
        """Evaluate what is pending, and return the keys of tokens that may be stored; None: the evaluation failed.

        Drafted tokens that nobody has reported are taken back.
        """
        try:
            if not self.is_lost:
                self._layout.evaluate(self._live.caches)
                self._drop_drafts(self.known_tokens)
        except Exception:  # The pending forward pass failed, and the state with it.
            self.is_lost = True
        finally:
            self._drop_held_pass()
        if self.is_lost:
            return None
        return self._core.before_quarantine(self._known.keys(), self.namespace)[: self._live.right_tokens]

    def _index_tokens(self, keys: Keys, *, is_growing: bool = False) -> None:
        matched = min(self.matched_tokens, len(self.prompt))
        self._core.draft_index.add(self._known, keys, matched, self.namespace, is_growing=is_growing)

    def _hold_last_pass(self, start: int, held: list[Any]) -> None:
        with self._core.lock:
            if self._live.is_seat_of(self._seat):
                self._hold_pass(start, held)

    def _require_open(self) -> None:
        if self._core.lock.is_foreign:
            raise SessionClosedError(FORKED)
        self.thread = threading.current_thread()
        if self.is_closed:
            raise SessionClosedError("the session is closed; make another one with begin().")
        if not self._live.is_seat_of(self._seat):
            raise SessionClosedError("the cache of the session was closed.")
        if self.is_lost:
            raise SessionClosedError("the session's live state was lost to a failure; close it and begin() again.")

    def _evaluate_prompt(self, model: Any, last: int) -> Iterator[int]:
        """Evaluate the prompt up to `last`; yields the offset before the first chunk and after each."""
        step_size, was_known = self._step_size, self._layout.is_known
        stops = self._checkpoint_stops(last)
        yield min(self.position, last)
        while self.position < last:
            start = self.position
            end = min(last, (start // step_size + 1) * step_size, *(stop for stop in stops if stop > start))
            with self._core.timing_prefill(start, end):
                self._prefill_chunk(model, self.prompt[start:end])
            if not was_known:  # the first chunk of a cache shows the bytes of a token
                was_known = True
                with self._core.lock, self._noting_refusal():
                    whole_bytes = self._layout.request_bytes(len(self.prompt))
                    self._core.budget.fits(whole_bytes, self._live.booking.live_bytes, "request").require()
            if end in stops:
                self._take_checkpoint(stops[end])
            yield end

    def _checkpoint_stops(self, last: int) -> dict[int, str]:
        """Offsets in (position, last] at which to take a checkpoint, with the reason."""
        if not self._layout.has_points:
            return {}
        kept, settings = self._core.budget.kept_tokens(len(self.prompt)), self._core.settings
        found = {"matched": self.matched_tokens, "resumed": self.cached_tokens, "kept": kept}
        return checkpoint_stops(settings, self._request, self.position, last, **found)

    def _next_tokens(self, tokens: Any) -> tuple[mx.array, int]:
        """The tokens as (1, T), and T. Waits for them only to compare them with known tokens from `position` on."""
        position, known_tokens = self.position, self.known_tokens
        if isinstance(tokens, mx.array):
            if tokens.size == 0 or not mx.issubdtype(tokens.dtype, mx.integer):
                raise ValueError(f"tokens is an array of {tokens.size} {tokens.dtype}; wanted at least 1 integer.")
            array = tokens.reshape(1, -1)
            values = np.asarray(array[0]) if position < known_tokens else None
        else:
            values = token_ids(tokens, self._core.settings.vocab_size)
            array = mx.array(values)[None]
        count = array.shape[1]
        if position < known_tokens and values is not None:
            known = self.prompt if position + count <= len(self.prompt) else self._known.ids()
            expected = known[position : position + count]
            differs = expected != values[: len(expected)]
            if differs.any():
                index = int(differs.argmax())
                found, wanted = int(values[index]), int(expected[index])
                what = "step() the rest of the prompt first."
                raise ValueError(f"token {position + index} is {found}; wanted {wanted}, as in the prompt: {what}")
        return array, count

    def _compare_restored(self, model: Any) -> None:
        """Verify the restored state if this session was drawn for it and has not evaluated anything yet."""
        check = self._check
        if check is None or not check.is_pending:
            return
        is_untouched = self.position == self.cached_tokens and self._agree(self.caches, self.position)
        book = partial(self._core.book_second, self._live.booking)
        found = check.run(model, self._request.keys, self.caches, self._step_size, book, is_untouched)
        if found is not None:
            self._start_over(found, self.cached_tokens)

    def _start_over(self, found: Finding, position: int) -> None:
        """Quarantine wrong state, report it, and return to 0. `position`: where the next tokens of step() belong."""
        core, check = self._core, self._check
        assert check is not None
        with core.lock:
            self._own.clear()
            wrong = self._request.keys[: found.length]
            start = core.expel(self._live, wrong, found.start, self.namespace, is_branch=found.is_branch)
            mismatch = check.verifier.record(found.mismatch, self.namespace, self.use.tick, start)
            self.mismatch = mismatch
            self.cached_tokens = self.matched_tokens = 0
            self.reason = None
            self.remaining = self.prompt.copy()
            self._owed = position
            self._stand_at(0)
        check.verifier.warn(mismatch)

    def _catch_up(self, model: Any) -> None:
        """If the session started over, evaluate the prompt again up to the next tokens of step()."""
        if self._owed:
            for _ in self._evaluate_prompt(model, self._owed):
                pass
            self._owed = 0


def open_session(
    core: Core,
    prompt: TokenIds,
    keys: Keys,
    namespace: str,
    marks: tuple[int, ...],
    reserve: int,
    use: tuple[int, int | None, str],
) -> Session:
    """Restore the longest usable prefix into live caches, and open a session; `use`: priority, turn and kind."""
    session = None
    try:
        with core.lock:
            core.require_slot(namespace)
            request = PrefixRequest(prompt, keys, namespace, core.next_use(*use), marks, reserve)
            request, moving = core.read_store(request)
            if moving is not None:
                core.require_slot(namespace)  # the lock was given up
            live, plan = core.open(request, moving)
            session = Session(core, live, plan, request, core.draw_check(request, live, plan))
            live.seat(session)
            core.evictor.enforce_budget(thins=False)
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session


def warm(
    core: Core,
    begin: Callable[..., Session],
    model: Any,
    prompt: TokenIds,
    keys: Keys,
    namespace: str,
    terms: tuple[str | None, int | None, float | None],
    step_size: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> int:
    """As PrefixCache.warm: `begin` opens a session on a prompt and its keys; `terms` are those of the pin."""
    pins, length, is_pinned = core.pins, len(prompt), any(each is not None for each in terms)
    chunks = pins.whole_chunks(keys)

    def pin_if_there() -> bool:
        """Return whether a longer prompt would resume at the end of the prefix. If so, pin the prefix if asked to."""
        if not core.is_resumable(keys, namespace):
            return False
        if is_pinned:
            pins.add(keys, namespace, *terms)
        core.evictor.tidy_unpinned()
        return True

    with core.lock:
        pins.require_allowed(chunks, namespace)
        if pin_if_there():
            return 0
        if is_pinned:  # The size of checkpoints, and of a new model's tokens, is not known yet.
            pins.require_room(chunks, namespace, terms[0], 0, requests=1)
    # One more token, so that the whole prefix is prefilled.
    with begin(*(np.append(values, values[-1]) for values in (prompt, keys))) as session:
        session.prefill(model, step_size, None if on_progress is None else lambda done, _: on_progress(done, length))
        with core.lock:
            pins.require_allowed(chunks, namespace)
            session.drop_checkpoints("tail")  # They serve prompts whose end may be rewritten.
            if is_pinned:
                pins.require_room(chunks, namespace, terms[0], session.checkpoint_bytes(len(chunks)))
            session.close()
            if not pin_if_there():
                raise NoRoomError(
                    f"only {pins.stored_tokens(keys, namespace)} of {length} tokens could be stored: open sessions and "
                    f"pins leave no room in the budget of {pins.budget_bytes} bytes."
                )
    return length - session.cached_tokens
