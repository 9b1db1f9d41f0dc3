"""ServedModel: a model that is loaded, and the requests that it answers. The generation thread's alone.

Requests run together in a ParallelGenerator. What that cannot take goes through a Session, one at a time: quantized and
exact caches, draft models, layers that no two sequences can share, images, and what is drawn for verification. It waits
until those that run are through, and those behind it wait for it: each kind has the whole budget, as if there were no
other.

Work: a request that is ready to be served, by itself or among others.

Answering: one opened on the generation thread: what is answered, and the record of it.

Together: the requests of one model that run at a time, in a ParallelGenerator. The generation thread's alone.

One request at a time: what cannot run among others, through a Session. Belongs to the generation thread.

How a request is sampled: mlx-lm's samplers and logits processors, and seeds among many that draw.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from radixcache import BudgetFullError, CacheFullError, Explanation, PrefixCache, stream_generate
from runner.engine.admission import PARALLEL_STEP_SIZE
from runner.engine.generator import ParallelGenerator
from runner.engine.replies import Piece, Sampler
from runner.engine.sequence import LogitsProcessor, Ticket
from runner.models.load import LoadedModel
from runner.serve import mlx_lm_border
from runner.serve.options import ServeOptions
from runner.serve.prompts import RenderedPrompt, embedder, prompt_of
from runner.serve.reply_reader import ReplyReader
from runner.serve.request import (
    ApiError,
    Ended,
    Failed,
    FinishReason,
    ModelNames,
    OpenRequest,
    PrefillProgress,
    Request,
    RequestRecord,
    Started,
    Token,
    TopToken,
)


class Answering:
    """Answers one opened; exactly one Ended or Failed is the last of it.

    Args:
        on_record: told how it ended.

    Attributes:
        prompt_tokens, cached_tokens, matched_tokens, reason, shortfalls: as in Record.
        is_running: whether it was admitted. `is_over`: whether the last answer was given.
    """

    def __init__(self, opened: OpenRequest, on_record: Callable[[RequestRecord], None]) -> None:
        self.opened = opened
        self.prompt_tokens = self.cached_tokens = self.matched_tokens = 0
        self.reason: str | None = None
        self.shortfalls: tuple[tuple[int, int, str], ...] = ()
        self.is_over = False
        self._on_record = on_record
        self._admitted_s: float | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps_ms: list[float] = []
        self._tokens: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether it was admitted and is not over."""
        return self._admitted_s is not None and not self.is_over

    def foresee(self, found: Explanation) -> None:
        """This is what the cache has of the prompt, and why not more."""
        self.cached_tokens, self.matched_tokens = found.resumable_tokens, found.matched_tokens
        self.shortfalls = tuple((gap.start, gap.end, str(gap.reason)) for gap in found.gaps)
        self.reason = str(found.gaps[0].reason) if found.resumable_tokens < found.matched_tokens else None

    def start(self, prompt_tokens: int, reading: Any) -> None:
        """The prompt is in tokens."""
        self.prompt_tokens = prompt_tokens
        self.opened.put(Started(prompt_tokens, reading))

    def progress(self, done_tokens: int, prompt_tokens: int) -> None:
        """It was admitted, or a chunk of its prompt was evaluated."""
        if self._admitted_s is None:
            self._admitted_s = time.perf_counter()
        self.opened.put(PrefillProgress(done_tokens, prompt_tokens))

    def step(
        self, tokenizer: Any, text: str, token: int, logprob: float, logprobs: Any, finish_reason: FinishReason | None
    ) -> None:
        """A token was sampled; `logprobs` (V,) are those of all tokens, evaluated."""
        asked = self.opened.request
        top = tuple(TopToken(**each) for each in mlx_lm_border.top_logprobs(logprobs, asked.top_logprobs, tokenizer))
        now_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        self._tokens.append(token)
        stop_word = self._stop_word(tokenizer) if finish_reason == "stop" else None
        self.opened.put(Token(text, token, logprob, top, finish_reason, stop_word))

    def end(self, outcome: Literal["stop", "length", "cancelled"], note: str | None = None) -> None:
        """The reply is over."""
        if not self.is_over:
            self.is_over = True
            record = self._record(outcome, note)
            self._on_record(record)
            self.opened.put(Ended(record))

    def fail(self, status: int, message: str, note: str | None = None) -> None:
        """There will be no reply, or no more of it. `note` is for the record alone, by default it is the message."""
        if not self.is_over:
            self.is_over = True
            message = " ".join(message.split())
            record = self._record("error", note or message)
            self._on_record(record)
            self.opened.put(Failed(status, message, record))

    def raised(self, error: BaseException | None) -> None:
        """Whatever served it raised this. A reply that the budget has no room for any more ends with what it has."""
        if not isinstance(error, (BudgetFullError, CacheFullError)):
            self.fail(500, f"{type(error).__name__}: {error}")
        elif self._tokens:
            self.end("length", str(error))
        else:  # what others hold, which the error's own words count, is for the record alone
            room = f"budget of {error.budget_bytes} bytes" if isinstance(error, BudgetFullError) else "cache"
            self.fail(400, f"a prompt of {self.prompt_tokens} tokens does not fit the {room}.", str(error))

    def _stop_word(self, tokenizer: Any) -> str | None:
        """The stop word that the reply's tokens end with; the longest of several."""
        words = [(tokenizer.encode(word, add_special_tokens=False), word) for word in self.opened.request.stop_words]
        ends = [(len(ids), word) for ids, word in words if ids == self._tokens[-len(ids) :]]
        return max(ends, default=(0, None), key=lambda end: end[0])[1]

    def _record(self, outcome: Literal["stop", "length", "cancelled", "error"], note: str | None) -> RequestRecord:
        opened = self.opened
        return RequestRecord(
            id=opened.id,
            names=opened.request.names,
            namespace=opened.request.namespace,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            matched_tokens=self.matched_tokens,
            reason=self.reason,
            completion_tokens=len(self._tokens),
            queue_ms=self._since_arrival_ms(self._admitted_s),
            ttft_ms=self._since_arrival_ms(self._first_s),
            gaps_ms=tuple(self._gaps_ms),
            outcome=outcome,
            note=note,
            shortfalls=self.shortfalls,
        )

    def _since_arrival_ms(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else (moment_s - self.opened.arrived_s) * 1e3


#: MLX's seeds are numbers below this.
SEEDS = 1 << 64


def sampler_of(asked: Request, tokenizer: Any, vocabulary_length: int) -> Sampler | None:
    """mlx-lm's sampler; None: the likeliest token.

    Raises:
        ApiError: what mlx-lm's sampler would raise at each token.
        ValueError: the seed is out of its range.
    """
    sampling, length = asked.sampling, vocabulary_length
    if sampling.temperature == 0:
        return None
    if sampling.top_k >= length:
        raise ApiError(400, f"top_k is {sampling.top_k}; wanted less than the {length} tokens there are.")
    if sampling.xtc_probability > 0 and not 0 <= sampling.xtc_threshold <= 0.5:
        raise ApiError(400, f"xtc_threshold is {sampling.xtc_threshold}; wanted 0 to 0.5.")
    sampler: Sampler = mlx_lm_border.make_sampler(SimpleNamespace(sampling=sampling), tokenizer)
    return sampler if asked.seed is None else SeededSampler(sampler, asked.seed)


def processors_of(asked: Request, vocabulary_length: int) -> Sequence[LogitsProcessor]:
    """mlx-lm's logits processors.

    Raises:
        ApiError: a bias for what is no token.
        ValueError: a penalty that mlx-lm refuses.
    """
    for token in asked.penalties.logit_bias or ():
        if not 0 <= token < vocabulary_length:
            raise ApiError(400, f"logit_bias names token {token}; wanted 0 to {vocabulary_length - 1}.")
    processors: Sequence[LogitsProcessor] = mlx_lm_border.make_logits_processors(
        SimpleNamespace(logits=asked.penalties)
    )
    return processors


class SeededSampler:
    """Samples as `sampler` does after mx.random.seed(seed) in a process that serves nobody else.

    MLX has one random state per thread. Each call puts the request's own in its place, and then that of the others
    back, which waits for what was drawn before.

    Raises:
        ValueError: the seed is not in [0, 2**64).
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        if not 0 <= seed < SEEDS:
            raise ValueError(f"seed is {seed}; wanted 0 to 2**64 - 1.")
        self._sampler, self._seed = sampler, seed

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities (1, V) to a token (1,)."""
        others = _state()
        mx.random.seed(self._seed)
        try:
            return self._sampler(logprobs)
        finally:
            self._seed = _state()
            mx.random.seed(others)


def _state() -> int:
    """The seed that brings this thread's random state about."""
    key: Any = mx.random.state
    high, low = np.asarray(key[0]).tolist()
    return int(high) << 32 | int(low)


@dataclass(frozen=True)
class Work:
    """What serving a request takes.

    Attributes:
        sampler: None: the likeliest token.
        is_stop: mlx-lm's matcher of stop sequences, which has to see each token once.
        is_alone: whether nothing else may run meanwhile.
    """

    answering: Answering
    prompt: RenderedPrompt
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor]
    is_stop: Callable[[int], bool]
    max_tokens: int
    is_alone: bool


