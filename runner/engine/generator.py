"""ParallelGenerator: many replies at once on one PrefixCache. Every decode step is one forward pass for all replies.

    with ParallelGenerator(cache, model, tokenizer, capacity=16384) as generator:
        first = generator.submit(tokens, marks=marks, max_tokens=200)
        second = generator.submit(other_tokens, marks=other_marks, max_tokens=200)
        for generation, token in generator:
            print(generation.number, token.text)

Between two tokens of a running reply, there is one step and at most one prefill chunk of `step_size` tokens. The
AdmissionQueue decides which requests run. The Engine runs their rows, in rounds.

How a request joins: `AdmissionQueue.next` picks the request, and `Engine._admit` gets a row for it from the group.
`_prefill` evaluates the prompt in chunks. Then `_step` includes the row, which `Batch.take_in` adds to a batch.

A round:

    admit      the next requests of the queue get rows, if there is room
    prefill    evaluate one chunk, of one prompt or of several; the next step evaluates the last token of a long prompt
    first      if the chunk gave first tokens, read and hand them out, and end the round here
    step       dispatch the next forward pass of all replies, on tokens that nobody has read
    read       read and hand out the tokens of the previous step; after a chunk, also the tokens of this step

With drafts: if drafts after the tokens that were read are worth a pass, the round first reads the tokens of the
previous step, and drafts after these. Then one pass evaluates each reply's next token and its drafts, and the round
hands out all tokens that it gives. If no reply has drafts, the round is as above. The draft model drafts for replies
where it is expected to gain more than drafts from earlier text. It decodes all these replies in one batch.

What breaks this order:

    cancelled         a request without a first token ends at once; a reply ends with the token that is computed now
    over the budget   the newest request waits again. Its state is stored, so it resumes there if the state is kept.
    or no room        A request that runs alone continues beyond the budget, in free device memory
    context full      the oldest turns are taken out of the row; if that is impossible, the reply ends
    one failed        a sampler, a callback or the forward pass of one prompt raised: this request ends
    a step failed     the model raised in a pass of several requests: all of them end, each with this error
    state lost        an evaluation failed: all running requests end, and waiting requests continue in a new group
    not a number      the logits of a row are NaN: this request ends; its stored state ends before the NaN

A request is admitted if prompt and reply, of this request and all running ones, fit the capacity in tokens, where
shared tokens count once, and the budget in bytes, without evictable state. Otherwise this request and later ones wait
until it fits or no other runs. Later requests do not wait for one that waits to share more with a prompt in prefill.

Prefill chunks go in turn to the oldest request and to the request with the fewest tokens left. So a prefill ends after
at most twice the chunks of this request and all earlier ones. The clock is read only to measure passes for drafts. A
signal must not interrupt a round.

Invariants, each with a test:

  PG1  A reply does not depend on other requests: whether they join, leave, fail or are cancelled.
  PG2  The next step is dispatched before the tokens of the last step are read, unless `max_tokens` ends the reply, or
       drafts are checked. First tokens of a prefill chunk are handed out before the step.
  PG3  A request is admitted when tokens and bytes suffice for prompt and reply, or when no other request runs. If they
       run out later, the newest request waits again, keeps its text, and resumes from the state that the tree still
       has. A request that runs alone continues beyond the budget, as in `PrefixCache`.
  PG4  However a request ends, its correct state is stored, but no state after a shift.
  PG5  Between iterations, MLX's compiled mode is what it was before.

Any thread may use `submit` and `wait`, and read and cancel a Generation; one thread iterates and closes.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from radixcache import CacheFullError, Group, PrefixCache, RequestTooLargeError, Row, SessionClosedError
from radixcache.decode import DecodeLoop, Drafts
from radixcache.errors import ShiftError, without_frames
from radixcache.groups.batch import LostStateError
from radixcache.layers.layout import is_evaluation_failure
from radixcache.ledger import uninterrupted
from radixcache.sessions.solo import Solo
from radixcache.settings import require_count
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import DraftPace
from radixcache.tokens import checked_prompt, require_namespace, vocabulary_size
from runner.engine.generation import FREE_SHARE, ContextError, ContextWindow, Generation, compile_mode
from runner.engine.token import Token

DEFAULT_MAX_ROWS = 16
# Tokens per chunk. A chunk pauses running replies: at most a second, for a small model on slow cores.
PARALLEL_STEP_SIZE = 1024
# The smallest part of a chunk worth a pass is 1 / LEAST_PART: a pass over few tokens costs more per token.
LEAST_PART = 4
#: A checkpoint at the end of a message that saves fewer tokens is not worth an extra forward pass.
MARK_TOKENS = 128
#: A session reserves room for at most this many tokens of the reply at its start.
MOST_RESERVED = 4096
NO_ROOM = (CacheFullError, RequestTooLargeError)  # there is no room for a row until other requests end


class AdmissionQueue:
    """The requests of one generator, in order of arrival; capacity and context are tokens."""

    def __init__(self, capacity: int, max_rows: int, context: int | None, step_size: int) -> None:
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._capacity, self._max_rows, self._context, self.step_size = capacity, max_rows, context, step_size
        self.is_refused = False  # the group had no room: no request is admitted until a running one ends
        self._first_comes_next = True

    @property
    def prefilling(self) -> list[Generation]:
        return [each for each in self.running if not each.is_decoding]

    @property
    def stepping(self) -> list[Generation]:
        return [each for each in self.running if each.is_stepping]

    def next(self, group: Group) -> Generation | None:
        """The request to admit next; None: no request can be admitted now."""
        if len(self.running) >= self._max_rows or (self.is_refused and self.running):
            return None
        for reply in self.waiting:
            if not self._gains(reply, group):
                return reply if self._fits(reply, group) else None
        return None

    def next_chunk(self, prefilling: Sequence[Generation]) -> Generation:
        first = min(prefilling, key=lambda each: each.number)
        shortest = min(prefilling, key=lambda each: (each.row.prompt_left, each.number))
        chosen = first if self._first_comes_next else shortest
        self._first_comes_next = chosen is not first
        return chosen

    def waits(self, reply: Generation, others: Iterable[Generation], group: Group) -> bool:
        """Whether a new row can share more after the next prefill chunk of these `others`."""
        return bool(reply.row.is_fresh) and self._later(reply, others, group) > reply.row.position

    def start(self, reply: Generation, row: Row) -> None:
        reply.held_row = row
        self.waiting.remove(reply)
        self.running.append(reply)

    def send_back(self, reply: Generation) -> None:
        self.end(reply)
        reply.go_back()
        insort(self.waiting, reply, key=lambda each: each.number)

    def end(self, reply: Generation) -> None:
        self.is_refused = False
        for replies in (self.waiting, self.running):
            if reply in replies:
                replies.remove(reply)

    def _fits(self, reply: Generation, group: Group) -> bool:
        if not self.running:
            return True
        ends = {each.row: max(self._needed(each), each.row.position) for each in self.running}
        needed = self._needed(reply)
        own = needed - group.sharable_tokens(reply.keys, reply.namespace)
        owed = sum(end - row.position for row, end in ends.items())
        fits = group.used_tokens + owed + own <= self._capacity
        return fits and group.has_bytes_for(ends, reply.keys, needed, reply.namespace)

    def _gains(self, reply: Generation, group: Group) -> bool:
        """Whether a request will share more with a prompt in prefill than it can share now."""
        later = self._later(reply, self.prefilling, group)
        return later > 0 and later > group.sharable_tokens(reply.keys, reply.namespace)

    def _later(self, reply: Generation, others: Iterable[Generation], group: Group) -> int:
        rows = [each.row for each in others if each.namespace == reply.namespace]
        return max((group.sharable_later(reply.keys, row, self.step_size) for row in rows), default=0)

    def _needed(self, reply: Generation) -> int:
        needed = reply.needed_tokens
        return needed if self._context is None else min(needed, self._context)


class Engine:
    """Runs the requests of the queue in rounds. `ready` has the tokens to hand out, in order."""

    def __init__(
        self,
        model: Any,
        new_group: Callable[[], Any],
        queue: AdmissionQueue,
        pace: DraftPace,
        draft_model: Any = None,
    ) -> None:
        self.ready: deque[tuple[Generation, Token]] = deque()
        self.group = new_group()
        self._model = model if draft_model is None else self.group.with_draft_model(model, draft_model)
        self._new_group, self._queue = new_group, queue
        self._loop = DecodeLoop(self._model, self.group, pace)
        self._owes_step = False  # whether a chunk was evaluated, and no step since
        self._failure: Exception | None = None  # the error that lost the state of all rows
        self._checked: list[tuple[Generation, Token]] = []  # tokens from a check, to be handed out

    def round(self) -> None:
        self._end_cancelled()
        self._keep_to_budget()
        has_prefilled, self._owes_step = self._owes_step, False
        if not has_prefilled:
            self._admit()
            self._end_cancelled()  # a callback may just have cancelled one
            has_prefilled = self._prefill()
            first = [each for each in self._queue.stepping if each.unread and not each.said]
            if first and not self.group.is_lost:
                self._read(first)
                self._owes_step = True
                return
        stepping = self._queue.stepping
        # Read replies that end first: the batch would have to drop a row that is open and takes no part.
        self._read([each for each in stepping if each.left == len(each.unread)])
        first = [each for each in stepping if not each.is_decoding]
        continuing = self._continuing(stepping)
        drafts = self._loop.propose(continuing, self._read)
        was_ahead = all(each.unread for each in continuing) and not has_prefilled
        self._step(continuing, drafts)
        # Deliver before `_tell_progress`, which ends a reply that failed after these tokens or whose callback raises.
        for reply, token in self._checked:
            self._deliver(reply, token)
        self._checked.clear()
        self._tell_progress(first)
        # The next round reads the tokens of this step, except first tokens, and tokens of a step after a chunk.
        soon = continuing if has_prefilled else first
        late = [each for each in continuing if each not in soon and len(each.unread) == 1 and each.failure is None]
        self._read([each for each in stepping if each not in late])
        for reply in stepping:
            if reply.unread or reply not in self._queue.running:
                continue
            if reply.failure is not None:
                self.fail(reply, reply.failure)
            elif reply not in continuing:
                self.finish(reply, reply.end("length", note=reply.note))
        if self.group.is_lost:
            self._lose_all(self._failure or SessionClosedError("the state of all requests was lost."))
        self._failure = None
        self._loop.times.end_round(len(continuing), is_plain=was_ahead and not drafts)

    def finish(self, reply: Generation, token: Token) -> None:
        """Hand out the last token of a reply, and store the evaluated state."""
        self.ready.append((reply, token))
        self._queue.end(reply)
        reply.let_go()

    def fail(self, reply: Generation, error: Exception) -> None:
        self.finish(reply, reply.end("error", error=without_frames(error)))

    def _end_cancelled(self) -> None:
        """End requests that were cancelled before their first token. `_hand_out` ends replies that have tokens."""
        for reply in [*self._queue.waiting, *self._queue.running]:
            if reply.cancelled() and not reply.is_decoding:
                self.finish(reply, reply.end("cancelled"))

    def _admit(self) -> None:
        # A request that needs more memory than exists ends now, without a wait for other requests.
        for reply in [*self._queue.waiting]:
            if (refusal := self.group.refusal_of(len(reply.tokens))) is not None:
                self.fail(reply, refusal)
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
                if not each.said:
                    each.start()
                each.note_match()
                self._report(each)

    def _prefill(self) -> bool:
        """Evaluate one chunk: of the next prompt, and if it is short, of others too. False: there is no prompt."""
        prefilling = [each for each in self._queue.prefilling if not each.is_stepping]
        if not prefilling:
            return False
        chosen, part = [self._queue.next_chunk(prefilling)], []
        left_tokens = self._queue.step_size - chosen[0].row.prompt_left
        for reply in sorted(prefilling, key=lambda each: each.row.prompt_left):
            if reply is chosen[0] or self._queue.waits(reply, chosen, self.group):
                continue
            if reply.row.prompt_left > left_tokens:
                part = [reply] if left_tokens >= self._queue.step_size // LEAST_PART else []
                break
            left_tokens -= reply.row.prompt_left
            chosen.append(reply)
        self._prefill_chunks(chosen, self._queue.step_size)
        self._prefill_chunks(part, left_tokens)
        self._tell_progress([*chosen, *part])
        return True

    def _prefill_chunks(self, replies: list[Generation], tokens: int) -> None:
        """Evaluate at most `tokens` of each prompt. At the end of a prompt, dispatch the first token of the reply."""
        rows: dict[Row, Generation] = {}
        try:
            while rows := {each.row: each for each in replies if self._has_chunk(each)}:
                try:
                    for row, logits in self.group.prefill_many(self._model, [*rows], tokens, leaves_last=True):
                        self._loop.choose([rows[row]], logits)
                    return
                except NO_ROOM as error:
                    self._make_room(error)
        except Exception as error:
            self._failure_of(error)
            for reply in [] if self.group.is_lost else rows.values():
                if len(rows) == 1:
                    self.fail(reply, error)
                else:  # one of them raised; retry each alone
                    self._prefill_chunks([reply], tokens)

    def _has_chunk(self, reply: Generation) -> bool:
        return reply in self._queue.running and not reply.is_stepping and reply.failure is None

    def _tell_progress(self, replies: Iterable[Generation]) -> None:
        for reply in replies:
            if reply not in self._queue.running:
                continue
            if reply.failure is not None:
                self.fail(reply, reply.failure)
            else:
                reply.note_match()
                self._report(reply)

    def _report(self, reply: Generation) -> None:
        if reply.on_progress is not None:
            try:
                reply.on_progress(reply.row.position, len(reply.tokens))
            except Exception as error:
                self.fail(reply, error)

    def _continuing(self, stepping: list[Generation]) -> list[Generation]:
        continuing = []
        for reply in stepping:
            if reply not in self._queue.running or reply.left == len(reply.unread):
                continue
            window = reply.window
            if window is None or reply.row.position < window.tokens or self._shift(reply, window):
                continuing.append(reply)
        # To make room for a shift, one of these may have been sent back.
        return [each for each in continuing if each in self._queue.running]

    def _step(self, replies: list[Generation], drafts: Drafts) -> None:
        while replies := [each for each in replies if each in self._queue.running]:
            # Keep batch order: in another order, tokens and logits would have to be rearranged.
            replies.sort(key=lambda each: each.row.at)
            try:
                self._loop.run(replies, drafts, self._take_checked)
                break
            except NO_ROOM as error:
                if drafts:  # there may be room without drafts
                    drafts = {}
                    continue
                if len(self._queue.running) == 1:
                    replies[0].failure = without_frames(error)
                    break
                self._make_room(error)
            except Exception as error:
                failure = self._failure_of(error)
                raised = failure.__cause__ if isinstance(failure, LostStateError) else failure
                for reply in replies:
                    reply.failure = raised if isinstance(raised, Exception) else failure
                break

    def _failure_of(self, error: Exception) -> Exception:
        """The error without frames. If the state of rows was lost, the first such error: later ones only repeat it."""
        is_lost = self.group.is_lost or is_evaluation_failure(error)
        failure = without_frames(error)
        if is_lost:
            self._failure = failure = self._failure or failure
        return failure

    def _take_checked(self, reply: Generation) -> bool:
        """Take a token from a check; it is handed out after the check. Return whether the reply continues."""
        if (token := self._take(reply)) is not None:
            self._checked.append((reply, token))
        return token is not None and token.completion is None

    def _read(self, replies: Sequence[Generation]) -> list[Generation]:
        """Wait for the next token of each of these replies that runs, and hand it out. Return those that still run."""
        try:
            reading = [each for each in replies if each in self._queue.running and each.unread]
            for reply in reading:
                reply.unread[0].read()
        except Exception as error:
            self._lose_all(error)
            return []
        for reply in reading:
            if reply in self._queue.running:  # a failure of another request may have ended it
                self._hand_out(reply)
        return [each for each in replies if each in self._queue.running]

    def _hand_out(self, reply: Generation) -> None:
        token = self._take(reply)
        if token is not None:
            self._deliver(reply, token)
            if reply.drafting is not None:
                reply.drafting.advance(reply.said[-1:])
        if reply.failure is not None and reply in self._queue.running:
            self.fail(reply, reply.failure)

    def _take(self, reply: Generation) -> Token | None:
        """Add the next unread token to the reply. None: there was an error, now in `failure`."""
        sampled = reply.unread.popleft()
        token, is_wrong, logprob = sampled.read()
        try:
            if is_wrong:
                reply.row.distrust_from(reply.proven_tokens)
                raise FloatingPointError("the model's logits for this request are not numbers.")
            logprobs = sampled.logprobs if reply.has_logprobs else None
            return reply.add(token, logprobs, logprob)
        except Exception as error:
            reply.failure = without_frames(error)
            return None

    def _deliver(self, reply: Generation, token: Token) -> None:
        if token.completion is not None:
            self.finish(reply, token)
        else:
            self.ready.append((reply, token))

    def _keep_to_budget(self) -> None:
        """While the running requests exceed the budget, send the newest back to wait. The oldest always continues."""
        while len(self._queue.running) > 1 and self.group.is_over_budget:
            self._send_back()

    def _make_room(self, error: Exception) -> None:
        """Send the newest running request back to wait. If only one runs, raise the error."""
        if len(self._queue.running) == 1:
            raise error
        self._send_back()

    def _send_back(self) -> None:
        reply = max(self._queue.running, key=lambda each: each.number)
        while reply in self._queue.running and reply.unread:
            self._read([reply])
        if reply not in self._queue.running:
            return
        reply.row.close()
        self._queue.send_back(reply)
        if (window := reply.window) is not None:
            # Prompt and reply together may now exceed the context by a token: shift before prefill.
            try:
                reply.shift(window.excess(len(reply.tokens), 0, reply.dropped))
            except ContextError as full:
                self.finish(reply, reply.end("length", note=_full(window, full)))

    def _shift(self, reply: Generation, window: ContextWindow) -> bool:
        """Take the oldest turns out of the row. False: that is impossible; the reply's note or failure says why."""
        begin = window.head
        try:
            length = window.excess(reply.row.position, 1, reply.dropped)
            while reply in self._queue.running:
                try:
                    self.group.remove(self._model, reply.row, begin, begin + length)
                    reply.shift(length)
                    return True
                except NO_ROOM as error:
                    self._make_room(error)
        except (ContextError, ShiftError, *NO_ROOM) as error:
            reply.note = _full(window, error)
        except Exception as error:
            reply.failure = self._failure_of(error)
        return False

    def _lose_all(self, error: Exception) -> None:
        """End all running requests after a failed evaluation. Waiting requests continue in a new group."""
        self.group.close_after(error)
        for reply in list(self._queue.running):
            self.fail(reply, error)
        self.group = self._loop.seat = self._new_group()


