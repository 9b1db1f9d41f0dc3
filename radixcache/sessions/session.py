"""Session: one request on the live caches, from what could be restored to what becomes a stored prefix.

    begin          restored [0, cached_tokens)
    prefill        evaluates the prompt up to its last token, taking checkpoints on the way
    step           evaluates the prompt's last token, then each sampled one
    close          what was evaluated, and whose tokens are known, becomes a stored prefix

Two numbers describe where a session is. `position` counts the tokens whose forward pass it ran itself; the layers'
offsets say how many ran in truth, which is more when the caller's own loop called the model, and unequal when a
forward pass broke off in the middle. Close brings the two together: it never stores state that was not evaluated, nor
state whose tokens are not known, and gives up as little else as it can.

Invariants:

  N1  position <= len(prompt) + reported tokens.
  N2  Every checkpoint held was taken when all layers stood exactly at its offset.
  N3  After a forward pass that raised, the layers stand at `position` again, or the session fell back to a
      checkpoint, or it is lost and every further call says so.
  N4  In exact mode the state up to `grid_end` was made in whole chunks from offset 0; close stores no more than that.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from radixcache.adapters.snapshots import Checkpoint
from radixcache.errors import SessionClosedError
from radixcache.layers.blind_leaves import BlindLeaves, Moved
from radixcache.layers.evaluation import is_evaluation_failure
from radixcache.layers.layout import Layout
from radixcache.locking.interrupts import uninterrupted
from radixcache.paging.grid import floor, stops_on_grid
from radixcache.paging.live_path import LivePath
from radixcache.paging.resume import ResumePlan, ShortReason
from radixcache.paging.stops import checkpoint_stops
from radixcache.tokens.ids import TokenIds, token_ids
from radixcache.tokens.known import KnownTokens
from radixcache.tree.radix_tree import Keys
from radixcache.tree.state_tree import Use
from radixcache.verify.verifier import Check, Mismatch

if TYPE_CHECKING:
    from radixcache.sessions.requests import Requests


class Session:
    """A request in progress; made by PrefixCache.begin(), used as a context manager.

    Attributes:
        cached_tokens: prompt tokens restored, not prefilled.
        matched_tokens: prompt tokens that the tree held; more than cached_tokens when `reason` says why.
        reason: why less than the match was resumed, from ShortReason; None when all of it was.
        remaining: int32 token ids that were left to evaluate at begin, never empty.
        caches: the live mlx-lm caches. Read it again after each forward pass and keep no arrays out of it.
        mismatch: what verification found wrong with what was restored; the session then began again, at offset 0, and
            cached_tokens and matched_tokens are 0.
        thread: the thread that began or last used the session; sessions of other threads do not read its buffers.
        grid_end: exact mode: the multiple of step_size up to which the state is that of a cold run to the bit.
        evaluated_tokens: once settled, how many tokens were evaluated and are known.
    """

    def __init__(
        self,
        cache: Requests,
        live: LivePath,
        plan: ResumePlan,
        prompt: TokenIds,
        keys: Keys,
        namespace: str,
        use: Use,
        marks: Sequence[int],
        reserve: int,
    ) -> None:
        self.cached_tokens = plan.resume
        self.matched_tokens = plan.matched
        self.reason: ShortReason | None = plan.reason
        self.remaining = prompt[plan.resume :].copy()
        self.caches: list[Any] = list(live.caches)
        self.namespace = namespace
        self.prompt = prompt
        self.prompt_keys = keys
        self.use = use
        self.live = live
        self.reserve_tokens = reserve
        self.checkpoints: list[Checkpoint] = []
        self.mismatch: Mismatch | None = None
        self.is_closed = False
        self.is_lost = False
        self.thread = threading.current_thread()
        self._cache = cache
        self._layout: Layout = cache.layout
        self._marks = tuple(marks)
        self._position = plan.resume
        self.grid_end = plan.resume
        self.evaluated_tokens = 0
        self._known = KnownTokens(prompt, keys, cache.vocab_size)
        self._span_capacity = 0
        self._recheck_at = -1
        self._blind = BlindLeaves(self._layout, live.caches)
        self._broke_off = False
        self._handled: BaseException | None = None
        self._check: Check | None = None
        self._step_size = cache.step_size
        self._owed = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not self._handled and is_evaluation_failure(error):
            # The caller's own evaluation of what step() returned: the live buffers were part of it.
            self.is_lost = True
        # The caller's own loop may have been in the middle of a forward pass.
        self._broke_off = error is not None and error is not self._handled
        self.close()

    def __del__(self) -> None:
        # An interrupt between begin() and the with block leaves nobody to close the session. Garbage may be collected
        # at any moment, also in the middle of an operation of this very thread.
        if not getattr(self, "is_closed", True) and not sys.is_finalizing():
            self._cache.lock.when_free(self._close_unattended)

    @property
    def position(self) -> int:
        """Tokens evaluated so far, as far as the session knows."""
        return self._position

    @property
    def known_tokens(self) -> int:
        """Prompt tokens plus the tokens reported by step() and extend()."""
        return self._known.count

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
            ValueError: step_size is below 1, or in exact mode another than the cache's.
            SessionClosedError: the session is closed, or its state was lost.
        """
        step_size = self._cache.step_size if step_size is None else step_size
        if step_size < 1:
            raise ValueError(f"step_size is {step_size}; wanted 1 or more tokens.")
        if self._cache.exact and step_size != self._cache.step_size:
            raise ValueError(
                f"step_size is {step_size}; the exact cache was made with {self._cache.step_size} and stores only "
                "state that was prefilled in chunks of that many tokens."
            )
        self._require_open()
        self._step_size = step_size
        self._compare_restored(model)
        self._sync()
        self._evaluate_prompt(model, len(self.prompt) - 1, step_size, on_progress)
        self._owed = 0

    def _evaluate_prompt(
        self, model: Any, last: int, step_size: int, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Evaluate the prompt up to offset `last` in chunks, with checkpoints on the way."""
        stops = self._checkpoint_stops(last)
        if on_progress is not None:
            on_progress(min(self._position, last), len(self.prompt))
        while self._position < last:
            start = self._position
            end = min(last, (start // step_size + 1) * step_size, *(s for s in stops if s > start))
            self._evaluate(model, self.prompt[start:end])
            # First: a checkpoint would take buffers of the chunk's, which are larger than it is.
            self._layout.release()
            if start == self.grid_end and end - start == step_size:
                self.grid_end = end
            if end in stops and (end == self.grid_end or not self._cache.exact):
                self._take_checkpoint(stops[end])
            if on_progress is not None:
                on_progress(end, len(self.prompt))

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Run the forward pass of the next tokens: the rest of the prompt first, then sampled ones.

        Args:
            tokens: token ids, a sequence or an mx.array of shape (T,) or (1, T), which need not be evaluated once
                the prompt is through: nothing here waits for it.

        Returns:
            Logits (1, T, V), unevaluated. A session that is verified waits for those of the prompt's last token.

        Raises:
            ValueError: tokens that contradict the rest of the prompt, or what was reported by extend().
            SessionClosedError: the session is closed, or its state was lost.
        """
        self._require_open()
        self._compare_restored(model)
        self._sync()
        self._catch_up(model)
        array, count = self._next_tokens(tokens)
        start = self._position
        logits = self._forward_with_room(model, array, count)
        if self._check is not None and not self._check.agrees(self, logits, start):
            self._catch_up(model)
            logits = self._forward_with_room(model, array, count)
        if self._position > self.known_tokens:
            self._known.report(array, count - (self._position - self.known_tokens), count)
        if count > 1:
            self._layout.own_lazily(self.caches)
        if self._position > self._recheck_at or count > 1:
            self._measure(wait=False)
        return logits

    def extend(self, tokens: Any) -> None:
        """Report tokens that follow the prompt and that the caller's own loop feeds to the model, in order.

        Raises:
            ValueError: not integers in the vocabulary.
        """
        self._require_open()
        ids = token_ids(tokens, self._cache.vocab_size)
        self._known.report(ids, 0, len(ids))

    def close(self) -> None:
        """Store what was evaluated and free the live slot. Closing twice is fine."""
        if self.is_closed:
            return
        with uninterrupted(), self._cache.lock:
            self.is_closed = True
            try:
                self._cache.finish(self)
            finally:
                # Whoever keeps the closed session must not keep the state with it.
                self.caches = []
                self._blind.forget()
                self._known.forget_pending()
                if self._check is not None:
                    self._check.close()
                self._handled = None

    def _close_unattended(self) -> None:
        try:
            self.close()
        except Exception as error:
            # Nobody waits for this; whoever runs into it called for something else.
            warnings.warn(f"a session that nobody closed could not be stored: {error}", ResourceWarning, stacklevel=1)

    # What the verifier asks

    def verify_with(self, check: Check | None) -> None:
        """Have this session verified; None: not."""
        self._check = check

    def is_untouched(self) -> bool:
        """Whether no forward pass has gone through the leaves without an offset since begin."""
        return self._position == self.cached_tokens and self._blind.moved(self.caches) is Moved.NONE

    def hold_second_state(self, nbytes: int) -> bool:
        """Book what a cold run beside this session holds; False when it does not fit the budget."""
        with uninterrupted(), self._cache.lock:
            return self._cache.hold_second_state(self.live, nbytes)

    def start_over(self, position: int, length: int, start: int | None) -> int:
        """Quarantine what begins with the prompt's first `length` tokens, and stand at 0 with empty caches.

        Args:
            position: where the next tokens given to step() belong; what is before them is evaluated first.
            start: the offset from which on it is quarantined; None: where the node begins on which they end.

        Returns:
            That offset.
        """
        with uninterrupted(), self._cache.lock:
            start = self._cache.quarantine(self, length, start)
            self.cached_tokens = self.matched_tokens = 0
            self.reason = None
            self.remaining = self.prompt.copy()
            self.caches = list(self.live.caches)
            self._owed = position
            self._position, self._span_capacity, self._recheck_at = 0, 0, -1
            self.grid_end = 0
            self._blind = BlindLeaves(self._layout, self.caches)
        return start

    # What PrefixCache asks at close

    def settle(self) -> int:
        """Make the live caches stand at the end of what was evaluated and is known; returns that offset.

        A conversion of the caches during the session (late kv_bits) leaves the objects it replaced where they were.
        """
        caches = self.live.caches
        if not self.is_lost:
            try:
                self._layout.evaluate(caches)
            except Exception:  # whatever MLX raised: the state behind it is gone, and that is what counts here
                self.is_lost = True
        if self.is_lost:
            return 0
        known = self._cache.storable_tokens(self)
        target = self._evaluated(caches, known)
        if target is None:
            low = (self._layout.offsets(caches) or (known, known))[0]
            return self._fall_back(min(known, low, self._position))
        if target == 0:
            # The first forward pass broke off: layers that it reached hold something, the others nothing.
            self._layout.restore_points(caches, None, 0)
        self.evaluated_tokens = target
        if self._cache.exact:
            target = self._back_to_grid(target)
        self._layout.own(self.live.caches)
        return target

    def is_readable(self) -> bool:
        """Whether the calling thread may read the live buffers now, once what is pending in them was evaluated."""
        if not self.is_near():
            return False
        try:
            self._layout.evaluate(self.live.caches)
        except Exception:  # the forward pass that was pending failed, and left the session nothing to go on with
            self.is_lost = True
        return not self.is_lost

    def is_near(self) -> bool:
        """Whether the calling thread may read the live buffers, as far as can be told without evaluating them."""
        return not self.is_lost and self.thread is threading.current_thread()

    def known_keys(self) -> Keys:
        """Keys of the prompt and of what was reported, up to the first that is not a token id. Waits for those."""
        return self._known.keys()

    # Private

    def _require_open(self) -> None:
        self.thread = threading.current_thread()
        if self.is_closed:
            raise SessionClosedError("the session is closed; begin() another one.")
        if self.is_lost:
            raise SessionClosedError("the session's live state was lost to a failure; close it and begin() again.")

    def _compare_restored(self, model: Any) -> None:
        """Verify what was restored, where this session was drawn for it and has not evaluated anything yet."""
        if self._check is not None:
            self._check.before_first_pass(self, model, self._step_size)

    def _catch_up(self, model: Any) -> None:
        """Evaluate what a session that started over had evaluated before."""
        if self._owed:
            self._evaluate_prompt(model, self._owed, self._step_size)
            self._owed = 0

    def _sync(self) -> None:
        """Take note of forward passes that the caller's own loop ran."""
        offset = self._layout.first_offset(self.caches)
        if offset is None:
            return
        if not self._agree(self.caches, offset):
            self._fall_back(min(offset, self._position))
            return
        if offset == self._position:
            return
        self.grid_end = min(self.grid_end, floor(offset, self._cache.step_size))
        if offset > self.known_tokens:
            raise ValueError(
                f"the caches stand at {offset}, only {self.known_tokens} tokens are known; extend() first."
            )
        self._position = offset
        self._blind.note(self.caches)

    def _agree(self, caches: list[Any], offset: int) -> bool:
        """Whether the leaves without an offset may stand where the others do.

        A forward pass of the caller's own loop that broke off shows in them, unless others went through before it.
        """
        if not self._blind:
            return True
        return self._blind.moved(caches) is (Moved.NONE if offset == self._position else Moved.ALL)

    def _checkpoint_stops(self, last: int) -> dict[int, str]:
        """Offsets in (position, last] at which point state is to be kept, with the reason, the most lasting first."""
        if not self._layout.has_points:
            return {}
        interval, length = self._cache.checkpoint_interval, len(self.prompt)
        stops = checkpoint_stops(length, self._marks, self.matched_tokens, self.cached_tokens, interval, last)
        if self._cache.exact:
            return stops_on_grid(stops, self._cache.step_size, self._position, last)
        return {offset: kind for offset, kind in sorted(stops.items()) if self._position < offset <= last}

    def _evaluate(self, model: Any, chunk: TokenIds) -> None:
        held = self._layout.hold(self.caches, len(chunk))
        start = self._position
        if self._span_capacity and start + len(chunk) >= self._span_capacity:
            self._grow(start + len(chunk))
        self._forward(model, mx.array(chunk)[None], len(chunk), held)
        try:
            if len(chunk) == 1 < self._cache.step_size and self._cache.exact:
                # A ring that goes round stays as it is: mlx-lm goes on from there too, and adds up in that order.
                self._layout.evaluate(self.caches)
            else:
                self._layout.own(self.caches)
        except Exception as error:
            self.is_lost = True
            self._handled = error
            raise
        except BaseException:
            with uninterrupted():
                self._position = start
                self._undo(held, probe=True)
            raise
        self._measure(wait=True)

    def _forward(self, model: Any, array: mx.array, count: int, held: list[Any] | None = None) -> mx.array:
        if held is None:
            held = self._layout.hold(self.caches, count)
        try:
            logits: mx.array = model(array, cache=self.caches)
        except BaseException as error:
            with uninterrupted():
                self._handled = error
                if is_evaluation_failure(error):
                    self.is_lost = True
                else:
                    self._undo(held, probe=False)
            raise
        self._position += count
        if self._blind:
            self._blind.note(self.caches)
        return logits

    def _forward_with_room(self, model: Any, array: mx.array, count: int) -> mx.array:
        if self._span_capacity and self._position + count >= self._span_capacity:
            self._grow(self._position + count)
        return self._forward(model, array, count)

    def _undo(self, held: list[Any], probe: bool) -> None:
        """Bring the layers back to `position` after a forward pass that raised."""
        intact = self._layout.roll_back(self.caches, held)
        if probe:
            try:
                self._layout.evaluate(self.caches)
            except Exception:  # the failed write is still in some buffer's graph: that buffer is gone
                self.is_lost = True
                return
        if not intact:
            self._fall_back(self._position)
        else:
            self._blind.note(self.caches)

    def _fall_back(self, limit: int) -> int:
        """Return to the last checkpoint at or below `limit`, or to 0."""
        self._position = self._cache.retreat(self, min(limit, self.grid_end) if self._cache.exact else limit)
        self.grid_end = min(self.grid_end, self._position)
        self.caches = list(self.live.caches)
        self._blind.note(self.caches)
        return self._position

    def _back_to_grid(self, target: int) -> int:
        """Take the live caches, which stand at `target`, back to what a cold run would have there; its offset."""
        end = min(self.grid_end, floor(target, self._cache.step_size))
        if end == 0 or not self._layout.can_rewind(self.live.caches, target, end):
            return self._cache.retreat(self, end)
        self._layout.rewind(self.live.caches, target, end)
        return end

    def _evaluated(self, caches: list[Any], known: int) -> int | None:
        """The offset to store up to, the caches rewound to it; None when only a checkpoint can tell."""
        offsets = self._layout.offsets(caches)
        replaced = len(self.caches) != len(caches) or any(a is not b for a, b in zip(self.caches, caches, strict=True))
        if replaced and self._layout.has_points:
            return None
        moved = self._blind.moved(caches)
        if self._broke_off and moved is not Moved.NONE:
            return None
        if offsets is None:
            return self._position if moved is Moved.NONE and self._position <= known else None
        low, high = offsets
        if low != high:
            if self._layout.has_points:
                return None
            self._layout.rewind_spans(caches, min(low, known))
            return min(low, known)
        if not self._agree(caches, high):
            return None
        if high > known:
            if not self._layout.can_rewind(caches, high, known):
                return None
            self._layout.rewind(caches, high, known)
        return min(high, known)

    def _next_tokens(self, tokens: Any) -> tuple[mx.array, int]:
        """The tokens as (1, T), checked against what is known from `position` on; waits for them only then."""
        if isinstance(tokens, mx.array):
            if tokens.size == 0 or not mx.issubdtype(tokens.dtype, mx.integer):
                raise ValueError(f"tokens is an array of {tokens.size} {tokens.dtype}; wanted at least 1 integer.")
            array = tokens.reshape(1, -1)
            values = np.asarray(array[0]) if self._position < self.known_tokens else None
        else:
            values = token_ids(tokens, self._cache.vocab_size)
            array = mx.array(values)[None]
        count = array.shape[1]
        if self._position < self.known_tokens and values is not None:
            known = self.prompt if self._position + count <= len(self.prompt) else self._known.ids()
            expected = known[self._position : self._position + count]
            differs = expected != values[: len(expected)]
            if differs.any():
                index = int(differs.argmax())
                found, wanted = int(values[index]), int(expected[index])
                where = self._position + index
                advice = "step() takes the rest of the prompt first"
                raise ValueError(f"token {where} is {found}; {wanted} follows there: {advice}.")
        return array, count

    def _take_checkpoint(self, kind: str) -> None:
        with uninterrupted(), self._cache.lock:
            checkpoint = self._cache.take_checkpoint(self, self._position, kind)
            self.checkpoints.append(checkpoint)
            self._cache.session_checkpoint(self, checkpoint)

    def _grow(self, need: int) -> None:
        """Make room for `need` tokens and then some; copies the buffers once, without waiting for it."""
        with uninterrupted(), self._cache.lock:
            self._cache.grow(self, need)
            self._span_capacity = self._layout.span_capacity(self.caches)

    def _measure(self, wait: bool) -> None:
        """Book the bytes of the live buffers, which may have changed, and keep the budget; `wait`: may evaluate."""
        with uninterrupted(), self._cache.lock:
            self._cache.measured(self, wait)
        self._span_capacity = self._layout.span_capacity(self.caches)
        self._recheck_at = self._layout.capacity(self.caches)
        self._blind.note(self.caches)
