"""ParallelGenerator: many replies at once on one PrefixCache. Every decode step is one forward pass for all of them.

    with ParallelGenerator(cache, model, tokenizer, capacity=16384) as generator:
        first = generator.submit(tokens, marks=marks, max_tokens=200)
        second = generator.submit(other_tokens, marks=other_marks, max_tokens=200)
        for ticket, piece in generator:
            print(ticket.number, piece.text)

Between two tokens of a running reply lie one step and at most one chunk of prefill of `step_size` tokens. The rounds
are in runner/engine/engine.py.

Invariants, each with a test:

  PG1  A reply does not depend on other requests: whether they join, leave, fail or are cancelled.
  PG2  The next step is dispatched before the tokens of the last one are read, unless `max_tokens` ends the reply, or
       drafted tokens are checked. First tokens of a chunk of prefill are handed out before the step.
  PG3  A request is admitted when cells and bytes suffice for prompt and reply, or when no other one runs. If they run
       out later, the request that came last waits again, with its text, and resumes from what the tree has of it. A
       request alone goes on beyond the budget, as in `PrefixCache`.
  PG4  However a request ends, its correct state is stored; nothing behind a shift is.
  PG5  Between iterations, MLX's compiled mode is what it was before.

Any thread may use `submit`, `wait` and a Ticket; one thread iterates and closes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from radixcache import Group, PrefixCache
from radixcache.ledger import uninterrupted
from radixcache.sessions.solo import Embed
from radixcache.settings import require_count
from radixcache.speculate.drafting import Drafting
from radixcache.tokens import checked_prompt, require_namespace, vocabulary_size
from runner.engine.engine import PARALLEL_STEP_SIZE, AdmissionQueue, Engine
from runner.engine.replies import Piece, ProgressCallback, Reply, ReplyOptions, compile_mode
from runner.engine.sequence import FREE_SHARE, ContextWindow, Outline, Ticket, TokenSequence

DEFAULT_MAX_ROWS = 16


class ParallelGenerator:
    """Serves requests together. A context manager, whose exit cancels running requests.

    Args:
        cache: a PrefixCache of the model.
        model: an mlx-lm model.
        tokenizer: mlx-lm's TokenizerWrapper.
        capacity: tokens of all running requests together; shared ones count once.
        max_rows: most requests that run at a time.
        step_size: tokens per chunk of prefill.
        context: most tokens of a conversation at a time; None: only `capacity` bounds it. A longer conversation loses
            its oldest turns, before prefill or during its reply, but not its beginning.
        free_share: share of the context that such a cut frees; see `runner.engine.sequence`.
        namespace: of requests that name none, as in `PrefixCache.begin`.
        priority: of all requests, as in `PrefixCache.begin`.
        speculate: what is proposed to replies and checked several tokens in a pass, as in `PrefixCache.drafting`:
            "tree", "prompt", or None: only predictions. Replies are the same, up to rounding, and with a seed as well.
        draft_model: proposes tokens, too, where that is expected to save time; `cache` must have been made with both
            models' caches, in this order.
        is_alone: run one request at a time, each in a Session: for what a group refuses, as PrefixCache.alone says.

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
        self._engine = Engine(model, new_group, self._queue, self._window, pace, draft_model)
        self._arrivals = threading.Condition()  # guards the fields below
        self._submitted: list[TokenSequence] = []
        self._tickets = 0
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
        embed: Embed | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Ticket:
        """Hand in a request; iterating over the generator serves it. Any thread may call this.

        Args:
            tokens: ids of the whole prompt.
            marks: as from `render_chat`: where the system prompt and each message end. With recurrent layers, a message
                of less than 128 tokens has no checkpoint at its end, unless it is the first or the last.
            keys: as in `PrefixCache.begin`.
            keep: with a context: tokens that stay at the beginning. Default: up to the first mark, which is the end of
                the system prompt if there is one.
            namespace: default: the generator's.
            embed: alone: from an offset of the prompt to embeddings (T, D) from there on, as in stream_generate.
            on_progress: called with tokens evaluated and prompt tokens, after each chunk of prefill.
            options: fields of ReplyOptions, `max_tokens` at least.

        Raises:
            ValueError: an argument out of its range, or a request that can never run: prompt and reply exceed the
                capacity, or what must stay of the conversation exceeds the context.
        """
        asked = ReplyOptions(**options)
        ids, own_keys = checked_prompt(tokens, keys, marks, self._vocabulary_length)
        require_namespace(namespace or "")
        namespace, most = self._namespace if namespace is None else namespace, asked.max_tokens
        drafting = self._drafting(ids, namespace, prediction=asked.prediction, max_tokens=most)
        if embed is not None:
            drafting = Drafting([], drafting.pace)
        drafted = asked.num_draft_tokens if self._has_draft_model else 0
        sequence = TokenSequence(
            ticket=Ticket(-1, len(ids)),
            tokens=ids,
            keys=own_keys,
            marks=tuple(marks),
            outline=Outline.of(len(ids), marks, keep),
            reply=Reply(self._tokenizer, asked, len(ids)),
            sampler=asked.sampler,
            window=self._window,
            embed=embed,
            reserve=most if asked.reserve is None else asked.reserve,
            on_progress=on_progress,
            namespace=namespace,
            drafting=None if drafting.is_empty and not drafted else drafting,
            draft_tokens=drafted,
            processors=asked.logits_processors,
            guidance=asked.guidance,
            has_logprobs=asked.has_logprobs,
        )
        if self._window is not None:
            sequence.drop(self._window.excess(sequence.outline, len(ids), min(most, self._window.quantum)))
            sequence.reply.omitted_tokens = sequence.dropped
        elif (needed := len(ids) + most - 1) > self._capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and a reply of {most} take {needed} of a "
                f"capacity of {self._capacity}. Ask for a shorter reply, or raise capacity."
            )
        with self._arrivals:
            if self._is_closed:
                raise ValueError("the generator is closed and takes no more requests.")
            sequence.ticket.number = self._tickets
            self._tickets += 1
            self._submitted.append(sequence)
            self._arrivals.notify_all()
        return sequence.ticket

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a request that was not served yet; return whether there is one. Any thread may call this."""
        with self._arrivals:
            self._arrivals.wait_for(lambda: self._submitted or self._is_closed, timeout_s)
            return bool(self._submitted)

    def __iter__(self) -> Iterator[tuple[Ticket, Piece]]:
        """Serve until all requests are done. After a break another iteration goes on."""
        with compile_mode(self._model):
            while self._engine.ready or self._round():
                while self._engine.ready:
                    yield self._engine.ready.popleft()

    def round(self) -> list[tuple[Ticket, Piece]]:
        with compile_mode(self._model):
            self._round()
        pieces = [*self._engine.ready]
        self._engine.ready.clear()
        return pieces

    def close(self) -> None:
        """Cancel all requests and store their state. Closing twice is fine."""
        with self._arrivals:
            self._is_closed = True
            self._arrivals.notify_all()
        self._take_in()
        with uninterrupted():
            for sequence in [*self._queue.waiting, *self._queue.running]:
                self._engine.finish(sequence, sequence.reply.end("cancelled"))
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
