"""Servers of a replay: each answers the requests with one cache, for one user at a time or for several.

    OneAtATime    any cache of caches.py, one request after the other
    TreeServer    a ParallelGenerator on a PrefixCache
    BatchServer   mlx-lm's BatchGenerator on its LRUPromptCache, as mlx-lm's server combines them

BatchServer stores and evicts as `LRUPrompts` says. Source: mlx_lm/server.py, mlx-lm 0.32.2.

  RR1  A request arrives right before its cache is asked. So TTFT includes lookup, copies and page-in.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from radixcache import PrefixCache
from runner.engine.generation import Generation, LiveRun, feed, generate
from runner.engine.generator import ParallelGenerator
from runner.engine.token import Completion
from runner.models.load import LoadedModel
from runner.replay import ReplayOptions
from runner.replay.caches import LRUPrompts, open_cache
from runner.script.script import RenderedRequest


@dataclass(frozen=True, kw_only=True)
class RequestRow:
    """What one request cost with one cache. None: the figure is not measured for this number of users at a time."""

    user: str
    conversation_id: str
    turn: int
    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    reason: str | None  # why no more tokens were cached
    ttft_ms: float  # from the request's arrival to its first token
    waited_ms: float | None = None  # part of `ttft_ms` with several users: until prefill began
    begin_ms: float | None = None  # part of `ttft_ms` with one user: the time in the cache
    decode_ms: float  # from the first token to the last, or the time to feed the recorded reply
    close_ms: float | None = None  # storing what was evaluated, after the last token
    live_bytes: int | None = None  # held after the request; so are `paged_bytes`
    paged_bytes: int | None = None
    peak_bytes: int  # the most held after a chunk or the reply; with several users, by all requests up to this one
    allocated_bytes: int | None = None  # the most that MLX held after the reply, without model and other caches
    proposed_tokens: int | None = None  # drafted tokens that were checked
    accepted_tokens: int | None = None  # proposed tokens that became part of the reply
    output_tokens: int
    output_hash: str
    done_reason: str


@dataclass(frozen=True)
class Answer:
    """The reply to a request; `index` is the place of the request in the script."""

    index: int
    row: RequestRow
    tokens: Sequence[int]
    text: str


class OneAtATime:
    """Answers requests from one of the caches of caches.py, and watches its bytes.

    All servers have `submit`, which accepts a request; `answers`, which serves until all requests are done; `close`,
    which releases every array; `peak_bytes` and `peak_tokens`, the most that caches and running rows held so far.
    """

    peak_tokens = 0

    def __init__(
        self, name: str, loaded: LoadedModel, options: ReplayOptions, on_advance: Callable[[int, int], None]
    ) -> None:
        """Open the cache. `on_advance` is called with the prompt tokens that are done, and the length of the prompt."""
        self.name = name
        self.peak_bytes = 0
        self._loaded, self._options, self._on_advance = loaded, options, on_advance
        self._cache = open_cache(name, loaded, options)
        self.shown = self._cache.shown
        self._waiting: list[tuple[int, RenderedRequest]] = []
        # What MLX has allocated for this cache: what was added during its own requests.
        self._held_bytes = self._others_bytes = 0
        self._request_peak_bytes = self._allocated_bytes = 0

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    def submit(self, index: int, request: RenderedRequest) -> None:
        self._waiting.append((index, request))

    def answers(self) -> Iterator[Answer]:
        while self._waiting:
            yield self._answer(*self._waiting.pop(0))

    def close(self) -> None:
        self._cache.close()

    def _answer(self, index: int, request: RenderedRequest) -> Answer:
        self._others_bytes = mx.get_active_memory() - self._held_bytes
        self._request_peak_bytes = self._allocated_bytes = 0
        arrived_s = time.perf_counter()
        with self._cache.begin(request.prompt) as run:
            begun_s = time.perf_counter()
            completion, decode_ms, text = self._reply(run, request, arrived_s)
            completion.matched_tokens, completion.reason = run.matched_tokens, run.reason
            self._watch(is_settled=True)
            closing_s = time.perf_counter()
        closed_s = time.perf_counter()
        self._watch(is_settled=True)
        del run
        self._held_bytes = mx.get_active_memory() - self._others_bytes
        self.peak_bytes = max(self.peak_bytes, self._request_peak_bytes)
        row = _request_row(
            request,
            completion,
            begin_ms=(begun_s - arrived_s) * 1e3,
            decode_ms=decode_ms,
            close_ms=(closed_s - closing_s) * 1e3,
            live_bytes=self._cache.live_bytes,
            paged_bytes=self._cache.paged_bytes,
            peak_bytes=self._request_peak_bytes,
            allocated_bytes=self._allocated_bytes,
        )
        return Answer(index, row, completion.tokens, text)

    def _reply(self, run: LiveRun, request: RenderedRequest, arrived_s: float) -> tuple[Completion, float, str]:
        """Generate the reply, or one token and then feed the recorded reply. Return completion, decode ms and text."""

        def on_progress(offset: int, prompt_tokens: int) -> None:
            self._watch()
            self._on_advance(offset, prompt_tokens)

        pieces = generate(
            run,
            self._loaded.model,
            self._loaded.tokenizer,
            max_tokens=1 if self._options.recorded else self._options.max_tokens,
            step_size=self._options.step_size,
            on_progress=on_progress,
            arrived_at_s=arrived_s,
            drafting=self._cache.drafting(request.prompt),
        )
        completion, text = None, ""
        for piece in pieces:
            completion, text = piece.completion, text + piece.text
        assert completion is not None, "the last piece carries it"
        if not self._options.recorded:
            return completion, completion.completion_ms, text
        feeding_s = time.perf_counter()
        feed(run, self._loaded.model, request.reply, step_size=self._options.step_size)
        return completion, (time.perf_counter() - feeding_s) * 1e3, text

    def _watch(self, is_settled: bool = False) -> None:
        """Note the bytes held. `is_settled`: also those of the allocator; no forward pass has temporary arrays now."""
        held_bytes = self._cache.live_bytes + self._cache.paged_bytes
        self._request_peak_bytes = max(self._request_peak_bytes, held_bytes)
        if is_settled:
            self._allocated_bytes = max(self._allocated_bytes, mx.get_active_memory() - self._others_bytes)


class TreeServer:
    name = "radix"

    def __init__(self, loaded: LoadedModel, options: ReplayOptions, *, capacity: int, users: int) -> None:
        self.shown = PrefixCache(
            loaded.model,
            budget_bytes=options.budget_bytes,
            policy=options.policy,
            stored_bits=options.stored_bits,
        )
        self.peak_tokens = 0
        self._max_tokens, self._is_drafted = options.max_tokens, options.speculate is not None
        self._generator = ParallelGenerator(
            self.shown,
            loaded.model,
            loaded.tokenizer,
            capacity=capacity,
            max_rows=users,
            step_size=options.step_size,
            speculate=options.speculate,
        )
        self._requests: dict[Generation, tuple[int, RenderedRequest]] = {}
        self._texts: dict[Generation, str] = defaultdict(str)

    @property
    def evictions(self) -> int:
        return self.shown.stats.evictions

    @property
    def peak_bytes(self) -> int:
        return self.shown.stats.peak_bytes

    def submit(self, index: int, request: RenderedRequest) -> None:
        prompt, arrived_s = request.prompt, time.perf_counter()
        ticket = self._generator.submit(
            prompt.tokens, marks=prompt.marks, max_tokens=self._max_tokens, arrived_at_s=arrived_s
        )
        self._requests[ticket] = index, request

    def answers(self) -> Iterator[Answer]:
        for ticket, piece in self._generator:
            self._texts[ticket] += piece.text
            self.peak_tokens = max(self.peak_tokens, self._generator.group.used_tokens)
            done = piece.completion
            if done is None:
                continue
            if done.error is not None:
                raise done.error
            index, request = self._requests.pop(ticket)
            figures: dict[str, Any] = {"waited_ms": _waited_ms(done), "peak_bytes": self.peak_bytes}
            for what in ("proposed", "accepted") if self._is_drafted else ():
                figures[f"{what}_tokens"] = sum(getattr(each, what) for each in done.drafted.values())
            row = _request_row(request, done, **figures)
            yield Answer(index, row, done.tokens, self._texts.pop(ticket))

    def close(self) -> None:
        self._generator.close()
        self.shown.close()


@dataclass
class _Running:
    index: int
    request: RenderedRequest
    reply: Generation
    kinds: list[str]
    has_begun: bool = False
    text: str = ""


class BatchServer:
    name = "mlx-lm"
    shown = None
    peak_tokens = 0

    def __init__(self, loaded: LoadedModel, options: ReplayOptions, *, users: int) -> None:
        self._loaded, self._options = loaded, options
        self._stored = LRUPrompts(loaded.model, loaded.tokenizer, budget_bytes=options.budget_bytes)
        self._generator = BatchGenerator(loaded.model, prefill_step_size=options.step_size, completion_batch_size=users)
        self._running: dict[int, _Running] = {}
        self.peak_bytes = 0

    @property
    def evictions(self) -> int:
        return self._stored.evictions

    def submit(self, index: int, request: RenderedRequest) -> None:
        arrived_s, max_tokens = time.perf_counter(), self._options.max_tokens
        tokens = request.prompt.tokens.tolist()
        caches, cached_tokens = self._stored.fetch(tokens)
        kinds = [(end, kind) for end, kind in self._stored.segments(request.prompt) if end > cached_tokens]
        ends = [cached_tokens, *(end for end, _ in kinds), len(tokens)]
        segments = [tokens[start:end] for start, end in pairwise(ends) if start < end]
        (user,) = self._generator.insert_segments(
            [segments], [max_tokens], caches=[caches], all_tokens=[tokens[:cached_tokens]]
        )
        reply = Generation(
            tokenizer=self._loaded.tokenizer, tokens=tokens, max_tokens=max_tokens, arrived_at_s=arrived_s
        )
        reply.facts.cached_tokens = reply.facts.matched_tokens = cached_tokens
        self._running[user] = _Running(index, request, reply, [kind for _, kind in kinds])

    def answers(self) -> Iterator[Answer]:
        while self._running:
            self._stored.trim_to(self._options.budget_bytes - int(self._generator.prompt_cache_nbytes))
            prompts, tokens = self._generator.next()
            for response in prompts:
                running = self._running[response.uid]
                if not running.has_begun:
                    running.has_begun = True
                    running.reply.start()
            ended = [r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt and self._running[r.uid].kinds]
            for user, (caches, key) in self._generator.extract_cache(ended).items():
                self._stored.insert(list(key), list(caches), self._running[user].kinds.pop(0))
            held = int(self._generator.prompt_cache_nbytes) + self._stored.paged_bytes
            self.peak_bytes = max(self.peak_bytes, held)
            for response in tokens:
                yield from self._add(response)

    def close(self) -> None:
        self._generator.close()
        self._stored.close()

    def _add(self, response: Any) -> Iterator[Answer]:
        """Add the next token to a reply; at the end of the reply, store the caches of its row and yield the answer."""
        running = self._running[response.uid]
        piece = running.reply.add(response.token)
        running.text += piece.text
        completion = piece.completion
        if completion is None:
            return
        del self._running[response.uid]
        entries = [(response.prompt_cache, response.all_tokens)]
        if response.finish_reason is None:  # a stop token, which the generator does not know
            entries = list(self._generator.remove([response.uid], return_prompt_caches=True).values())
        for caches, key in entries:
            self._stored.insert(list(key), list(caches), "assistant")
        figures = {"waited_ms": _waited_ms(completion), "peak_bytes": self.peak_bytes}
        row = _request_row(running.request, completion, **figures)
        yield Answer(running.index, row, completion.tokens, running.text)


Server = OneAtATime | TreeServer | BatchServer


def output_hash(tokens: Sequence[int]) -> str:
    """Digest of output tokens: equal outputs, equal digests."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=8).hexdigest()


def _waited_ms(completion: Completion) -> float:
    assert completion.ttft_ms is not None and completion.prompt_ms is not None, "nothing cancels a replayed request"
    return completion.ttft_ms - completion.prompt_ms


def _request_row(request: RenderedRequest, completion: Completion, **figures: Any) -> RequestRow:
    about: dict[str, Any] = {
        "user": request.scheduled.conversation.user,
        "conversation_id": request.scheduled.conversation.conversation_id,
        "turn": request.scheduled.turn,
        "prompt_tokens": completion.prompt_tokens,
        "matched_tokens": completion.matched_tokens,
        "cached_tokens": completion.cached_tokens,
        "reason": completion.reason,
        "ttft_ms": completion.ttft_ms,
        "decode_ms": completion.completion_ms,
        "output_tokens": completion.completion_tokens,
        "output_hash": output_hash(completion.tokens),
        "done_reason": completion.done_reason,
    }
    return RequestRow(**about | figures)
