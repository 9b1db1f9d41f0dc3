"""Verifier: a seeded share of the resumed requests is prefilled cold beside the restored state, and both are compared.

    begin            the request is drawn, or not
    first pass       cold:  [0, resume) | compare every layer | [resume, prompt's end) -> logits, then it is let go
                     live:  stands at resume all the while, and is only read
    last token       the live logits of the prompt's last token are compared with the cold ones

On a mismatch the path is quarantined, the live caches are emptied, and the session begins again at offset 0: its
answers are bit by bit those of a session that found nothing. The second state counts against the budget while it
exists; where it does not fit, the check is skipped.

Not compared are what fetch() restores, which is the caller's before any model has run; rows of begin_many(), whose
state lies in cells among that of others; requests whose `keys` are not their token ids (the tokens do not say all that
the model was given); windows with `keep` that have wrapped (what they hold depends on how mlx-lm was fed); and sessions
whose own loop called the model before prefill() or step(). All of these count as skipped. Of a loop that takes over
after prefill() the state is compared, and the logits are not.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from radixcache.errors import described
from radixcache.layers.evaluation import NATIVE_ERRORS
from radixcache.layers.layout import Layout
from radixcache.layers.tolerances import tolerance_of
from radixcache.locking.interrupts import uninterrupted
from radixcache.locking.turns import Turns
from radixcache.tokens.ids import TokenIds
from radixcache.tree.events import QUARANTINED, Events
from radixcache.verify.comparison import Difference, Part, compare_logits, compare_states

if TYPE_CHECKING:
    from radixcache.sessions.session import Session

#: Mismatches that are kept with all that is needed to reproduce them.
KEPT_MISMATCHES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """Restored state that is not what a cold prefill gives, and what is needed to reproduce it.

    Attributes:
        namespace, tick: of the request.
        tokens: int32 token ids of its prompt.
        resume_offset: offset at which it resumed.
        step_size: tokens per forward pass of its prefill, and of the cold one.
        part: what differed: "offset", "shape", "rows" (span layers), "point" or "logits".
        layer: index of the first cache object that differed, layers without one not counted and lists of them unfolded;
            -1 for the logits.
        cache_class: its class.
        array: index of the array in it; -1 for an offset.
        row: the first token whose state differed in any span layer; None when no span layer's did.
        error: largest difference over the largest magnitude in the same array of the cold state.
        tolerance: the error that would have been accepted.
        quarantined_from: the offset from which on the path was quarantined.
        seed: verify_seed of the cache.
    """

    namespace: str
    tick: int
    tokens: TokenIds
    resume_offset: int
    step_size: int
    part: Part
    layer: int
    cache_class: str
    array: int
    row: int | None
    error: float
    tolerance: float
    quarantined_from: int
    seed: int

    def __str__(self) -> str:
        where = "the logits" if self.part is Part.LOGITS else f"layer {self.layer} ({self.cache_class}, {self.part})"
        row = "" if self.row is None else f", from token {self.row} on"
        return (
            f"state restored up to token {self.resume_offset} of {len(self.tokens)} is not what a cold prefill gives: "
            f"{where}{row}, relative error {self.error:.1e}, tolerance {self.tolerance:.1e}"
        )


class Verifier:
    """Draws requests, counts checks and keeps mismatches, for one cache.

    Attributes:
        verified: requests whose restored state was compared.
        skipped: requests that were drawn and could not be compared.
        mismatch_count: requests whose restored state, or the logits after it, were wrong.
        largest_error: the largest relative error of all comparisons.
    """

    def __init__(self, layout: Layout, share: float, seed: int, lock: Turns, events: Events) -> None:
        self.layout = layout
        self.lock = lock
        self.seed = seed
        self.verified = self.skipped = self.mismatch_count = 0
        self.largest_error = 0.0
        self.mismatches: deque[Mismatch] = deque(maxlen=KEPT_MISMATCHES)
        self._share = share
        self._random = random.Random(seed)
        self._events = events
        self._has_warned = self._has_warned_of_failure = False

    def draw(self, session: Session) -> Check | None:
        """Decide about a request that was just restored."""
        return Check(self, session) if self._is_drawn(session.cached_tokens) else None

    def pass_over(self, cached_tokens: int) -> None:
        """A request that cannot be compared was restored: it is drawn as any other, and counts as skipped then."""
        self.skipped += self._is_drawn(cached_tokens)

    def found(self, differences: Sequence[Difference]) -> None:
        """Take note of a comparison."""
        self.largest_error = max((self.largest_error, *(d.error for d in differences)))

    def keep(self, mismatch: Mismatch) -> None:
        """Count a mismatch, and keep it for who asks."""
        self.mismatch_count += 1
        self.mismatches.append(mismatch)
        start, end = mismatch.quarantined_from, mismatch.resume_offset
        self._events.emit(QUARANTINED, mismatch.namespace, start, end, 0, {"mismatch": mismatch})

    def warn(self, mismatch: Mismatch) -> None:
        """Warn of the first mismatch; the others are counted."""
        if not self._has_warned:
            self._has_warned = True
            text = f"{mismatch}. The request is served cold and the path is quarantined; see PrefixCache.mismatches."
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def warn_of_failure(self, error: Exception) -> None:
        """Warn of the first check that broke off for another reason than want of memory."""
        if not self._has_warned_of_failure:
            self._has_warned_of_failure = True
            text = f"verification broke off with {described(error)}"
            text += ". The request is served as it was restored, and not verified."
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _is_drawn(self, cached_tokens: int) -> bool:
        return bool(self._share and cached_tokens) and self._random.random() < self._share


class Check:
    """The verification of one session."""

    def __init__(self, verifier: Verifier, session: Session) -> None:
        self._step_size = 0
        self._verifier = verifier
        self._layout = verifier.layout
        self._offsets = self._leaf_offsets(session)
        self._is_pending = True
        self._was_made = False
        self._cold_logits: mx.array | None = None
        self._tolerance = 0.0

    def before_first_pass(self, session: Session, model: Any, step_size: int) -> None:
        """Compare the restored state with a cold run, the first time this is called; start the session over if wrong.

        A failure of the cold run only means that there is nothing to compare with. An evaluation or allocation that
        failed is counted as skipped and no more; of anything else, the model's or ours, the first is warned of.
        """
        if not self._is_pending:
            return
        self._is_pending = False
        self._step_size = step_size
        if not self._is_comparable(session):
            return
        differences: list[Difference] = []
        try:
            if session.hold_second_state(self._second_nbytes(session)):
                differences = self._run_cold(session, model)
        except NATIVE_ERRORS:
            self._cold_logits = None
        except Exception as error:
            self._cold_logits = None
            self._verifier.warn_of_failure(error)
        finally:
            session.hold_second_state(0)
            self._layout.release()
        wrong = [each for each in differences if each.error > self._tolerance]
        if wrong:
            self._condemn(session, wrong, session.cached_tokens)

    def agrees(self, session: Session, logits: mx.array, start: int) -> bool:
        """Whether logits (1, T, V) of the tokens from `start` on are those of the cold run at the prompt's last token.

        Waits for them. True when they do not reach that token, or were compared before. When they do not agree, the
        session starts over.
        """
        index = len(session.prompt) - 1 - start
        if self._cold_logits is None or not 0 <= index < logits.shape[1]:
            return True
        cold, self._cold_logits = self._cold_logits, None
        difference = compare_logits(logits[0, index], cold)
        with uninterrupted(), self._verifier.lock:
            self._verifier.found([difference])
        if difference.error <= self._tolerance:
            return True
        self._condemn(session, [difference], start)
        return False

    def close(self) -> None:
        """The session ends: a check that was not made counts as skipped."""
        if not self._was_made:
            self._verifier.skipped += 1
        self._is_pending, self._was_made, self._cold_logits = False, True, None

    # The cold run

    def _run_cold(self, session: Session, model: Any) -> list[Difference]:
        """Prefill the prompt from nothing; returns how the restored state differs at the resume offset.

        If it does not, the logits of the last token are kept.
        """
        prompt, resume = session.prompt, session.cached_tokens
        caches = self._layout.fresh()
        position = 0
        differences: list[Difference] = []
        try:
            while position < len(prompt):
                end = self._next_stop(position, resume, len(prompt))
                logits = model(mx.array(prompt[position:end])[None], cache=caches)
                self._layout.own(caches)
                if position == 0:
                    self._layout.reserve(caches, len(prompt) + 1)
                position = end
                if not session.hold_second_state(self._layout.live_nbytes(caches)):
                    return []
                if position == resume:
                    self._tolerance = tolerance_of(self._layout, caches, logits.dtype)
                    differences = compare_states(self._layout, session.caches, caches, resume, self._offsets)
                    self._note(differences)
                    if any(each.error > self._tolerance for each in differences):
                        return differences
                self._layout.release()
            self._cold_logits = mx.contiguous(logits[0, -1])
            mx.eval(self._cold_logits)
        finally:
            caches.clear()
        return differences

    def _next_stop(self, position: int, resume: int, length: int) -> int:
        grid = (position // self._step_size + 1) * self._step_size
        return min(stop for stop in (grid, resume, length - 1, length) if stop > position)

    def _note(self, differences: Sequence[Difference]) -> None:
        with uninterrupted(), self._verifier.lock:
            self._was_made = True
            self._verifier.verified += 1
            self._verifier.found(differences)

    def _is_comparable(self, session: Session) -> bool:
        if (session.prompt_keys != session.prompt).any() or not session.is_untouched():
            return False
        wrapped = len(session.prompt)
        leaves = self._layout.leaves(session.caches)
        if any(getattr(cache, "keep", 0) and wrapped > cache.max_size for cache, _ in leaves):
            return False
        return self._leaf_offsets(session) == self._offsets

    def _second_nbytes(self, session: Session) -> int:
        """What the cold state will take at its end."""
        points = sum(
            buffer.nbytes
            for cache, adapter in self._layout.leaves(session.caches)
            if adapter.is_point
            for buffer in adapter.buffers(cache)
        )
        return self._layout.token_bytes * (len(session.prompt) + 1) + points

    def _leaf_offsets(self, session: Session) -> list[int | None]:
        return [adapter.offset(cache) for cache, adapter in self._layout.leaves(session.caches)]

    # A mismatch

    def _condemn(self, session: Session, wrong: Sequence[Difference], position: int) -> None:
        """Quarantine what was found wrong, start the session, which was to go on at `position`, over, and report it."""
        rows = [row for each in wrong if (row := each.first_wrong_row(self._tolerance)) is not None]
        row = min(rows, default=None)
        resume = session.cached_tokens
        with uninterrupted(), self._verifier.lock:
            if wrong[0].part is Part.LOGITS:
                start = session.start_over(position, resume, 0)
            elif row is not None and all(each.part is Part.ROWS for each in wrong):
                start = session.start_over(position, row + 1, row)
            else:
                start = session.start_over(position, resume, None)
            mismatch = self._mismatch(session, wrong, resume, row, start)
            session.mismatch = mismatch
            self._verifier.keep(mismatch)
        self._verifier.warn(mismatch)

    def _mismatch(
        self, session: Session, wrong: Sequence[Difference], resume: int, row: int | None, start: int
    ) -> Mismatch:
        first = wrong[0]
        return Mismatch(
            namespace=session.namespace,
            tick=session.use.tick,
            tokens=session.prompt.copy(),
            resume_offset=resume,
            step_size=self._step_size,
            part=first.part,
            layer=first.layer,
            cache_class=first.cache_class,
            array=first.array,
            row=row,
            error=max(each.error for each in wrong),
            tolerance=self._tolerance,
            quarantined_from=start,
            seed=self._verifier.seed,
        )