logger = logging.getLogger(__name__)

# Bytes bound what runs together, not a count of tokens.
CAPACITY_TOKENS = 1 << 31
# Room that is kept for a reply; few are as long as they may be, and one that is longer asks for more.
RESERVE_TOKENS = 1024


class Together:
    """Serves many requests at once."""

    def __init__(self, cache: PrefixCache, model: Any, tokenizer: Any, options: ServeOptions) -> None:
        self._cache, self._model, self._tokenizer, self._options = cache, model, tokenizer, options
        self._running: dict[Ticket, Answering] = {}
        self._generator = self._new_generator()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self._running

    def begin(self, work: Work) -> None:
        """Take a request in; what cannot be served is its own failure."""
        answering, prompt = work.answering, work.prompt
        try:
            answering.foresee(self._cache.explain(prompt.tokens, answering.opened.request.namespace))
            ticket = self._generator.submit(
                prompt.tokens,
                max_tokens=min(work.max_tokens, CAPACITY_TOKENS - len(prompt.tokens)),
                marks=prompt.marks,
                sampler=work.sampler,
                logits_processors=work.logits_processors,
                stop_tokens=work.is_stop,
                cuts_characters=False,
                namespace=answering.opened.request.namespace,
                reserve=RESERVE_TOKENS,
                on_progress=answering.progress,
                arrived_at_s=answering.opened.arrived_s,
            )
        except ValueError as error:
            answering.fail(400, str(error))
        except Exception as error:
            answering.raised(error)
        else:
            self._running[ticket] = answering

    def round(self) -> None:
        """Let each request go one step on."""
        for ticket, answering in self._running.items():
            if answering.opened.is_cancelled:
                ticket.cancel()
        try:
            pieces = self._generator.round()
        except Exception as error:  # not of one request: those end with what they raised
            logger.exception("a round of many requests failed; all of them end")
            self._generator.close()
            for answering in self._running.values():
                answering.raised(error)
            self._running.clear()
            self._generator = self._new_generator()
            return
        for ticket, piece in pieces:
            self._hand_out(ticket, piece)

    def close(self) -> None:
        """End what runs; what was evaluated stays in the cache."""
        self._generator.close()
        for answering in self._running.values():
            answering.end("cancelled")
        self._running.clear()

    def _new_generator(self) -> ParallelGenerator:
        options = self._options
        return ParallelGenerator(
            self._cache,
            self._model,
            self._tokenizer,
            capacity=CAPACITY_TOKENS,
            max_rows=options.decode_concurrency,
            step_size=min(options.prefill_step_size, PARALLEL_STEP_SIZE),
            context=options.context,
        )

    def _hand_out(self, ticket: Ticket, piece: Piece) -> None:
        answering, done = self._running[ticket], piece.completion
        answering.matched_tokens, answering.reason = ticket.matched_tokens, ticket.reason
        if piece.token is not None and not answering.is_over:
            ends: FinishReason | None = None
            if done is not None and (done.done_reason == "stop" or done.done_reason == "length"):
                ends = done.done_reason
            assert piece.logprob is not None, ticket
            try:
                answering.step(self._tokenizer, piece.text, piece.token, piece.logprob, piece.logprobs, ends)
            except Exception as error:
                ticket.cancel()
                answering.raised(error)
        if done is None:
            return
        del self._running[ticket]
        answering.cached_tokens = done.cached_tokens
        if done.done_reason == "error":
            answering.raised(done.error)
        else:
            answering.end(done.done_reason, done.note)


