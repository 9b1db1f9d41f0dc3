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
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from radixcache import Group, PrefixCache
from radixcache.lock import uninterrupted
from radixcache.settings import require_count
from radixcache.tokens import checked_prompt, require_namespace, vocabulary_size
from runner.engine.engine import PARALLEL_STEP_SIZE, AdmissionQueue, Engine
from runner.engine.replies import Piece, ProgressCallback, Reply, Sampler, compile_mode
from runner.engine.sequence import FREE_SHARE, ContextWindow, Guidance, LogitsProcessor, Outline, Ticket, TokenSequence

DEFAULT_MAX_ROWS = 16
NUM_DRAFT_TOKENS = 3


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
    ) -> None:
        capacity = require_count("capacity", capacity, "tokens")
        max_rows = require_count("max_rows", max_rows, "requests")
        step_size = require_count("step_size", step_size, "tokens")
        if context is not None and require_count("context", context, "tokens") > capacity:
            raise ValueError(f"a context of {context} tokens does not fit a capacity of {capacity}; raise it.")
        self._window = None if context is None else ContextWindow(context, free_share)
        self._model, self._tokenizer, self._capacity, self._namespace = model, tokenizer, capacity, namespace
        self._vocabulary_length = vocabulary_size(model)
        self._queue = AdmissionQueue(capacity, max_rows, context, step_size)
        new_group = partial(cache.begin_many, capacity=capacity, namespace=namespace, priority=priority)
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
        max_tokens: int,
        marks: Sequence[int] = (),
        keys: Any = None,
        keep: int | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        guidance: Guidance | None = None,
        has_logprobs: bool = False,
        stop_tokens: Collection[int] | None = None,
        stop_words: Sequence[str] = (),
        cuts_characters: bool = True,
        namespace: str | None = None,
        reserve: int | None = None,
        prediction: Any = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        on_progress: ProgressCallback | None = None,
        arrived_at_s: float | None = None,
    ) -> Ticket:
        """Hand in a request; iterating over the generator serves it. Any thread may call this.

        Args:
            tokens: ids of the whole prompt.
            keys: as in `PrefixCache.begin`.
            max_tokens: most tokens to sample, at least 1.
            marks: as from `render_chat`: where the system prompt and each message end. With recurrent layers, a message
                of less than 128 tokens has no checkpoint at its end, unless it is the first or the last.
            keep: with a context: tokens that stay at the beginning. Default: up to the first mark, which is the end of
                the system prompt if there is one.
            sampler: mlx-lm's, or None for the most likely token.
            on_progress: called with tokens evaluated and prompt tokens, after each chunk of prefill.
            arrived_at_s: when the request arrived, by time.perf_counter(); TTFT counts from then. Default: now.
            logits_processors: mlx-lm's, called with prompt and reply so far (T,) and logits (1, V), float32.
            has_logprobs: whether the pieces have log-probabilities, which take time on a CPU.
            stop_tokens: ids that end the reply. Default: the tokenizer's.
            stop_words: texts that end the reply.
            cuts_characters: leave out an unfinished character at the end; else it comes as U+FFFD, as in mlx-lm.
            namespace: default: the generator's.
            prediction: token ids that the reply is expected to have; they are proposed to it. At most twice
                `max_tokens` of them are used.
            num_draft_tokens: most tokens that the draft model proposes at a time, if there is one.
            reserve: tokens of the reply to reserve room for. Default: max_tokens. With less, more requests come in, and
                one may have to wait again in the middle of its reply.

        Raises:
            ValueError: an argument out of its range, or a request that can never run: prompt and reply exceed the
                capacity, or what must stay of the conversation exceeds the context.
        """
        ids, own_keys = checked_prompt(tokens, keys, marks, self._vocabulary_length)
        require_namespace(namespace or "")
        if reserve is not None:
            reserve = require_count("reserve", reserve, "tokens")
        if sampler is not None and not callable(sampler):
            raise ValueError(f"sampler is a {type(sampler).__name__}; wanted a function of log-probabilities.")
        namespace = self._namespace if namespace is None else namespace
        drafting = self._drafting(ids, namespace, prediction=prediction, max_tokens=max_tokens)
        drafted = require_count("num_draft_tokens", num_draft_tokens, "tokens", least=0) if self._has_draft_model else 0
        outline = Outline.of(len(ids), marks, keep)
        reply = Reply(
            self._tokenizer,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            stop_words=stop_words,
            prompt_tokens=len(ids),
            arrived_at_s=arrived_at_s,
            cuts_characters=cuts_characters,
        )
        sequence = TokenSequence(
            Ticket(-1, len(ids)),
            ids,
            own_keys,
            tuple(marks),
            outline,
            reply,
            sampler,
            reserve=max_tokens if reserve is None else reserve,
            on_progress=on_progress,
            namespace=namespace,
            drafting=None if drafting.is_empty and not drafted else drafting,
            draft_tokens=drafted,
            processors=logits_processors,
            guidance=guidance,
            has_logprobs=has_logprobs,
        )
        if self._window is not None:
            sequence.drop(self._window.excess(outline, len(ids), min(max_tokens, self._window.quantum)))
            reply.omitted_tokens = sequence.dropped
        elif (needed := len(ids) + max_tokens - 1) > self._capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and a reply of {max_tokens} take {needed} of a "
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
        return self._engine.group

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