def _full(window: ContextWindow, error: Exception) -> str:
    return f"The context of {window.tokens} tokens is full: {error}"


class ParallelGenerator:
    """Serves requests together. A context manager: its exit cancels all requests.

    Args:
        cache: a PrefixCache of the model.
        model: an mlx-lm model.
        tokenizer: mlx-lm's TokenizerWrapper.
        capacity: tokens of all running requests together; shared tokens count once.
        max_rows: most requests that run at a time.
        step_size: tokens per chunk of prefill.
        context: most tokens of a conversation at a time; None: only `capacity` limits it. A longer conversation loses
            its oldest turns, before prefill or during its reply, but not its beginning.
        free_share: share of the context that such a cut frees; see `runner.engine.generation`.
        namespace: the namespace of requests that name none, as in `PrefixCache.begin`.
        priority: the priority of all requests, as in `PrefixCache.begin`.
        speculate: the source of drafts, as in `PrefixCache.drafting`: "tree", "prompt", or None: only predictions.
            Replies, seeded ones too, are the same as without drafts, up to rounding.
        draft_model: drafts tokens too, where that is expected to save time. `cache` must have been made with the caches
            of both models, in this order.
        is_alone: run one request at a time, each in a Session. `PrefixCache.alone` says when this is needed.

    Raises:
        ValueError: an argument out of its range.
        UnsupportedCacheError: the model's layers cannot be shared by several replies.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: Any,
        tokenizer: Any,
        *,
        capacity: int,
        max_rows: int = DEFAULT_MAX_ROWS,
        step_size: int = PARALLEL_STEP_SIZE,
        context: int | None = None,
        free_share: float = FREE_SHARE,
        namespace: str = "",
        priority: int = 0,
        speculate: Literal["tree", "prompt"] | None = None,
        draft_model: Any = None,
        is_alone: bool = False,
    ) -> None:
        capacity = require_count("capacity", capacity, "tokens")
        max_rows = require_count("max_rows", max_rows, "requests")
        step_size = require_count("step_size", step_size, "tokens")
        if context is not None and require_count("context", context, "tokens") > capacity:
            raise ValueError(f"a context of {context} tokens does not fit a capacity of {capacity}; raise it.")
        self._window = None if context is None else ContextWindow(context, free_share)
        self._model, self._tokenizer, self._capacity, self._namespace = model, tokenizer, capacity, namespace
        self._vocabulary_length = vocabulary_size(model)
        new_group: Any = partial(cache.begin_many, capacity=capacity)
        if is_alone:
            new_group, max_rows = cache.alone, 1
        new_group = partial(new_group, namespace=namespace, priority=priority)
        self._queue = AdmissionQueue(capacity, max_rows, context, step_size)
        self._drafting = partial(cache.drafting, speculate=speculate)
        pace = cache.drafting([0], speculate=None).pace
        self._has_draft_model = draft_model is not None
        self._engine = Engine(model, new_group, self._queue, pace, draft_model)
        self._arrivals = threading.Condition()  # guards the fields below
        self._submitted: list[Generation] = []
        self._count = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        tokens: Any,
        *,
        marks: Sequence[int] = (),
        keys: Any = None,
        keep: int | None = None,
        namespace: str | None = None,
        **options: Any,
    ) -> Generation:
        """Add a request; iteration over the generator serves it. Any thread may call this.

        Args:
            tokens: ids of the whole prompt.
            marks: the offsets where the system prompt and each message end, as from `render_chat`. With recurrent
                layers, a message of less than 128 tokens gets no checkpoint at its end, except the first and the last.
            keys: as in `PrefixCache.begin`.
            keep: with a context: how many tokens at the beginning always stay. Default: up to the first mark, which is
                the end of the system prompt if there is one.
            namespace: the namespace of the request. Default: the generator's.
            options: the options of a Generation; `max_tokens` is required.

        Raises:
            ValueError: an argument out of its range, or a request that can never run: prompt and reply exceed the
                capacity, or the part of the conversation that must stay exceeds the context.
        """
        ids, own_keys = checked_prompt(tokens, keys, marks, self._vocabulary_length)
        require_namespace(namespace or "")
        if keep is not None and not 0 <= keep <= len(ids):
            raise ValueError(f"keep is {keep} tokens; wanted 0 to {len(ids)}, the length of the prompt.")
        asked = Generation(
            tokenizer=self._tokenizer,
            tokens=ids,
            keys=own_keys,
            marks=tuple(marks),
            namespace=self._namespace if namespace is None else namespace,
            window=None if self._window is None else self._window.over(len(ids), marks, keep),
            **options,
        )
        most = asked.max_tokens
        drafting = self._drafting(ids, asked.namespace, prediction=asked.prediction, max_tokens=most)
        if asked.embed is not None:
            drafting = Drafting([], drafting.pace)
        asked.draft_tokens = asked.num_draft_tokens if self._has_draft_model else 0
        if asked.draft_tokens or not drafting.is_empty:
            asked.drafting, asked.facts.drafted = drafting, drafting.drafted
        if asked.window is not None:
            asked.drop(asked.window.excess(len(ids), min(most, asked.window.quantum)))
            asked.facts.omitted_tokens = asked.dropped
        elif (needed := len(ids) + most - 1) > self._capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and a reply of {most} take {needed} of a "
                f"capacity of {self._capacity}. Ask for a shorter reply, or raise capacity."
            )
        with self._arrivals:
            if self._is_closed:
                raise ValueError("the generator is closed and takes no more requests.")
            asked.number = self._count
            self._count += 1
            self._submitted.append(asked)
            self._arrivals.notify_all()
        return asked

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a new request; return whether there is one. Any thread may call this."""
        with self._arrivals:
            self._arrivals.wait_for(lambda: self._submitted or self._is_closed, timeout_s)
            return bool(self._submitted)

    def __iter__(self) -> Iterator[tuple[Generation, Token]]:
        """Serve until all requests are done. After a break, another iteration continues."""
        with compile_mode(self._model):
            while self._engine.ready or self._round():
                while self._engine.ready:
                    yield self._engine.ready.popleft()

    def round(self) -> list[tuple[Generation, Token]]:
        with compile_mode(self._model):
            self._round()
        tokens = [*self._engine.ready]
        self._engine.ready.clear()
        return tokens

    def close(self) -> None:
        """Cancel all requests and store their state. Closing twice is fine."""
        with self._arrivals:
            self._is_closed = True
            self._arrivals.notify_all()
        self._take_in()
        with uninterrupted():
            for reply in [*self._queue.waiting, *self._queue.running]:
                self._engine.finish(reply, reply.end("cancelled"))
            self._engine.ready.clear()
            self._engine.group.close()

    @property
    def group(self) -> Group:
        group: Group = self._engine.group
        return group

    def _take_in(self) -> None:
        with self._arrivals:
            self._queue.waiting += self._submitted
            self._submitted.clear()

    def _round(self) -> bool:
        self._take_in()
        if not self._queue.waiting and not self._queue.running:
            return False
        with uninterrupted():
            self._engine.round()
        return True