class _CancelledError(Exception):
    """Leaves a prefill between two chunks."""


def serve_alone(
    work: Work, model: Any, tokenizer: Any, draft_model: Any, cache: PrefixCache, step_size: int
) -> Iterator[None]:
    """Serve a request, a token between two yields.

    A cancelled one ends within a chunk or a token. What was evaluated is stored, whatever ends it.
    """
    answering, opened, prompt = work.answering, work.answering.opened, work.prompt

    def progress(done_tokens: int, prompt_tokens: int) -> None:
        answering.progress(done_tokens, prompt_tokens)
        if opened.is_cancelled:
            raise _CancelledError

    answering.foresee(cache.explain(prompt.tokens, opened.request.namespace, keys=prompt.keys))
    replies = stream_generate(
        model,
        tokenizer,
        prompt.tokens,
        work.max_tokens,
        draft_model,
        mx.default_stream(mx.default_device()),
        cache=cache,
        namespace=opened.request.namespace,
        marks=prompt.marks,
        keys=prompt.keys,
        embed=None if prompt.vision is None else embedder(model, prompt.tokens, prompt.vision),
        sampler=work.sampler,
        logits_processors=work.logits_processors,
        prefill_step_size=step_size,
        prompt_progress_callback=progress,
        num_draft_tokens=opened.request.num_draft_tokens,
    )
    outcome: FinishReason | None = None
    with closing(replies):
        try:
            for each in replies:
                answering.cached_tokens = each.cached_tokens
                outcome = "stop" if work.is_stop(each.token) else each.finish_reason
                logprob = each.logprobs[each.token].item()
                answering.step(tokenizer, each.text, each.token, logprob, each.logprobs, outcome)
                if outcome is not None or opened.is_cancelled:
                    break
                yield
        except _CancelledError:
            pass
    answering.end(outcome or "cancelled")


