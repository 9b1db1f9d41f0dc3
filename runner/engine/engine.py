"""Engine: the rounds of a ParallelGenerator. Its queue decides who runs, its rounds move the rows of those who run.

How a request joins: `AdmissionQueue.next` picks it, `Engine._admit` has the group give it a row, `_prefill` evaluates
its prompt in chunks, `_step` then takes it along; `Batch.take_in` (radixcache/groups/batch.py) adds the row to a batch.

A round:

    admit      the next requests of the queue get rows, if there is room
    prefill    evaluate one chunk, of one prompt or of several; the last token of a long prompt goes with the next step
    first      if the chunk gave first tokens, read and hand them out; the rest is for the next round
    step       dispatch the next forward pass of all replies, on tokens that nobody has read
    read       read the tokens of the step before and hand them out; after a chunk, those of this step

With drafts: if a proposal behind the tokens that were read is worth a pass, the round first reads the tokens of the
step before, and proposes behind those. Then one pass evaluates each reply's next token and its drafts, and the round
hands out all that it says. Where nothing is proposed to any reply, the round is as above. A draft model is asked for
the replies for which it is expected to gain more than what was said before; all these decode in one batch there, too.

What breaks this order:

    cancelled         a request without a first token ends at once; a reply ends with the token that is on its way
    over the budget   the request that came last waits again; its state is stored, so it resumes there if that is kept.
    or no room        A request alone goes on beyond the budget, with what the device can spare
    context full      the oldest turns are taken out of the row; if that is impossible, the reply ends
    one failed        a sampler, a callback or the forward pass of one prompt raised: that request ends
    a step failed     the model raised in a pass of several: they all end, each with that error
    state lost        an evaluation failed: all running requests end, waiting ones go on in a new group
    not a number      the logits of a row are NaN: that request ends; what is stored ends before it

Admission needs tokens of the group's capacity for what running requests hold (shared tokens once) and will hold, and as
many bytes of the budget with all evictable state gone. A request that does not fit waits until it is alone, and so do
all behind it, but not those behind a request that waits to share more with a prompt in prefill.

Chunks of prefill go in turn to the request that came first and to the one with the least left. So a request is
prefilled after at most twice its own chunks and those of earlier requests. The clock is read only to measure passes for
drafts. Not thread-safe. A signal must not interrupt a round.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from radixcache import CacheFullError, Group, RequestTooLargeError, Row, SessionClosedError
from radixcache.decode import DecodeLoop, Drafts
from radixcache.errors import ShiftError, without_frames
from radixcache.groups.batch import LostStateError
from radixcache.sessions.solo import Solo
from radixcache.speculate.pace import DraftPace
from runner.engine.replies import Piece
from runner.engine.sequence import ContextError, ContextWindow, Ticket, TokenSequence

# Tokens of a chunk, which bound the pauses of running replies: at most a second of a small model on slow cores.
PARALLEL_STEP_SIZE = 1024
# The smallest part of a chunk worth a pass is 1 / LEAST_PART: a pass over few tokens costs more per token.
LEAST_PART = 4
#: Where it saves less, a checkpoint at the end of a message is worth no forward pass of its own.
MARK_TOKENS = 128
#: Most tokens of the reply for which a session gets room at once.
MOST_RESERVED = 4096
NO_ROOM = (CacheFullError, RequestTooLargeError)  # there is no room for a row until other requests end


class AdmissionQueue:
    """The requests of one generator, in order of arrival; capacity and context are tokens."""

    def __init__(self, capacity: int, max_rows: int, context: int | None, step_size: int) -> None:
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self._capacity, self._max_rows, self._context, self.step_size = capacity, max_rows, context, step_size
        self.is_refused = False  # the group had no room: no request is admitted until a running one ends
        self._first_comes_next = True

    @property
    def prefilling(self) -> list[TokenSequence]:
        return [each for each in self.running if not each.is_decoding]

    @property
    def stepping(self) -> list[TokenSequence]:
        return [each for each in self.running if each.is_stepping]

    def next(self, group: Group) -> TokenSequence | None:
        """The request to admit next; None: none now."""
        if len(self.running) >= self._max_rows or (self.is_refused and self.running):
            return None
        for sequence in self.waiting:
            if not self._gains(sequence, group):
                return sequence if self._fits(sequence, group) else None
        return None

    def next_chunk(self, prefilling: Sequence[TokenSequence]) -> TokenSequence:
        first = min(prefilling, key=lambda each: each.ticket.number)
        shortest = min(prefilling, key=lambda each: (each.row.prompt_left, each.ticket.number))
        chosen = first if self._first_comes_next else shortest
        self._first_comes_next = chosen is not first
        return chosen

    def waits(self, sequence: TokenSequence, others: Iterable[TokenSequence], group: Group) -> bool:
        """Whether a new row can share more once these others have their chunk of prefill."""
        return bool(sequence.row.is_fresh) and self._later(sequence, others, group) > sequence.row.position

    def start(self, sequence: TokenSequence, row: Row) -> None:
        sequence.held_row = row
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def send_back(self, sequence: TokenSequence) -> None:
        self.end(sequence)
        sequence.go_back()
        insort(self.waiting, sequence, key=lambda each: each.ticket.number)

    def end(self, sequence: TokenSequence) -> None:
        self.is_refused = False
        for sequences in (self.waiting, self.running):
            if sequence in sequences:
                sequences.remove(sequence)

    def _fits(self, sequence: TokenSequence, group: Group) -> bool:
        if not self.running:
            return True
        ends = {each.row: max(self._needed(each), each.row.position) for each in self.running}
        needed = self._needed(sequence)
        own = needed - group.sharable_tokens(sequence.keys, sequence.namespace)
        owed = sum(end - row.position for row, end in ends.items())
        fits = group.used_tokens + owed + own <= self._capacity
        return fits and group.has_bytes_for(ends, sequence.keys, needed, sequence.namespace)

    def _gains(self, sequence: TokenSequence, group: Group) -> bool:
        """Whether it shares more with a prompt in prefill than with all that is evaluated so far."""
        later = self._later(sequence, self.prefilling, group)
        return later > 0 and later > group.sharable_tokens(sequence.keys, sequence.namespace)

    def _later(self, sequence: TokenSequence, others: Iterable[TokenSequence], group: Group) -> int:
        rows = [each.row for each in others if each.namespace == sequence.namespace]
        return max((group.sharable_later(sequence.keys, row, self.step_size) for row in rows), default=0)

    def _needed(self, sequence: TokenSequence) -> int:
        needed = sequence.needed_tokens
        return needed if self._context is None else min(needed, self._context)


class Engine:
    """Moves the queue's requests forward. `ready` has the pieces to hand out, in order."""

    def __init__(
        self,
        model: Any,
        new_group: Callable[[], Any],
        queue: AdmissionQueue,
        window: ContextWindow | None,
        pace: DraftPace,
        draft_model: Any = None,
    ) -> None:
        self.ready: deque[tuple[Ticket, Piece]] = deque()
        self.group = new_group()
        self._model = model if draft_model is None else self.group.with_draft_model(model, draft_model)
        self._new_group, self._queue, self._window = new_group, queue, window
        self._loop = DecodeLoop(self._model, self.group, pace)
        self._owes_step = False  # whether a chunk was evaluated, and no step since
        self._failure: Exception | None = None
        self._checked: list[tuple[TokenSequence, Piece]] = []  # what a check said, to be handed out

    def round(self) -> None:
        self._end_cancelled()
        self._keep_to_budget()
        has_prefilled, self._owes_step = self._owes_step, False
        if not has_prefilled:
            self._admit()
            self._end_cancelled()  # a callback may just have cancelled one
            has_prefilled = self._prefill()
            first = [each for each in self._queue.stepping if each.unread and not each.reply.tokens]
            if first and not self.group.is_lost:
                self._read(first)
                self._owes_step = True
                return
        stepping = self._queue.stepping
        # First the replies that end: the batch would have to drop a row that is open and takes no part.
        self._read([each for each in stepping if each.reply.left == len(each.unread)])
        first = [each for each in stepping if not each.is_decoding]
        continuing = self._continuing(stepping)
        drafts = self._loop.propose(continuing, self._read)
        was_ahead = all(each.unread for each in continuing) and not has_prefilled
        self._step(continuing, drafts)
        self._tell_progress(first)
        for sequence, piece in self._checked:
            self._deliver(sequence, piece)
        self._checked.clear()
        # Tokens of this step are read in the next round, except first tokens and those before a chunk.
        soon = continuing if has_prefilled else first
        late = [each for each in continuing if each not in soon and len(each.unread) == 1 and each.failure is None]
        self._read([each for each in stepping if each not in late])
        for sequence in stepping:
            if sequence.unread or sequence not in self._queue.running:
                continue
            if sequence.failure is not None:
                self.fail(sequence, sequence.failure)
            elif sequence not in continuing:
                self.finish(sequence, sequence.reply.end("length", note=sequence.note))
        if self.group.is_lost:
            self._lose_all(self._failure or SessionClosedError("the state of all requests was lost."))
        self._failure = None
        self._loop.times.end_round(len(continuing), is_plain=was_ahead and not drafts)

    def finish(self, sequence: TokenSequence, piece: Piece) -> None:
        """Hand out a last piece, and store what was evaluated."""
        sequence.ticket.completion = piece.completion
        self.ready.append((sequence.ticket, piece))
        self._queue.end(sequence)
        sequence.unread.clear()
        if sequence.held_row is not None:
            sequence.held_row.close()

    def fail(self, sequence: TokenSequence, error: Exception) -> None:
        self.finish(sequence, sequence.reply.end("error", error=without_frames(error)))

    def _end_cancelled(self) -> None:
        """End requests that were cancelled before their first token; `_hand_out` ends replies."""
        for sequence in [*self._queue.waiting, *self._queue.running]:
            if sequence.ticket.cancelled() and not sequence.is_decoding:
                self.finish(sequence, sequence.reply.end("cancelled"))

    def _admit(self) -> None:
        # A request that needs more memory than there is ends now, not after all others.
        for sequence in [*self._queue.waiting]:
            if (refusal := self.group.refusal_of(len(sequence.tokens))) is not None:
                self.fail(sequence, refusal)
        while each := self._queue.next(self.group):
            try:
                is_alone, reserve = isinstance(self.group, Solo), min(each.left, MOST_RESERVED)
                more: dict[str, Any] = {"embed": each.embed, "reserve": reserve} if is_alone else {}
                row = self.group.admit(
                    each.tokens, each.keys, each.marks, namespace=each.namespace, mark_tokens=MARK_TOKENS, **more
                )
                self._queue.start(each, row)
            except NO_ROOM as error:
                if self._queue.running:
                    self._queue.is_refused = True
                    return
                self.fail(each, error)
            except Exception as error:
                self.fail(each, error)
            else:
                if not each.reply.tokens:
                    each.reply.start()
                each.note_match()
                self._report(each)

    def _prefill(self) -> bool:
        """Evaluate one chunk: of the prompt whose turn it is, ends of others, a part of one more. False: none."""
        prefilling = [each for each in self._queue.prefilling if not each.is_stepping]
        if not prefilling:
            return False
        chosen, part = [self._queue.next_chunk(prefilling)], []
        left_tokens = self._queue.step_size - chosen[0].row.prompt_left
        for sequence in sorted(prefilling, key=lambda each: each.row.prompt_left):
            if sequence is chosen[0] or self._queue.waits(sequence, chosen, self.group):
                continue
            if sequence.row.prompt_left > left_tokens:
                part = [sequence] if left_tokens >= self._queue.step_size // LEAST_PART else []
                break
            left_tokens -= sequence.row.prompt_left
            chosen.append(sequence)
        self._prefill_chunks(chosen, self._queue.step_size)
        self._prefill_chunks(part, left_tokens)
        self._tell_progress([*chosen, *part])
        return True

    def _prefill_chunks(self, sequences: list[TokenSequence], tokens: int) -> None:
        """Evaluate at most `tokens` of each. At the end of a prompt, dispatch its first token."""
        rows: dict[Row, TokenSequence] = {}
        try:
            while rows := {each.row: each for each in sequences if self._has_chunk(each)}:
                try:
                    for row, logits in self.group.prefill_many(self._model, [*rows], tokens, leaves_last=True):
                        self._loop.choose([rows[row]], logits)
                    return
                except NO_ROOM as error:
                    self._make_room(error)
        except Exception as error:
            self._failure = without_frames(error)
            for sequence in [] if self.group.is_lost else rows.values():
                if len(rows) == 1:
                    self.fail(sequence, error)
                else:  # one of them raised; the others go on
                    self._prefill_chunks([sequence], tokens)

    def _has_chunk(self, sequence: TokenSequence) -> bool:
        return sequence in self._queue.running and not sequence.is_stepping and sequence.failure is None

    def _tell_progress(self, sequences: Iterable[TokenSequence]) -> None:
        for sequence in sequences:
            if sequence not in self._queue.running:
                continue
            if sequence.failure is not None:
                self.fail(sequence, sequence.failure)
            else:
                sequence.note_match()
                self._report(sequence)

    def _report(self, sequence: TokenSequence) -> None:
        if sequence.on_progress is not None:
            try:
                sequence.on_progress(sequence.row.position, len(sequence.tokens))
            except Exception as error:
                self.fail(sequence, error)

    def _continuing(self, stepping: list[TokenSequence]) -> list[TokenSequence]:
        window, continuing = self._window, []
        for sequence in stepping:
            if sequence not in self._queue.running or sequence.reply.left == len(sequence.unread):
                continue
            if window is None or sequence.row.position < window.tokens or self._shift(sequence, window):
                continuing.append(sequence)
        return continuing

    def _step(self, sequences: list[TokenSequence], drafts: Drafts) -> None:
        while sequences := [each for each in sequences if each in self._queue.running]:
            # In batch order: another order would rearrange tokens and logits.
            sequences.sort(key=lambda each: each.row.at)
            try:
                self._loop.run(sequences, drafts, self._take_checked)
                break
            except NO_ROOM as error:
                if drafts:  # there may be room without them
                    drafts = {}
                    continue
                if len(self._queue.running) == 1:
                    sequences[0].failure = without_frames(error)
                    break
                self._make_room(error)
            except Exception as error:
                self._failure = without_frames(error)
                raised = error.__cause__ if isinstance(error, LostStateError) else error
                for sequence in sequences:
                    sequence.failure = raised if isinstance(raised, Exception) else error
                break

    def _take_checked(self, sequence: TokenSequence) -> bool:
        """Take a token that a check said, to be handed out behind it."""
        if (piece := self._take(sequence)) is not None:
            self._checked.append((sequence, piece))
        return piece is not None and piece.completion is None

    def _read(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Wait for the next token of each running one of these, and hand it out; returns those that still run."""
        try:
            reading = [each for each in sequences if each in self._queue.running and each.unread]
            for sequence in reading:
                sequence.unread[0].read()
        except Exception as error:
            self._lose_all(error)
            return []
        for sequence in reading:
            if sequence in self._queue.running:  # a failure of another request may have ended it
                self._hand_out(sequence)
        return [each for each in sequences if each in self._queue.running]

    def _hand_out(self, sequence: TokenSequence) -> None:
        piece = self._take(sequence)
        if piece is not None:
            self._deliver(sequence, piece)
            if sequence.drafting is not None:
                sequence.drafting.said(sequence.reply.tokens[-1:])
        if sequence.failure is not None and sequence in self._queue.running:
            self.fail(sequence, sequence.failure)

    def _take(self, sequence: TokenSequence) -> Piece | None:
        """Add the next unread token to the reply. None: `failure` says why not."""
        sampled = sequence.unread.popleft()
        token, is_wrong, logprob = sampled.read()
        try:
            if is_wrong:
                sequence.row.distrust_from(sequence.proven_tokens)
                raise FloatingPointError("the model's logits for this request are not numbers.")
            logprobs = sampled.logprobs if sequence.has_logprobs else None
            return sequence.reply.add(token, logprobs, sequence.ticket.cancelled, logprob)
        except Exception as error:
            sequence.failure = without_frames(error)
            return None

    def _deliver(self, sequence: TokenSequence, piece: Piece) -> None:
        if piece.completion is not None:
            self.finish(sequence, piece)
        else:
            self.ready.append((sequence.ticket, piece))

    def _keep_to_budget(self) -> None:
        """While the running requests are beyond the budget, let the one that came last wait; the first goes on."""
        while len(self._queue.running) > 1 and self.group.is_over_budget:
            self._send_back()

    def _make_room(self, error: Exception) -> None:
        """Let the request that came last wait again. Raises the error if it is the only one."""
        if len(self._queue.running) == 1:
            raise error
        self._send_back()

    def _send_back(self) -> None:
        sequence = max(self._queue.running, key=lambda each: each.ticket.number)
        while sequence in self._queue.running and sequence.unread:
            self._read([sequence])
        if sequence not in self._queue.running:
            return
        sequence.row.close()
        self._queue.send_back(sequence)
        if self._window is not None:
            # Prompt and reply together may now exceed the context by a token: shift before prefill.
            try:
                sequence.shift(self._window.excess(sequence.outline, len(sequence.tokens), 0, sequence.dropped))
            except ContextError as full:
                self.finish(sequence, sequence.reply.end("length", note=_full(self._window, full)))

    def _shift(self, sequence: TokenSequence, window: ContextWindow) -> bool:
        """Take the oldest turns out of the row. False: impossible, and the sequence's note or failure says why."""
        begin = sequence.outline.head
        try:
            length = window.excess(sequence.outline, sequence.row.position, 1, sequence.dropped)
            while sequence in self._queue.running:
                try:
                    self.group.remove(self._model, sequence.row, begin, begin + length)
                    sequence.shift(length)
                    return True
                except NO_ROOM as error:
                    self._make_room(error)
        except (ContextError, ShiftError, *NO_ROOM) as error:
            sequence.note = _full(window, error)
        except Exception as error:
            self._failure = sequence.failure = without_frames(error)
        return False

    def _lose_all(self, error: Exception) -> None:
        """End all running requests after a failed evaluation. Waiting requests go on in a new group."""
        self.group.close_after(error)
        for sequence in list(self._queue.running):
            self.fail(sequence, error)
        self.group = self._loop.seat = self._new_group()


def _full(window: ContextWindow, error: Exception) -> str:
    return f"The context of {window.tokens} tokens is full: {error}"
