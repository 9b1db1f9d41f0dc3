"""Progress: how far the layers of one session are evaluated, its forward passes, and what is left after a failure.

`position` counts the tokens whose forward pass the session ran. The offsets of the layers are larger if the caller's
own loop called the model, and unequal if a forward pass broke off. `_settle` stores only what was evaluated and whose
tokens are known.

Recurrent caches, here called blind leaves, have no offset. A forward pass gives them new arrays in the order of the
layers: a whole pass changes the first and the last blind leaf, and a pass that broke off does not change the last.

Invariants:

  N1  Every checkpoint was taken when all layers stood exactly at its offset.
  N2  After a forward pass that raised, the layers stand at `position` again, or they fell back to a checkpoint, or the
      session is lost and every further call says so.
  N3  In exact mode the state up to `_grid_end` was made in whole chunks from offset 0; no more than that is stored.
  N4  After `_take_back`, nothing is left of the tokens behind the offset that it returns.

Recurrent layers cannot be rewound. Drafted tokens are checked several in a forward pass, and the arrays in front of
such a pass are held until the next one (`HeldPass`), so that the pass can be taken back as a whole. In exact mode those
of windows too, as a ring that is filled in another order would add up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import is_not
from typing import Any, NamedTuple

import mlx.core as mx

from radixcache.adapters.point import arrays_in
from radixcache.core import Core
from radixcache.errors import RequestTooLargeError, SnapshotError
from radixcache.layers.layout import is_evaluation_failure
from radixcache.paging.live_path import LivePath
from radixcache.paging.resume import OwnState, PrefixRequest, floor
from radixcache.tokens import TokenIds


class HeldPass(NamedTuple):
    """What `Layout.roll_back` needs to undo the pass that began at an offset, and its bytes."""

    offset: int
    held: list[Any]
    nbytes: int


class Progress:
    """The layers of a Session, which adds the tokens."""

    def __init__(self, core: Core, live: LivePath, request: PrefixRequest, offset: int) -> None:
        self._core, self._live, self._request = core, live, request
        self._layout = core.layout
        self._is_exact = core.settings.exact
        self._step_size = core.settings.step_size
        #: What the session has taken and the tree does not have yet.
        self._own = OwnState(core.layout, live.booking, len(request.prompt))
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
                # A full ring buffer stays as it is: mlx-lm goes on from it too, and adds up in that order.
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
        # Before a checkpoint, which would take the chunk's buffers: they are larger than it is.
        self._layout.release()
        if is_whole:
            self._grid_end = self.position

    def _take_checkpoint(self, kind: str) -> None:
        """Copy the point state at `position`, unless an exact cache would not resume there."""
        if not self._is_exact or self.position == self._grid_end:
            with self._core.lock:
                self._core.pager.take_checkpoint(self._own, self._live.nodes(), self.caches, self.position, kind)

    def _settle(self, known: int, broke_off: bool) -> tuple[int, int]:
        """Move the live caches to the end of what is stored, at most `known`; returns it and the evaluated offset.

        `broke_off`: the caller's own loop raised, perhaps in the middle of a forward pass.
        """
        caches = self._live.caches
        target = self._evaluated(caches, known, broke_off)
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
                # Room for these tokens and more; copies the buffers once, without waiting for it.
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
        """Note that a refused request has lost nothing: what it has evaluated is right."""
        try:
            yield
        except RequestTooLargeError as error:
            self._raised = error
            raise

    def _hold_pass(self, offset: int, held: list[Any]) -> None:
        """Hold on to what undoes the last pass, if its start cannot be reached otherwise. The lock is held."""
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

        SnapshotError: it is below `least`, and nothing was changed.
        """
        core, live, layout, caches, last = self._core, self._live, self._layout, self.caches, self._held_pass
        low, high = layout.offsets(caches) or (self.position, self.position)
        is_intact = low == high and self._agree(caches, high)
        target, on_grid = min(offset, low), min(offset, low)
        if self._is_exact:
            on_grid = floor(min(on_grid, self._grid_end), self._step_size)
            # Chunks of prefill that are cut otherwise would have other bits. The last token has a pass of its own.
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
            # The caller has replaced caches: `_settle` finds what of them is certain.
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
        """Whether the noted blind leaves have new arrays; both values if only some have."""
        now = self._layout.identities(caches)
        if len(now) != len(self._noted):
            return {False, True}
        return {list(map(id, old)) != list(map(id, new)) for old, new in zip(self._noted, now, strict=True)}

    def _agree(self, caches: list[Any], offset: int) -> bool:
        """Whether the blind leaves may stand at `offset`; a pass that broke off behind whole passes does not show."""
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

    def _evaluated(self, caches: list[Any], known: int, broke_off: bool) -> int | None:
        """The offset to store up to, with the caches rewound to it; None: only a checkpoint is certain."""
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
