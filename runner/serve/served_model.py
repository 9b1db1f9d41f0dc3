"""ServedModel: a model that is loaded, and the requests that it answers. The generation thread's alone.

Requests run together in a ParallelGenerator. What that cannot take goes through a Session, one at a time: quantized and
exact caches, draft models, layers that no two sequences can share, and requests drawn for verification. It waits until
those that run are through, and those behind it wait for it: each kind has the whole budget, as if there were no other.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from radixcache import BudgetFullError, CacheFullError, PrefixCache
from runner.models.load import LoadedModel
from runner.parallel import ParallelGenerator
from runner.parallel.request import Ticket
from runner.parallel.turn_taking import PARALLEL_STEP_SIZE
from runner.replies.reply import Piece
from runner.serve import border
from runner.serve.answering import Answering
from runner.serve.asked import Asked, FinishReason, ModelNames, TopToken
from runner.serve.errors import ApiError
from runner.serve.options import ServeOptions
from runner.serve.prompts import Prompt, prompt_of
from runner.serve.reading import Reading
from runner.serve.sampling import processors_of, sampler_of
from runner.serve.single import serve_alone

logger = logging.getLogger(__name__)

# Bytes bound what runs together, not a count of tokens.
CAPACITY_TOKENS = 1 << 31
# Room that is kept for a reply; few are as long as they may be, and one that is longer asks for more.
RESERVE_TOKENS = 1024


class _Queued(NamedTuple):
    """A request, and how it begins: handed in among others, or as the steps of one alone."""

    answering: Answering
    begin: Callable[[], Ticket] | Iterator[None]


class ServedModel:
    """Answers requests with one model.

    Args:
        is_parallel: whether requests may run together.

    Attributes:
        key: the names of what was loaded; model, tokenizer, draft_model (or None), name: that.
        context_length: tokens; None: not known, or without bound.
        cache: the model's PrefixCache, which outlives this.
    """

    def __init__(
        self,
        key: ModelNames,
        loaded: LoadedModel,
        draft_model: Any,
        cache: PrefixCache,
        options: ServeOptions,
        *,
        is_parallel: bool,
    ) -> None:
        self.key, self.name, self.cache = key, loaded.name, cache
        self.tokenizer = loaded.tokenizer
        self.model: Any = loaded.model
        self.draft_model: Any = draft_model
        self.context_length = loaded.context_length
        self._vocabulary_length = loaded.vocabulary_length
        self._options = options
        self._generator = self._new_generator() if is_parallel else None
        # In order of arrival: what cannot begin before others are through, and how it begins.
        self._queue: deque[_Queued] = deque()
        self._running: dict[Ticket, Answering] = {}
        self._alone: tuple[Answering, Iterator[None]] | None = None
        self._draws = random.Random(0)
        # Where every layer can be cut at any token, marks would be worked out for nothing.
        fresh = border.make_prompt_cache(self.model)
        self._is_marked = options.context is not None or any(type(each) is not border.KVCache for each in fresh)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._running and self._alone is None and not self._queue

    def begin(self, answering: Answering) -> None:
        """Take a request in; what is wrong with it is its own failure."""
        try:
            self._begin(answering)
        except ApiError as error:
            answering.fail(error.status, error.message)
        except ValueError as error:  # of mlx-lm's makers, and of submit: all before anything ran
            answering.fail(400, str(error))

    def prompt(self, asked: Asked) -> Prompt:
        """What is asked, in tokens. ApiError: it cannot be made."""
        return prompt_of(asked, self.tokenizer, self._options.chat_template_args, with_messages=self._is_marked)

    def round(self) -> None:
        """Let each request go one step on."""
        for queued in [each for each in self._queue if each.answering.job.is_cancelled]:
            self._queue.remove(queued)
            queued.answering.end("cancelled")
        self._advance()
        if self._alone is not None:
            self._step_alone(*self._alone)
        elif self._generator is not None and self._running:
            self._round_together(self._generator)

    def warm(
        self, tokens: Any, namespace: str = "", *, name: str | None = None, ttl_requests: int | None = None
    ) -> int:
        """Have a prefix stored, and pinned with a name or a time, as PrefixCache.warm does; raises what it raises."""
        return self.cache.warm(
            self.model, tokens, namespace, name=name, ttl_requests=ttl_requests, draft_model=self.draft_model
        )

    def close(self) -> None:
        """End what runs, and let go of the model; what was evaluated stays in the cache."""
        if self._alone is not None:
            self._alone[1].close()  # type: ignore[attr-defined]
        if self._generator is not None:
            self._generator.close()
        alone = [] if self._alone is None else [self._alone[0]]
        for answering in [*alone, *self._running.values(), *(queued.answering for queued in self._queue)]:
            answering.end("cancelled")
        self._running.clear()
        self._queue.clear()
        self._alone = None
        self.model = self.draft_model = self._generator = None

    # Taking in

    def _begin(self, answering: Answering) -> None:
        job = answering.job
        asked, tokenizer, options = job.asked, self.tokenizer, self._options
        prompt = self.prompt(asked)
        self._require_context(prompt)
        stop_words = list(asked.stop_words)
        reading = Reading(
            border.make_text_state_machine(tokenizer, stop_words),
            prompt.initial_state,
            border.ToolCallFormatter(tokenizer.tool_parser, asked.tools),
        )
        is_stop = border.make_stop_sequences(tokenizer, stop_words).matcher().advance
        sampler = sampler_of(asked, tokenizer, self._vocabulary_length)
        processors = processors_of(asked, self._vocabulary_length)
        max_tokens = min(asked.max_tokens, CAPACITY_TOKENS - len(prompt.tokens))
        if self._generator is None or self._draws.random() < options.verify:
            alone = serve_alone(
                answering, self.model, tokenizer, self.draft_model, self.cache, prompt.tokens, marks=prompt.marks,
                sampler=sampler, logits_processors=processors, is_stop=is_stop, hand_out=self._hand_out,
                max_tokens=max_tokens, step_size=options.prefill_step_size,
            )  # fmt: skip
            self._queue.append(_Queued(answering, alone))
        else:
            submit = partial(
                self._submit,
                prompt.tokens,
                max_tokens=max_tokens,
                marks=prompt.marks,
                sampler=sampler,
                logits_processors=processors,
                stop_tokens=is_stop,
                cuts_characters=False,
                namespace=asked.namespace,
                reserve=RESERVE_TOKENS,
                on_progress=answering.progress,
                arrived_at_s=job.arrived_s,
            )
            self._queue.append(_Queued(answering, submit))
            answering.foresee(self.cache.explain(prompt.tokens, asked.namespace))
        self._advance()
        if not answering.is_over:
            answering.start(len(prompt.tokens), reading)

    def _submit(self, tokens: list[int], **more: Any) -> Ticket:
        assert self._generator is not None, self.key
        return self._generator.submit(tokens, **more)

    def _advance(self) -> None:
        """Begin what may run beside what does."""
        while self._queue and self._alone is None:
            answering, begin = self._queue[0]
            if not callable(begin):
                if self._running:
                    return
                self._alone = answering, begin
            else:
                try:
                    self._running[begin()] = answering
                except ValueError as error:
                    answering.fail(400, str(error))
            self._queue.popleft()

    def _require_context(self, prompt: Prompt) -> None:
        longest = self.context_length
        if self._options.context is None and longest is not None and len(prompt.tokens) > longest:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.tokens)} tokens; the model's context length is {longest} tokens.",
                code="context_length_exceeded",
            )

    # Serving

    def _new_generator(self) -> ParallelGenerator:
        options = self._options
        return ParallelGenerator(
            self.cache,
            self.model,
            self.tokenizer,
            capacity=CAPACITY_TOKENS,
            max_rows=options.decode_concurrency,
            step_size=min(options.prefill_step_size, PARALLEL_STEP_SIZE),
            context=options.context,
        )

    def _round_together(self, generator: ParallelGenerator) -> None:
        for ticket, answering in self._running.items():
            if answering.job.is_cancelled:
                ticket.cancel()
        try:
            pieces = generator.round()
        except Exception as error:  # not of one request: those end with what they raised
            logger.exception("a round of many requests failed; all of them end")
            generator.close()
            for answering in self._running.values():
                answering.fail(500, _described(error))
            self._running.clear()
            self._generator = self._new_generator()
            return
        for ticket, piece in pieces:
            self._take(ticket, piece)

    def _take(self, ticket: Ticket, piece: Piece) -> None:
        answering, done = self._running[ticket], piece.completion
        answering.matched_tokens, answering.reason = ticket.matched_tokens, ticket.reason
        if piece.token is not None and not answering.is_over:
            ends: FinishReason | None = None
            if done is not None and (done.done_reason == "stop" or done.done_reason == "length"):
                ends = done.done_reason
            assert piece.logprob is not None, ticket
            try:
                self._hand_out(answering, piece.text, piece.token, piece.logprob, piece.logprobs, ends)
            except Exception as error:
                ticket.cancel()
                answering.fail(500, _described(error))
        if done is None:
            return
        del self._running[ticket]
        answering.cached_tokens = done.cached_tokens
        if done.done_reason != "error":
            answering.end(done.done_reason, done.note)
        elif isinstance(done.error, (BudgetFullError, CacheFullError)):
            self._out_of_room(answering, str(done.error))
        else:
            answering.fail(500, _described(done.error))

    def _out_of_room(self, answering: Answering, reason: str) -> None:
        """The budget cannot hold the prompt, or no more of the reply."""
        if answering.tokens:
            answering.end("length", reason)
        else:
            answering.fail(400, reason)

    def _step_alone(self, answering: Answering, steps: Iterator[None]) -> None:
        try:
            if next(steps, answering) is None:
                return
        except (BudgetFullError, CacheFullError) as error:
            self._out_of_room(answering, str(error))
        except Exception as error:
            answering.fail(500, _described(error))
        self._alone = None

    def _hand_out(
        self,
        answering: Answering,
        text: str,
        token: int,
        logprob: float,
        logprobs: mx.array | None,
        finish_reason: FinishReason | None,
    ) -> None:
        asked = answering.job.asked
        top = border.top_logprobs(logprobs, asked.top_logprobs, self.tokenizer)
        stop_word = self._stop_word(asked, [*answering.tokens, token]) if finish_reason == "stop" else None
        answering.step(text, token, logprob, tuple(TopToken(**each) for each in top), finish_reason, stop_word)

    def _stop_word(self, asked: Asked, tokens: list[int]) -> str | None:
        """The stop word that these tokens end with; the longest of several."""
        encode: Callable[[str], list[int]] = partial(self.tokenizer.encode, add_special_tokens=False)
        ends = [(len(ids), word) for word in asked.stop_words if (ids := encode(word)) == tokens[-len(ids) :]]
        return max(ends, default=(0, None), key=lambda end: end[0])[1]


def _described(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
