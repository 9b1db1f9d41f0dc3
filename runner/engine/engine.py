"""The rounds of a ParallelGenerator: what the running requests' rows go through, one call at a time.

    admit      who there is room for gets a row
    prefill    one chunk is evaluated, of one prompt or of several; the last token of a long one goes with the next step
    first      where first tokens come of that they are read and handed out; what follows is the next round's
    step       the next forward pass of all replies that go on is dispatched, on tokens that nobody has read
    read       the tokens of the step before are read and handed out; where a chunk was evaluated, those of this one

Ways in which a request, or all of them, leave this order:

    no room           the one that came last goes back to waiting; what it evaluated is stored, so it resumes there
    context full      the oldest turns are taken out of the row; where that cannot be, the reply ends
    one failed        a sampler, a callback or a prompt's forward pass raised: that request ends, nobody else notices
    a step failed     the model raised in a pass of several: they all end, each with that error
    state lost        an evaluation failed: all that run end, those that wait go on in a new group
    not a number      a row's logits are NaN: that request ends, and nothing is stored but what was good for a token

Not thread-safe. No signal may come into a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from radixcache import BudgetFullError, CacheFullError, Group, Row, SessionClosedError
from radixcache.errors import ShiftError
from radixcache.generate import RELEASE_INTERVAL_TOKENS
from radixcache.groups.batch import LostStateError
from runner.engine.admission import AdmissionQueue, ChunkTurns
from runner.engine.replies import Piece
from runner.engine.sequence import (
    ContextError,
    ContextWindow,
    ParallelRequest,
    Sampled,
    Ticket,
    next_tokens,
    sample_each,
)

# A part of a chunk is evaluated where it is no less than one in so many: a pass over few tokens costs more of each.
LEAST_PART = 4
# No room for a row: others have to end first.
NO_ROOM = (CacheFullError, BudgetFullError)


class Engine:
    """Moves requests forward.

    Args:
        new_group: opens a group of the cache.
        admission: the requests; who waits is put there by the caller.
        window: bound on a conversation, or None.
        step_size: tokens per chunk of prefill.

    Attributes:
        ready: pieces to be handed out, in order.
        group: the cache's group.
    """

    def __init__(
        self,
        model: Any,
        new_group: Callable[[], Group],
        admission: AdmissionQueue,
        window: ContextWindow | None,
        step_size: int,
    ) -> None:
        self.ready: deque[tuple[Ticket, Piece]] = deque()
        self.group = new_group()
        self._model = model
        self._new_group = new_group
        self._admission = admission
        self._window = window
        self._step_size = step_size
        self._turns = ChunkTurns()
        self._steps = 0
        #: Whether a chunk was evaluated, and no step since.
        self._owes_step = False
        self._failure: Exception | None = None

    def round(self) -> None:
        """Do what there is to do once; where first tokens come of a chunk they are handed out before the step."""
        self._end_cancelled()
        has_prefilled, self._owes_step = self._owes_step, False
        if not has_prefilled:
            self._admit()
            self._end_cancelled()  # a callback may have asked for it just now
            has_prefilled = self._prefill()
            first = [request for request in self._admission.stepping if request.unread and not request.reply.tokens]
            if first and not self.group.is_lost:
                self._read(first)
                self._owes_step = True
                return
        stepping = self._admission.stepping
        # First those that end: a row that is still there and takes no part would have to be taken out of the batch.
        self._read([request for request in stepping if request.reply.left == len(request.unread)])
        first = [request for request in stepping if not request.is_decoding]
        continuing = self._continuing(stepping)
        self._step(continuing)
        self._found(first)
        # What is computed right now is read in the next round; first tokens, and where a chunk may come before, now.
        soon = continuing if has_prefilled else first
        late = [each for each in continuing if each not in soon and len(each.unread) == 1 and each.failure is None]
        self._read([request for request in stepping if request not in late])
        for request in stepping:
            if request.unread or request not in self._admission.running:
                continue
            if request.failure is not None:
                self.fail(request, request.failure)
            elif request not in continuing:
                self.finish(request, request.reply.end("length", note=request.note))
        if self.group.is_lost:
            self._lose_all(self._failure or SessionClosedError("the state of all requests was lost."))

    def finish(self, request: ParallelRequest, piece: Piece) -> None:
        """Hand out a last piece, and store what was evaluated."""
        request.ticket.completion = piece.completion
        self.ready.append((request.ticket, piece))
        self._admission.end(request)
        request.unread.clear()
        if request.held_row is not None:
            request.held_row.close()

    def fail(self, request: ParallelRequest, error: Exception) -> None:
        """End a request with what was raised."""
        self.finish(request, request.reply.end("error", error=error))

    # In order

    def _end_cancelled(self) -> None:
        """End what was cancelled before its first token; a reply ends with the token that is on its way."""
        for request in [*self._admission.waiting, *self._admission.running]:
            if request.ticket.cancelled() and not request.is_decoding:
                self.finish(request, request.reply.end("cancelled"))

    def _admit(self) -> None:
        self._refuse()
        while request := self._admission.next(self.group):
            try:
                row = self.group.admit(
                    request.tokens, keys=request.keys, marks=request.marks, namespace=request.namespace
                )
                self._admission.start(request, row)
            except NO_ROOM as error:
                if self._admission.running:
                    self._admission.refuse()
                    return
                self.fail(request, error)
            except Exception as error:
                self.fail(request, error)
            else:
                request.admitted()
                self._report(request)

    def _refuse(self) -> None:
        """End those that come next and take more bytes than the budget has, instead of waiting for all others to go."""
        waiting = self._admission.waiting
        while waiting and (error := self.group.refusal_of(len(waiting[0].tokens))) is not None:
            self.fail(waiting[0], error)

    def _prefill(self) -> bool:
        """Evaluate a chunk: of one prompt, with it the ends of others, and of one more what makes the chunk full.

        False: there is none to evaluate.
        """
        prefilling = [request for request in self._admission.prefilling if not request.is_stepping]
        if not prefilling:
            return False
        chosen, part = [self._turns.choose(prefilling)], []
        left_tokens = self._step_size - chosen[0].remaining_tokens
        for request in sorted(prefilling, key=lambda each: each.remaining_tokens):
            if request is chosen[0] or self._admission.waits(request, chosen, self.group):
                continue
            if request.remaining_tokens > left_tokens:
                part = [request] if left_tokens >= self._step_size // LEAST_PART else []
                break
            left_tokens -= request.remaining_tokens
            chosen.append(request)
        self._prefill_chunks(chosen, self._step_size)
        self._prefill_chunks(part, left_tokens)
        self._found([*chosen, *part])
        return True

    def _found(self, requests: Iterable[ParallelRequest]) -> None:
        """Tell how far these have come, or end them where that failed."""
        for request in requests:
            if request.failure is not None and request in self._admission.running:
                self.fail(request, request.failure)
            elif request in self._admission.running:
                request.found()
                self._report(request)

    def _prefill_chunks(self, requests: list[ParallelRequest], tokens: int) -> None:
        """Evaluate so many tokens of each; where a prompt is through with it the first token is on its way."""
        rows: dict[Row, ParallelRequest] = {}
        try:
            while rows := {each.row: each for each in requests if self._has_chunk(each)}:
                try:
                    for row, logits in self.group.prefill_many(self._model, [*rows], tokens, leaves_last=True):
                        sample_each([rows[row]], logits)
                    return
                except NO_ROOM as error:
                    self._make_room(error)
        except Exception as error:
            self._failure = error
            for request in [] if self.group.is_lost else rows.values():
                if len(rows) == 1:
                    self.fail(request, error)
                else:  # one of them raised; the others go on
                    self._prefill_chunks([request], tokens)

    def _has_chunk(self, request: ParallelRequest) -> bool:
        return request in self._admission.running and not request.is_stepping and request.failure is None

    def _report(self, request: ParallelRequest) -> None:
        if request.on_progress is not None:
            try:
                request.on_progress(request.row.position, len(request.tokens))
            except Exception as error:
                self.fail(request, error)

    def _continuing(self, stepping: list[ParallelRequest]) -> list[ParallelRequest]:
        """Those that take part in the next step. A conversation that has filled its context is shifted for it."""
        window, continuing = self._window, []
        for request in stepping:
            if request not in self._admission.running or request.reply.left == len(request.unread):
                continue
            if window is None or request.row.position < window.tokens or self._shift(request, window):
                continuing.append(request)
        return continuing

    def _step(self, requests: list[ParallelRequest]) -> None:
        while requests := [request for request in requests if request in self._admission.running]:
            # As they stand in their batch: else tokens and logits are put in order there and back.
            requests.sort(key=lambda request: request.row.at)
            try:
                tokens = next_tokens(requests)
                logits = self.group.step(self._model, [request.row for request in requests], tokens)
                sample_each(requests, logits)
                break
            except NO_ROOM as error:
                if len(self._admission.running) > 1:
                    self._make_room(error)
                    continue
                requests[0].failure = error
                break
            except Exception as error:
                self._failure = error
                raised = error.__cause__ if isinstance(error, LostStateError) else error
                for request in requests:
                    request.failure = raised if isinstance(raised, Exception) else error
                break
        self._steps += 1
        if self._steps % RELEASE_INTERVAL_TOKENS == 0:
            mx.clear_cache()

    def _read(self, requests: list[ParallelRequest]) -> None:
        """Wait for the next token of each of these that run, and hand it out."""
        try:
            running = [request for request in requests if request in self._admission.running and request.unread]
            read = [(request, request.unread[0], request.unread[0].token) for request in running]
        except Exception as error:
            self._lose_all(error)
            return
        for request, sampled, token in read:
            if request in self._admission.running:  # else one of the others took it along
                self._hand_out(request, sampled, token)

    def _hand_out(self, request: ParallelRequest, sampled: Sampled, token: int) -> None:
        if sampled.is_wrong:
            request.row.distrust_from(request.proven_tokens)
            self.fail(request, FloatingPointError("the model's logits for this request are not numbers."))
            return
        request.unread.popleft()
        try:
            piece = request.reply.add(token, sampled.logprobs, request.ticket.cancelled, sampled.logprob)
        except Exception as error:
            self.fail(request, error)
            return
        if piece.completion is not None:
            self.finish(request, piece)
            return
        self.ready.append((request.ticket, piece))
        if request.failure is not None:
            self.fail(request, request.failure)

    # Out of order

    def _make_room(self, error: Exception) -> None:
        """Let the request that came last wait again; raises the error when it is the only one."""
        if len(self._admission.running) == 1:
            raise error
        request = self._admission.last_come
        while request in self._admission.running and request.unread:
            self._read([request])
        if request not in self._admission.running:
            return
        request.row.close()
        self._admission.send_back(request)
        if self._window is not None:
            self._cut_waiting(request, self._window)

    def _cut_waiting(self, request: ParallelRequest, window: ContextWindow) -> None:
        """What went back to waiting with its context full, and one token more, is shifted before it is prefilled."""
        try:
            request.shift(window.excess(request.outline, len(request.tokens), 0, request.dropped))
        except ContextError as error:
            self.finish(request, request.reply.end("length", note=_full(window, error)))

    def _shift(self, request: ParallelRequest, window: ContextWindow) -> bool:
        """Take the oldest turns out of the row; False, with a note why: nothing can be taken out."""
        begin = request.outline.keep
        try:
            length = window.excess(request.outline, request.row.position, 1, request.dropped)
            while request in self._admission.running:
                try:
                    self.group.remove(self._model, request.row, begin, begin + length)
                    request.shift(length)
                    return True
                except NO_ROOM as error:
                    self._make_room(error)
        except (ContextError, ShiftError, *NO_ROOM) as error:
            request.note = _full(window, error)
        except Exception as error:
            self._failure = request.failure = error
        return False

    def _lose_all(self, error: Exception) -> None:
        """An evaluation failed, and with it the rows' state. What waits goes on in a new group."""
        self.group.close_after(error)
        for request in list(self._admission.running):
            self.fail(request, error)
        self.group, self._failure = self._new_group(), None


def _full(window: ContextWindow, error: Exception) -> str:
    return f"The context of {window.tokens} tokens is full: {error}"