class ServedModel:
    """Answers requests with one model.

    Args:
        is_parallel: whether requests may run together.

    Attributes:
        key: the names of what was loaded; model, tokenizer, processor and draft_model (or None), name: that.
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
        self.tokenizer, self.processor = loaded.tokenizer, loaded.processor
        self.model: Any = loaded.model
        self.draft_model: Any = draft_model
        self.context_length = loaded.context_length
        self._vocabulary_length = loaded.vocabulary_length
        self._options = options
        self._together = Together(cache, self.model, self.tokenizer, options) if is_parallel else None
        # In order of arrival: what cannot begin before others are through.
        self._queue: deque[Work] = deque()
        self._alone: tuple[Answering, Iterator[None]] | None = None
        self._draws = random.Random(0)
        # Where every layer can be cut at any token, marks would be worked out for nothing.
        fresh = mlx_lm_border.make_prompt_cache(self.model)
        self._is_marked = options.context is not None or any(type(each) is not mlx_lm_border.KVCache for each in fresh)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._queue and self._is_free

    def begin(self, answering: Answering) -> None:
        """Take a request in; what is wrong with it is its own failure."""
        try:
            self._begin(answering)
        except ApiError as error:
            answering.fail(error.status, error.message)
        except ValueError as error:  # of mlx-lm's makers
            answering.fail(400, str(error))

    def prompt(self, asked: Request) -> RenderedPrompt:
        """What is asked, in tokens. ApiError: it cannot be made."""
        kwargs = self._options.chat_template_args
        return prompt_of(asked, self.tokenizer, kwargs, processor=self.processor, with_messages=self._is_marked)

    def round(self) -> None:
        """Let each request go one step on."""
        for work in [each for each in self._queue if each.answering.opened.is_cancelled]:
            self._queue.remove(work)
            work.answering.end("cancelled")
        self._advance()
        if self._alone is not None:
            self._step_alone(*self._alone)
        elif self._together is not None and not self._together.is_idle:
            self._together.round()

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
            answering, steps = self._alone
            steps.close()  # type: ignore[attr-defined]
            answering.end("cancelled")
        if self._together is not None:
            self._together.close()
        for work in self._queue:
            work.answering.end("cancelled")
        self._queue.clear()
        self.model = self.draft_model = self._together = self._alone = None

    # Taking in

    def _begin(self, answering: Answering) -> None:
        asked, tokenizer = answering.opened.request, self.tokenizer
        prompt = self.prompt(asked)
        has_images = prompt.vision is not None
        if has_images and self.draft_model is not None:
            raise ApiError(400, "a draft model cannot draft replies to images; ask with draft_model null.")
        self._require_context(prompt, is_shifted=self._options.context is not None and not has_images)
        stop_words = list(asked.stop_words)
        reading = ReplyReader(
            mlx_lm_border.make_text_state_machine(tokenizer, stop_words),
            prompt.initial_state,
            mlx_lm_border.ToolCallFormatter(tokenizer.tool_parser, asked.tools),
        )
        work = Work(
            answering,
            prompt,
            sampler_of(asked, tokenizer, self._vocabulary_length),
            processors_of(asked, self._vocabulary_length),
            mlx_lm_border.make_stop_sequences(tokenizer, stop_words).matcher().advance,
            asked.max_tokens,
            is_alone=self._together is None or has_images or self._draws.random() < self._options.verify,
        )
        self._queue.append(work)
        self._advance()
        if not answering.is_over:
            answering.start(len(prompt.tokens), reading)

    @property
    def _is_free(self) -> bool:
        """Whether nothing runs."""
        return self._alone is None and (self._together is None or self._together.is_idle)

    def _advance(self) -> None:
        """Begin what may run beside what does."""
        while self._queue and self._alone is None:
            work = self._queue[0]
            if self._together is not None and not work.is_alone:
                self._together.begin(work)
            elif self._is_free:
                models = self.model, self.tokenizer, self.draft_model
                self._alone = work.answering, serve_alone(work, *models, self.cache, self._options.prefill_step_size)
            else:
                return
            self._queue.popleft()

    def _step_alone(self, answering: Answering, steps: Iterator[None]) -> None:
        try:
            if next(steps, answering) is None:
                return
        except Exception as error:
            answering.raised(error)
        self._alone = None

    def _require_context(self, prompt: RenderedPrompt, *, is_shifted: bool) -> None:
        longest = self.context_length
        if not is_shifted and longest is not None and len(prompt.tokens) > longest:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.tokens)} tokens; the model's context length is {longest} tokens.",
                code="context_length_exceeded",
            )
