"""Generate many replies at once: every decode step is one forward pass for all of them, on one PrefixCache.

    with ParallelGenerator(cache, model, tokenizer, capacity=16384) as generator:
        first = generator.submit(tokens, marks=marks, max_tokens=200)
        second = generator.submit(other_tokens, marks=other_marks, max_tokens=200)
        for ticket, piece in generator:
            print(ticket.number, piece.text)

A round is: end what was cancelled, admit what there is room for, evaluate one chunk of one prompt, dispatch a decode
step for all replies that go on, read the tokens of the step before. So between two tokens of a running reply lie one
step and at most one chunk: `step_size` bounds its pauses, and what prefill takes from those who are being served.

Invariants, each with a test:

  G1  Each reply is what it would be alone: no other joining, leaving, failing or being cancelled changes it.
  G2  The next step is dispatched before the tokens of the last one are read, but for replies that `max_tokens` ends.
  G3  Cells and bytes for prompt and reply are there before a request comes in. Where they are not after all, the one
      that came last goes back to waiting, with its text, and goes on later from what the tree kept of it.
  G4  What was evaluated and is right is stored when a request ends, whatever ends it; nothing behind a shift is.
  G5  MLX's compiled mode is what it was before whenever no iteration is under way.

`submit`, `wait` and `Ticket` may be used by any thread; iterating and closing are one thread's business.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import mlx.core as mx
import numpy as np

from radixcache import BudgetFullError, CacheFullError, Group, PrefixCache, SessionClosedError
from radixcache.errors import ShiftError
from radixcache.interrupts import uninterrupted
from radixcache.tokens import edge_keys, token_ids, vocabulary_size
from runner.admission import Admission
from runner.context_window import FREE_SHARE, ContextError, ContextWindow, Outline
from runner.parallel_request import Request, Ticket, sample
from runner.pipeline import RELEASE_INTERVAL_TOKENS, ProgressCallback, compile_mode
from runner.reply import Piece, Reply, Sampler
from runner.turn_taking import ChunkTurns

# Half a second or so of a small model on slow cores, a few hundredths on a GPU.
DEFAULT_STEP_SIZE = 512
DEFAULT_MAX_ROWS = 16

# No room for a row: others have to end first.
NO_ROOM = (CacheFullError, BudgetFullError)


class ParallelGenerator:
    """Serves requests together. A context manager; leaving it cancels what still runs.

    Args:
        cache: a PrefixCache of the model.
        model: an mlx-lm model.
        tokenizer: mlx-lm's TokenizerWrapper.
        capacity: cells, one per token of all running requests; what several share is held once.
        max_rows: requests that run at a time at most.
        step_size: tokens per chunk of prefill.
        context: tokens of a conversation at a time at most; None: no bound but `capacity`. A longer conversation loses
            its oldest turns, before prefill or while its reply grows, and keeps its beginning.
        free_share: what such a cut frees, as a share of the context; see `runner.context_window`.
        namespace, priority: as for `PrefixCache.begin`, for all requests.

    Raises:
        ValueError: an argument out of its range.
        UnsupportedCacheError: the model's layers cannot be shared by several sequences.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: Any,
        tokenizer: Any,
        *,
        capacity: int,
        max_rows: int = DEFAULT_MAX_ROWS,
        step_size: int = DEFAULT_STEP_SIZE,
        context: int | None = None,
        free_share: float = FREE_SHARE,
        namespace: str = "",
        priority: int = 0,
    ) -> None:
        for name, value in (("capacity", capacity), ("max_rows", max_rows), ("step_size", step_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; wanted at least 1.")
        if context is not None and context > capacity:
            raise ValueError(f"a context of {context} tokens does not fit {capacity} cells; raise capacity.")
        self._window = None if context is None else ContextWindow(context, free_share)
        self._cache, self._model, self._tokenizer = cache, model, tokenizer
        self._capacity, self._max_rows, self._step_size = capacity, max_rows, step_size
        self._new_group: Callable[[], Group] = partial(
            cache.begin_many, capacity=capacity, namespace=namespace, priority=priority
        )
        self._vocabulary_length = vocabulary_size(model)
        self._turns = ChunkTurns()
        self._steps = 0
        self._failure: Exception | None = None
        self._ready: deque[tuple[Ticket, Piece]] = deque()
        self._admission = Admission(capacity, max_rows, context)
        # The only state that several threads change.
        self._arrivals = threading.Condition()
        self._submitted: list[Request] = []
        self._tickets = 0
        self._is_closed = False
        self._group = self._new_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What is asked

    def submit(
        self,
        tokens: Any,
        *,
        max_tokens: int,
        marks: Sequence[int] = (),
        keys: Any = None,
        keep: int | None = None,
        sampler: Sampler | None = None,
        stop_tokens: Collection[int] | None = None,
        reserve: int | None = None,
        on_progress: ProgressCallback | None = None,
        arrived_at_s: float | None = None,
    ) -> Ticket:
        """Hand in a request; it is served while the generator is iterated over. Any thread may call this.

        Args:
            tokens: ids of the whole prompt.
            max_tokens: tokens to sample at most, at least 1.
            marks: as `render_chat` gives them: where the system prompt and each message end.
            keys: as for `PrefixCache.begin`.
            keep: with a context: tokens that stay at the beginning. Default: up to the first mark, which is where the
                system prompt ends if there is one.
            sampler, stop_tokens, on_progress, arrived_at_s: as for `runner.pipeline.generate`.
            reserve: tokens of the reply to keep room for. Default: max_tokens. With less, more requests come in, and
                one may have to go back to waiting in the middle of its reply.

        Raises:
            ValueError: an argument out of its range, or a request that can never run: prompt and reply have more tokens
                than there are cells, or what must stay of the conversation does not fit the context.
        """
        ids = token_ids(tokens, self._vocabulary_length)
        own_keys = ids.astype(np.int64) if keys is None else edge_keys(keys, len(ids))
        for mark in marks:
            if not 0 <= mark <= len(ids):
                raise ValueError(f"mark {mark} is outside the prompt of {len(ids)} tokens.")
        if reserve is not None and reserve < 1:
            raise ValueError(f"reserve is {reserve} tokens; wanted at least 1.")
        outline = Outline.of(len(ids), marks, keep)
        reply = Reply(
            self._tokenizer,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            prompt_tokens=len(ids),
            arrived_at_s=arrived_at_s,
        )
        request = Request(
            ticket=Ticket(-1, len(ids)),
            tokens=ids,
            keys=own_keys,
            marks=tuple(marks),
            outline=outline,
            reply=reply,
            sampler=sampler,
            reserve=max_tokens if reserve is None else reserve,
            on_progress=on_progress,
        )
        if self._window is not None:
            room = min(max_tokens, self._window.quantum)
            request.drop(self._window.excess(outline, len(ids), room))
            reply.omitted_tokens = request.dropped
        elif len(ids) + max_tokens - 1 > self._capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and a reply of {max_tokens} take {len(ids) + max_tokens - 1} cells; "
                f"there are {self._capacity}. Ask for a shorter reply, or raise capacity."
            )
        with self._arrivals:
            if self._is_closed:
                raise ValueError("the generator is closed; nothing can be handed in any more.")
            request.ticket.number = self._tickets
            self._tickets += 1
            self._submitted.append(request)
            self._arrivals.notify_all()
        return request.ticket

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something is handed in that was not served yet; whether there is. Any thread may call this."""
        with self._arrivals:
            self._arrivals.wait_for(lambda: self._submitted or self._is_closed, timeout_s)
            return bool(self._submitted)

    def __iter__(self) -> Iterator[tuple[Ticket, Piece]]:
        """Serve until all that was handed in is done. Whoever breaks off may go on with another iteration."""
        with compile_mode(self._model):
            while self._ready or self._round():
                while self._ready:
                    yield self._ready.popleft()

    def close(self) -> None:
        """Cancel what waits and runs, keeping what was evaluated. Closing twice is fine."""
        with self._arrivals:
            self._is_closed = True
            self._arrivals.notify_all()
        with uninterrupted():
            self._take_submitted()
            for request in [*self._admission.waiting, *self._admission.running]:
                self._finish(request, request.reply.end("cancelled"))
            self._ready.clear()
            self._group.close()

    @property
    def group(self) -> Group:
        """The cache's group of running rows; to read."""
        return self._group

    # A round

    def _round(self) -> bool:
        """Do what there is to do once; False: nothing is left."""
        self._take_submitted()
        self._end_cancelled()
        self._admit()
        self._prefill()
        decoding = self._admission.decoding
        self._step([request for request in decoding if self._goes_on(request)])
        self._read(decoding)
        if self._group.is_lost:
            self._lose_all(self._failure or SessionClosedError("the cells of all requests were lost."))
        return bool(self._admission.running or self._admission.waiting or self._submitted or self._ready)

    def _take_submitted(self) -> None:
        with self._arrivals:
            self._admission.waiting += self._submitted
            self._submitted.clear()

    def _end_cancelled(self) -> None:
        """End what was cancelled before its first token; a reply ends with the token that is on its way."""
        for request in [*self._admission.waiting, *self._admission.running]:
            if request.ticket.cancelled() and not request.is_decoding:
                self._finish(request, request.reply.end("cancelled"))

    def _admit(self) -> None:
        while request := self._admission.next(self._group):
            try:
                with uninterrupted():
                    row = self._group.admit(request.tokens, keys=request.keys, marks=request.marks)
                    self._admission.start(request, row)
            except NO_ROOM as error:
                if self._admission.running:
                    self._admission.refuse()
                    return
                self._fail(request, error)
            except Exception as error:
                self._fail(request, error)
            else:
                if not request.reply.tokens:
                    request.reply.start()
                    request.reply.cached_tokens = row.cached_tokens
                self._report(request)

    # Prefill

    def _prefill(self) -> None:
        """Dispatch one chunk of one prompt; with its last one the first token is on its way."""
        if not self._admission.prefilling:
            return
        request = self._turns.choose(self._admission.prefilling)
        try:
            while request in self._admission.running:
                try:
                    with uninterrupted():
                        logits = self._group.prefill(self._model, request.row, self._step_size)
                        if logits is not None:
                            sample([request], logits)
                    break
                except NO_ROOM as error:
                    self._make_room(error)
        except Exception as error:
            self._failure = error
            self._fail(request, error)
            return
        mx.clear_cache()
        if request.failure is not None:
            self._fail(request, request.failure)
        elif request in self._admission.running:
            self._report(request)

    def _report(self, request: Request) -> None:
        if request.on_progress is not None:
            try:
                request.on_progress(request.row.position, len(request.tokens))
            except Exception as error:
                self._fail(request, error)

    # Decode

    def _goes_on(self, request: Request) -> bool:
        """Whether a reply takes part in the next step, for which its conversation may have to be shifted."""
        if len(request.unread) > 1 or request.reply.left == 1 or request.failure is not None:
            return False
        return self._window is None or request.row.position < self._window.tokens or self._shift(request, self._window)

    def _shift(self, request: Request, window: ContextWindow) -> bool:
        """Take the oldest turns out of the cells; False, with a note why: nothing can be taken out."""
        begin = request.outline.keep
        try:
            length = window.excess(request.outline, request.row.position, 1, request.dropped)
            while request in self._admission.running:
                try:
                    with uninterrupted():
                        self._group.remove(self._model, request.row, begin, begin + length)
                        request.shift(length)
                    return True
                except NO_ROOM as error:
                    self._make_room(error)
        except (ContextError, ShiftError, *NO_ROOM) as error:
            request.note = f"The context of {window.tokens} tokens is full: {error}"
        return False

    def _step(self, requests: list[Request]) -> None:
        """Dispatch the next forward pass of some replies, on tokens that nobody has read yet."""
        while requests := [request for request in requests if request in self._admission.running]:
            try:
                with uninterrupted():
                    tokens = mx.concatenate([request.unread[0].token for request in requests])
                    logits = self._group.step(self._model, [request.row for request in requests], tokens)
                    sample(requests, logits)
                break
            except NO_ROOM as error:
                try:
                    self._make_room(error)
                except NO_ROOM:
                    requests[0].failure = error
                    break
            except Exception as error:
                self._failure = error
                for request in requests:
                    request.failure = error
                break
        self._steps += 1
        if self._steps % RELEASE_INTERVAL_TOKENS == 0:
            mx.clear_cache()

    def _read(self, decoding: Sequence[Request]) -> None:
        """Hand out the tokens of the step before the one that is under way."""
        for request in decoding:
            if request not in self._admission.running:
                continue
            self._read_next(request)
            if request in self._admission.running and not request.unread:
                self._finish(request, request.reply.end("length", note=request.note))

    def _read_next(self, request: Request) -> None:
        """Wait for a reply's next token, and hand it out."""
        sampled = request.unread[0]
        try:
            token, is_nan = cast(int, sampled.token.item()), sampled.is_nan.item()
        except Exception as error:
            self._lose_all(error)
            return
        with uninterrupted():
            request.unread.popleft()
            if is_nan:
                # Nobody knows where it began, so nothing that this request evaluated is kept.
                request.row.right_tokens = request.row.cached_tokens
                self._fail(request, FloatingPointError("the model's logits for this request are not numbers."))
                return
            try:
                piece = request.reply.add(token, sampled.logprobs, request.ticket.cancelled)
            except Exception as error:
                self._fail(request, error)
                return
            if piece.completion is not None:
                self._finish(request, piece)
                return
            self._ready.append((request.ticket, piece))
            if request.failure is not None:
                self._fail(request, request.failure)

    # Ends

    def _make_room(self, error: Exception) -> None:
        """Let the request that came last wait again; raises the error when it is the only one."""
        if len(self._admission.running) == 1:
            raise error
        request = self._admission.last_come
        while request.unread and request in self._admission.running:
            self._read_next(request)
        if request not in self._admission.running:
            return
        with uninterrupted():
            request.row.close()
            self._admission.send_back(request)
        if self._window is not None and len(request.tokens) > self._window.tokens:
            try:
                request.shift(self._window.excess(request.outline, len(request.tokens), 0, request.dropped))
            except ContextError as error:
                self._finish(request, request.reply.end("length", note=str(error)))

    def _finish(self, request: Request, piece: Piece) -> None:
        """Hand out a last piece and store what was evaluated."""
        with uninterrupted():
            request.ticket.completion = piece.completion
            self._ready.append((request.ticket, piece))
            self._admission.end(request)
            request.unread.clear()
            if request.held_row is not None:
                request.held_row.close()

    def _fail(self, request: Request, error: Exception) -> None:
        self._finish(request, request.reply.end("error", error=error))

    def _lose_all(self, error: Exception) -> None:
        """An evaluation failed, and with it whatever was in the cells. What waits goes on with new ones."""
        self._group.__exit__(type(error), error, error.__traceback__)
        for request in list(self._admission.running):
            self._fail(request, error)
        self._group = self._new_group()
