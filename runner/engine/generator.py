"""Generate many replies at once: every decode step is one forward pass for all of them, on one PrefixCache.

    with ParallelGenerator(cache, model, tokenizer, capacity=16384) as generator:
        first = generator.submit(tokens, marks=marks, max_tokens=200)
        second = generator.submit(other_tokens, marks=other_marks, max_tokens=200)
        for ticket, piece in generator:
            print(ticket.number, piece.text)

A round admits what there is room for, evaluates one chunk of prompts, dispatches a decode step for all replies that
go on, and reads the tokens of the step before. First tokens are handed out between chunk and step. So between two
tokens of a running reply lie one step and at most one chunk: `step_size` bounds its pauses, and what prefill takes from
those who are being served.

Invariants, each with a test:

  PG1  Each reply is what it would be alone: no other joining, leaving, failing or being cancelled changes it.
  PG2  The next step is dispatched before the tokens of the last one are read, but for replies that `max_tokens` ends.
       First tokens that a chunk of prefill brings are handed out before it.
  PG3  Cells and bytes for prompt and reply are there before a request comes in. Where they are not after all, the one
      that came last goes back to waiting, with its text, and goes on later from what the tree kept of it.
  PG4  What was evaluated and is right is stored when a request ends, whatever ends it; nothing behind a shift is.
  PG5  MLX's compiled mode is what it was before whenever no iteration is under way.

`submit`, `wait` and `Ticket` may be used by any thread; iterating and closing are one thread's business.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from radixcache import Group, PrefixCache
from radixcache.lock import uninterrupted
from radixcache.settings import require_count
from radixcache.tokens import checked_prompt, require_namespace, vocabulary_size
from runner.engine.admission import PARALLEL_STEP_SIZE, AdmissionQueue
from runner.engine.engine import Engine
from runner.engine.replies import Piece, ProgressCallback, Reply, Sampler, StopTokens, compile_mode
from runner.engine.sequence import FREE_SHARE, ContextWindow, LogitsProcessor, Outline, ParallelRequest, Ticket

DEFAULT_MAX_ROWS = 16


class ParallelGenerator:
    """Serves requests together. A context manager; leaving it cancels what still runs.

    Args:
        cache: a PrefixCache of the model.
        model: an mlx-lm model.
        tokenizer: mlx-lm's TokenizerWrapper.
        capacity: tokens of all running requests together; what several share counts once.
        max_rows: requests that run at a time at most.
        step_size: tokens per chunk of prefill.
        context: tokens of a conversation at a time at most; None: no bound but `capacity`. A longer conversation loses
            its oldest turns, before prefill or while its reply grows, and keeps its beginning.
        free_share: what such a cut frees, as a share of the context; see `runner.engine.sequence`.
        namespace, priority: as for `PrefixCache.begin`, for all requests that name no other namespace.

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
        step_size: int = PARALLEL_STEP_SIZE,
        context: int | None = None,
        free_share: float = FREE_SHARE,
        namespace: str = "",
        priority: int = 0,
    ) -> None:
        capacity = require_count("capacity", capacity, "tokens")
        max_rows = require_count("max_rows", max_rows, "requests")
        step_size = require_count("step_size", step_size, "tokens")
        if context is not None and require_count("context", context, "tokens") > capacity:
            raise ValueError(f"a context of {context} tokens does not fit a capacity of {capacity}; raise it.")
        self._window = None if context is None else ContextWindow(context, free_share)
        self._model, self._tokenizer, self._capacity, self._namespace = model, tokenizer, capacity, namespace
        self._vocabulary_length = vocabulary_size(model)
        self._admission = AdmissionQueue(capacity, max_rows, context, step_size)
        new_group = partial(cache.begin_many, capacity=capacity, namespace=namespace, priority=priority)
        self._engine = Engine(model, new_group, self._admission, self._window, step_size)
        # The only state that several threads change.
        self._arrivals = threading.Condition()
        self._submitted: list[ParallelRequest] = []
        self._tickets = 0
        self._is_closed = False

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
        logits_processors: Sequence[LogitsProcessor] = (),
        stop_tokens: StopTokens | None = None,
        cuts_characters: bool = True,
        namespace: str | None = None,
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
            sampler, on_progress, arrived_at_s: as for `runner.engine.replies.generate`.
            logits_processors: mlx-lm's, called with prompt and reply so far (T,) and logits (1, V), float32.
            stop_tokens, cuts_characters: as for `runner.engine.replies.Reply`.
            namespace: None: the generator's.
            reserve: tokens of the reply to keep room for. Default: max_tokens. With less, more requests come in, and
                one may have to go back to waiting in the middle of its reply.

        Raises:
            ValueError: an argument out of its range, or a request that can never run: prompt and reply have more tokens
                than the capacity, or what must stay of the conversation does not fit the context.
        """
        ids, own_keys = checked_prompt(tokens, keys, marks, self._vocabulary_length)
        require_namespace(namespace or "")
        if reserve is not None:
            reserve = require_count("reserve", reserve, "tokens")
        if sampler is not None and not callable(sampler):
            raise ValueError(f"sampler is a {type(sampler).__name__}; wanted a function of log-probabilities.")
        outline = Outline.of(len(ids), marks, keep)
        reply = Reply(
            self._tokenizer,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            prompt_tokens=len(ids),
            arrived_at_s=arrived_at_s,
            cuts_characters=cuts_characters,
        )
        request = ParallelRequest(
            ticket=Ticket(-1, len(ids)),
            tokens=ids,
            keys=own_keys,
            marks=tuple(marks),
            outline=outline,
            reply=reply,
            sampler=sampler,
            reserve=max_tokens if reserve is None else reserve,
            on_progress=on_progress,
            namespace=self._namespace if namespace is None else namespace,
            processors=logits_processors,
        )
        if self._window is not None:
            room = min(max_tokens, self._window.quantum)
            request.drop(self._window.excess(outline, len(ids), room))
            reply.omitted_tokens = request.dropped
        elif len(ids) + max_tokens - 1 > self._capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and a reply of {max_tokens} take {len(ids) + max_tokens - 1} of a "
                f"capacity of {self._capacity}. Ask for a shorter reply, or raise capacity."
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
            while self._engine.ready or self._round():
                while self._engine.ready:
                    yield self._engine.ready.popleft()

    def round(self) -> list[tuple[Ticket, Piece]]:
        """Serve one round, and return the pieces that it brought, if any."""
        with compile_mode(self._model):
            self._round()
        pieces = [*self._engine.ready]
        self._engine.ready.clear()
        return pieces

    def close(self) -> None:
        """Cancel what waits and runs, keeping what was evaluated. Closing twice is fine."""
        with self._arrivals:
            self._is_closed = True
            self._arrivals.notify_all()
            self._admission.arrive(self._submitted)
            self._submitted.clear()
        with uninterrupted():
            for request in [*self._admission.waiting, *self._admission.running]:
                self._engine.finish(request, request.reply.end("cancelled"))
            self._engine.ready.clear()
            self._engine.group.close()

    @property
    def group(self) -> Group:
        """The cache's group of running rows; to read."""
        return self._engine.group

    def _round(self) -> bool:
        """Do what there is to do once; False: nothing was left."""
        with self._arrivals:
            self._admission.arrive(self._submitted)
            self._submitted.clear()
        if not self._admission.waiting and not self._admission.running:
            return False
        with uninterrupted():
            self._engine.round()
        return True
