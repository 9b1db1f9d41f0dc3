"""ServedModel: a loaded model and the requests that it answers. Only the generation thread uses it.

Requests run together in a ParallelGenerator, where each becomes a Generation. A second generator runs those that must
run alone, one at a time, each in a Session: with quantized or exact caches, layers that cannot be batched, images, or
log-probabilities of the prompt. Such a request waits for all running requests, and later requests wait for it.

    submit   have another thread tokenize the prompt; clients take turns on it
    begin    make sampler, stop words and grammar; put the request into the queue, in the order of each client
    round    end cancelled requests; start the queue's first request if it may run; advance running requests one step

Cancelling: `round` ends a waiting request, and tells the Generation of a running request to end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from radixcache import PrefixCache
from radixcache.chat import chat_tokens
from radixcache.chat_parts import Chat
from radixcache.chat_template import common_rendering
from radixcache.decode import LogitsProcessor, Sampler
from radixcache.prefix_cache import chats_of
from runner.engine.generation import Generation
from runner.engine.generator import PARALLEL_STEP_SIZE, ParallelGenerator
from runner.engine.token import LikelyToken, Token
from runner.models.load import LoadedModel
from runner.serve import mlx_lm_border
from runner.serve.grammars import Grammars, Guide
from runner.serve.options import ServeOptions
from runner.serve.prompts import UNBOUNDED_TOKENS, RenderedPrompt, embedder, part_at, prompt_of
from runner.serve.reply_reader import ReplyReader, json_calls
from runner.serve.request import ApiError, ModelNames, OpenRequest, PrefillProgress, Request, Sampling
from runner.serve.service import FairThreads
from runner.serve.template_breaks import TemplateBreaks
from runner.serve.volatile import behind_tools

logger = logging.getLogger(__name__)

CAPACITY_TOKENS = 1 << 31  # unlimited in practice: bytes, not tokens, limit how many requests run together
RESERVE_TOKENS = 1024  # room reserved for a reply; the few longer replies get more room while they run
COMPILING_S = 0.005  # how long an idle thread waits for a grammar before it looks for new requests
RENDERING_S = 0.01  # the same for a prompt
REHEARSED_TOKENS = 3  # the first token, a step, and a step that starts before the token of the last step is read
#: The longest prompt that gets log-probabilities, in tokens; and how many log-probabilities are computed at once.
MAX_SCORED_TOKENS, MAX_SCORES = 8192, 1 << 24


class ServedModel:
    """Answers requests with one model, several at once if `is_parallel`. `cache` outlives this object."""

    def __init__(
        self,
        key: ModelNames,
        loaded: LoadedModel,
        draft: Any,
        cache: PrefixCache,
        options: ServeOptions,
        *,
        is_parallel: bool,
        renderer: FairThreads,
    ) -> None:
        self.key, self.cache = key, cache
        self.tokenizer, self.processor = loaded.tokenizer, loaded.processor
        keep_first_space(self.tokenizer)
        self._breaks = TemplateBreaks.of(self.tokenizer, options.chat_template_args)
        self.model: Any = loaded.model
        self.draft_model: Any = draft
        self.context_length = loaded.context_length
        self._vocabulary_length = loaded.vocabulary_length
        self._options = options
        self._renderer = renderer
        self._chats = chats_of(cache)
        # Requests that wait for a prompt, in order of arrival. A request waits only for earlier ones of its client.
        # With images, `pending` is None: this thread makes the prompt, because the arrays belong to this thread.
        self._rendering: deque[OpenRequest] = deque()
        self._is_parallel = is_parallel
        #: False: the generator for many requests at once. True: the generator for one, made when a request needs it.
        self._generators: dict[bool, ParallelGenerator] = {}
        if is_parallel:
            self._generators[False] = self._new_generator(cache)
        self._running: dict[Generation, OpenRequest] = {}
        self._runs_alone = False  # whether the running request must run alone
        self._not_kept: list[OpenRequest] = []  # requests whose state is cleared when the reply ends
        self._scoring: tuple[OpenRequest, Iterator[None]] | None = None  # the request whose prompt is scored
        self._grammars = Grammars(self.tokenizer, self._vocabulary_length)
        self._compiling: deque[OpenRequest] = deque()
        self._queue: deque[OpenRequest] = deque()  # in order of arrival: requests that wait until others have finished
        # If all layers can be cut at any token, no checkpoints are needed, and so no marks.
        kinds = {type(each) for each in mlx_lm_border.make_prompt_cache(self.model)}
        self._is_marked = options.context is not None or kinds != {mlx_lm_border.KVCache}

    @property
    def is_idle(self) -> bool:
        return not any(self._waiting) and self._is_free

    @property
    def _waiting(self) -> tuple[deque[OpenRequest], ...]:
        return self._queue, self._compiling, self._rendering

    @property
    def _is_free(self) -> bool:
        return self._scoring is None and not self._running

    @property
    def most_tokens(self) -> int:
        """The longest prompt that a request may have, in tokens."""
        limit = None if self._options.context is not None else self.context_length
        return limit or UNBOUNDED_TOKENS

    def prompt(self, request: Request, *, contexts: int = 1) -> RenderedPrompt:
        """Tokenize the request's prompt. ApiError: the prompt cannot be made, or exceeds `contexts` contexts."""
        return prompt_of(
            request,
            self.tokenizer,
            self._options.chat_template_args,
            processor=self.processor,
            with_marks=self._is_marked,
            special_tokens=self._options.special_tokens_in_text,
            most_tokens=contexts * self.most_tokens,
        )

    def rendering(self, request: Request, *, contexts: int = 1) -> Future[RenderedPrompt] | None:
        """Make the prompt on another thread. None: the request has images, so call `prompt` instead."""
        has_images = self.processor is not None and any(mlx_lm_border.image_parts(request.messages))
        make = partial(self.prompt, request, contexts=contexts)
        return None if has_images else self._renderer.submit(request.client, make)

    def round(self) -> None:
        for held in self._waiting:
            for opened in [each for each in held if each.is_cancelled]:
                held.remove(opened)
                opened.end("cancelled")
                if opened.pending is not None:
                    opened.pending.cancel()
        self._begin_rendered()
        self._take_compiled()
        self._advance()
        if self._scoring is not None:
            self._score_more(*self._scoring)
        elif self._running:
            self._run_round()
        for opened in [each for each in self._not_kept if each.is_over]:
            self._not_kept.remove(opened)
            self.cache.clear(opened.request.namespace)

    def warm(
        self,
        tokens: Any,
        namespace: str = "",
        *,
        name: str | None = None,
        ttl_requests: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        return self.cache.warm(
            self.model,
            tokens,
            namespace,
            name=name,
            ttl_requests=ttl_requests,
            ttl_s=ttl_s,
            draft_model=self.draft_model,
        )

    def rehearse(self) -> None:
        """Compile, allocate, render and decode once, so that the first client need not wait for it.

        The reply is thrown away. It uses a cache of its own.
        """
        self.cache.learn(self.model, self.draft_model)
        request = Request(self.key, 2, messages=[{"role": "user", "content": "Hello"}])
        if self.tokenizer.chat_template is None:
            request = replace(request, prompt="Hello")
        try:
            tokens = self.prompt(request).tokens
        except (ApiError, ValueError):
            return  # the template refuses this conversation
        if self._is_parallel:
            models = [self.model, *([] if self.draft_model is None else [self.draft_model])]
            with PrefixCache(caches=lambda: fresh_caches(models)) as cache, self._new_generator(cache) as generator:
                generator.submit(tokens, max_tokens=REHEARSED_TOKENS, cuts_characters=False)
                list(generator)

    def close(self) -> None:
        """End all requests and free the model. Computed state stays in the cache."""
        left = [*([] if self._scoring is None else [self._scoring[0]]), *self._running.values()]
        left += [opened for held in self._waiting for opened in held]
        self._grammars.close()
        for generator in self._generators.values():
            generator.close()
        for opened in left:
            opened.end("cancelled")
        for held in self._waiting:
            held.clear()
        self._running.clear()
        self._generators.clear()
        self.model = self.draft_model = self._scoring = None

    def submit(self, opened: OpenRequest) -> None:
        """Accept a request. It begins when its prompt, and those of the client's earlier requests, are made."""
        opened.pending = self.rendering(opened.request)
        self._rendering.append(opened)

    def _begin_rendered(self) -> None:
        following: dict[str, Future[RenderedPrompt]] = {}  # the next prompt of each client
        for opened in self._rendering:
            if opened.pending is not None:
                following.setdefault(opened.request.client, opened.pending)
        is_waiting = self._is_free and not (self._queue or self._compiling)
        wait(following.values(), RENDERING_S if is_waiting else 0, FIRST_COMPLETED)
        late: set[str] = set()  # clients whose next prompt is not made yet
        for opened in [*self._rendering]:
            pending = opened.pending
            if pending is not None and not pending.done():
                late.add(opened.request.client)
            if opened.request.client in late:
                continue
            self._rendering.remove(opened)
            try:
                self.begin(opened, self.prompt(opened.request) if pending is None else pending.result())
            except ValueError as error:  # from mlx-lm's functions
                opened.fail(ApiError(400, str(error)))
            except Exception as error:
                if not isinstance(error, ApiError):
                    logger.exception("a request could not be begun")
                opened.fail(error)

    def begin(self, opened: OpenRequest, prompt: RenderedPrompt) -> None:
        """Check a request and put it into the queue. ApiError, or ValueError from mlx-lm: the request is wrong."""
        request, tokenizer = opened.request, self.tokenizer
        prompt_tokens = len(prompt.tokens)
        if not isinstance(request.prompt, str | None) and max(prompt.tokens) >= self._vocabulary_length:
            wanted = f"wanted 0 to {self._vocabulary_length - 1}"
            raise ApiError(400, f"token {max(prompt.tokens)} is not in the vocabulary; {wanted}.", param="prompt")
        has_images = prompt.vision is not None
        if has_images and self.draft_model is not None:
            raise ApiError(400, "a draft model cannot draft replies to images; ask with draft_model null.")
        if prompt.prediction and self._options.exact:
            why = "checked tokens round differently, and this server was started with --exact"
            raise ApiError(400, f"no prediction can be used here: {why}. Leave prediction out.", param="prediction")
        is_alone = not self._is_parallel or has_images or request.scores_prompt
        is_shifted = self._options.context is not None and not is_alone
        longest = CAPACITY_TOKENS - 1 if is_shifted or self.context_length is None else self.context_length
        if prompt_tokens > longest:
            raise ApiError.of_length(prompt_tokens, longest)
        room = self._options.context if is_shifted and request.max_tokens is None else longest - prompt_tokens
        max_tokens = max(1, min(request.max_tokens or CAPACITY_TOKENS, room or 0))
        opened.prompt, opened.is_alone = prompt, is_alone
        opened.options = {
            "max_tokens": max_tokens,
            "min_tokens": request.sampling.min_tokens,
            "sampler": sampler_of(request, tokenizer, self._vocabulary_length),
            "logits_processors": processors_of(request.sampling, self._vocabulary_length),
            "has_logprobs": request.sampling.has_logprobs,
            "stop_words": request.stop_words,
            "cuts_characters": False,
            "reserve": RESERVE_TOKENS,
            "prediction": prompt.prediction,
            "num_draft_tokens": 0 if self._options.exact else request.sampling.num_draft_tokens,
        }
        if request.scores_prompt and prompt_tokens > MAX_SCORED_TOKENS:
            found = f"the prompt has {prompt_tokens} tokens"
            raise ApiError(400, f"{found}; at most {MAX_SCORED_TOKENS} get log-probabilities.", param="echo")
        if request.constraint is None:
            self._accept(opened)
        else:
            opened.pending = self._grammars.guide(request, prompt)
            self._compiling.append(opened)

    def _accept(self, opened: OpenRequest, guide: Guide | None = None) -> None:
        """Put the request into the queue and start it if it may run. If that does not fail, send the first event."""
        opened.options, prompt = {**opened.options, "guidance": guide}, opened.prompt
        first = PrefillProgress(0, len(prompt.tokens), self._new_reader(opened.request, prompt), prompt.echo)
        self._queue.append(opened)
        if not opened.request.is_kept:
            self._not_kept.append(opened)
        self._advance()
        if not opened.is_over:
            opened.record.prompt_tokens = first.prompt_tokens
            opened.put(first)

    def _new_reader(self, request: Request, prompt: RenderedPrompt) -> Callable[[], ReplyReader]:
        """Return what makes the ReplyReader. If the model has no form for forced calls, it reads all text as calls."""
        tokenizer, initial_state = self.tokenizer, prompt.initial_state
        machine, parser = mlx_lm_border.make_text_state_machine(tokenizer), tokenizer.tool_parser
        if request.has_plain_calls(tokenizer):
            ends = [(tokenizer.think_end, "tool")] if tokenizer.has_thinking else []
            machine, parser = mlx_lm_border.TextStateMachine({"reasoning": ends, "tool": []}), json_calls
            initial_state = initial_state if initial_state == "reasoning" else "tool"
        return partial(
            ReplyReader,
            machine,
            initial_state,
            parser,
            prompt.arguments,
            call_marks=(tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""),
            has_one_call=request.constraint is not None and request.constraint.is_single,
            drops_breaks=self._breaks.drops_behind_reasoning,
            before_call=self._breaks.before_call if request.tools and tokenizer.has_tool_calling else None,
        )

    def _take_compiled(self) -> None:
        """Accept the requests whose grammars are compiled. Wait briefly for a grammar only if nothing else can run."""
        is_waiting = self._compiling and self._is_free and not self._queue
        pending = {each.pending: each for each in self._compiling if each.pending is not None}
        wait(pending, COMPILING_S if is_waiting else 0, FIRST_COMPLETED)
        for future in [each for each in pending if each.done()]:
            self._compiling.remove(opened := pending[future])
            try:
                self._accept(opened, future.result())
            except Exception as error:
                opened.fail(error)

    def _advance(self) -> None:
        while self._queue and self._scoring is None:
            opened = self._queue[0]
            if (opened.is_alone or self._runs_alone) and not self._is_free:
                return
            self._queue.popleft()
            if opened.request.scores_prompt:
                self._scoring = opened, self._score(opened, opened.prompt.tokens)
            else:
                self._start(opened)

    def _foresee(self, opened: OpenRequest, prompt: RenderedPrompt) -> None:
        found, record = self.cache.explain(prompt.tokens, opened.request.namespace, keys=prompt.keys), opened.record
        record.explanation = found
        record.keys = np.array(prompt.tokens, np.int32) if prompt.keys is None else np.array(prompt.keys, np.int64)
        if found.fork is not None:
            record.fork_part = prompt.part_at(found.fork.start)
            record.naming = self._renderer.submit(
                opened.request.client, self._name_fork, opened, prompt, found.fork.start
            )
        if prompt.chat is not None and opened.request.is_kept:
            self._chats.add(record.keys, prompt.chat, opened.request.namespace)

    def _name_fork(self, opened: OpenRequest, prompt: RenderedPrompt, start: int) -> None:
        found = self._fork_part(opened.request, prompt, start)
        opened.record.fork_part, opened.record.fork_hint, opened.record.movable_tokens = found

    def fork_part(self, request: Request, prompt: RenderedPrompt, start: int) -> Future[tuple[str, str]]:
        """Name the part of a prompt that differs from a stored one at `start`, and what to do about it; "": nothing.

        The template may run several times, so this runs on another thread.
        """
        return self._renderer.submit(request.client, lambda: self._fork_part(request, prompt, start)[:2])

    def _fork_part(self, request: Request, prompt: RenderedPrompt, start: int) -> tuple[str, str, int]:
        """Return the part, what to do about it, and how many more tokens --move-volatile would reuse."""
        if prompt.chat is not None:
            keys = np.asarray(prompt.tokens if prompt.keys is None else prompt.keys, np.int64)
            nearest = self._chats.first_change(self.tokenizer, keys, prompt.chat, start, request.namespace)
            change = nearest[0] if nearest else self._chats.reply_change(keys, prompt.chat, start, request.namespace)
            if change is not None:
                stored = nearest[2] if nearest else None
                moved = 0 if stored is None else movable_tokens(self.tokenizer, stored, prompt.chat, start)
                more = f" With --move-volatile, {moved:,} tokens more would be reused." if moved else ""
                return str(change), change.hint + more, moved
        return prompt.part_at(start) or part_at(request, self.tokenizer, prompt.tokens, start), "", 0

    def _new_generator(self, cache: PrefixCache, *, is_alone: bool = False) -> ParallelGenerator:
        options = self._options
        return ParallelGenerator(
            cache,
            self.model,
            self.tokenizer,
            capacity=CAPACITY_TOKENS,
            max_rows=options.decode_concurrency,
            step_size=options.prefill_step_size if is_alone else min(options.prefill_step_size, PARALLEL_STEP_SIZE),
            context=None if is_alone else options.context,
            speculate=options.drafts,
            draft_model=self.draft_model,
            is_alone=is_alone,
        )

    def _start(self, opened: OpenRequest) -> None:
        prompt, is_alone = opened.prompt, opened.is_alone
        opened.prompt = opened.pending = None  # free the prompt's tokens and images before the reply
        try:
            self._foresee(opened, prompt)
            if is_alone not in self._generators:
                self._generators[is_alone] = self._new_generator(self.cache, is_alone=is_alone)
            generation = self._generators[is_alone].submit(
                prompt.tokens,
                marks=prompt.marks,
                keys=prompt.keys,
                namespace=opened.request.namespace,
                embed=None if prompt.vision is None else embedder(self.model, prompt.tokens, prompt.vision),
                on_progress=lambda done_tokens, tokens: opened.put(PrefillProgress(done_tokens, tokens)),
                arrived_at_s=opened.arrived_s,
                facts=opened.record,
                **opened.options,
            )
        except ValueError as error:
            opened.fail(ApiError(400, str(error)))
        except Exception as error:
            opened.fail(error)
        else:
            self._running[generation], self._runs_alone = opened, is_alone

    def _run_round(self) -> None:
        for generation, opened in self._running.items():
            if opened.is_cancelled:
                generation.cancel()
        generator = self._generators[self._runs_alone]
        try:
            tokens = generator.round()
        except Exception as error:  # of the whole round: an error of one request ends only that request
            logger.exception("a round of many requests failed; all of them end")
            generator.close()
            for opened in self._running.values():
                opened.fail(error)
            self._running.clear()
            self._generators[self._runs_alone] = self._new_generator(self.cache, is_alone=self._runs_alone)
            return
        for generation, token in tokens:
            self._hand_out(generation, token)

    def _hand_out(self, generation: Generation, token: Token) -> None:
        opened, done = self._running[generation], token.completion
        if token.id is not None and opened.failure is None:
            try:
                opened.put(self._as_event(token, opened.request))
            except Exception as error:
                generation.cancel()
                opened.failure = error
        if done is None:
            return
        del self._running[generation]
        if opened.failure is not None or done.done_reason == "error":
            opened.fail(opened.failure or done.error)
        else:
            opened.end(done.done_reason or "stop", done.note, token.text if token.id is None else "")

    def _as_event(self, token: Token, request: Request) -> Token:
        """Return the token without arrays and completion, with the log-probabilities that the request asks for."""
        assert token.id is not None, token
        count = request.sampling.top_logprobs
        top = likeliest(token.logprobs, count, self.tokenizer) if count > 0 else ()
        data = token_bytes(self.tokenizer, token.id) if request.sampling.has_logprobs else b""
        return token._replace(top_tokens=top, data=data, logprobs=None, completion=None)

    def _score_more(self, opened: OpenRequest, steps: Iterator[None]) -> None:
        """Score the next chunk of a prompt. After the last chunk, start the reply."""
        try:
            if next(steps, opened) is None:
                return
        except Exception as error:
            opened.fail(error)
        self._scoring = None
        if opened.is_cancelled:
            opened.end("cancelled")
        elif not opened.is_over:
            self._start(opened)

    def _score(self, opened: OpenRequest, tokens: list[int]) -> Iterator[None]:
        """Compute the log-probabilities of a prompt's tokens, one chunk between two yields; then put them as an event.

        This does not use the cache, which stores state and no logits.
        """
        caches = mlx_lm_border.make_prompt_cache(self.model)
        count, step = opened.request.sampling.top_logprobs, max(1, min(512, MAX_SCORES // self._vocabulary_length))
        found = [Token("", tokens[0], 0.0, data=token_bytes(self.tokenizer, tokens[0]))]
        for start in range(0, len(tokens) - 1, step):
            chunk = tokens[start : start + step + 1]
            logits = self.model(mx.array(chunk[:-1])[None], cache=caches)[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            own: Any = mx.take_along_axis(logprobs, mx.array(chunk[1:])[:, None], axis=-1)[:, 0].tolist()
            for row, (token, logprob) in enumerate(zip(chunk[1:], own, strict=True)):
                top = likeliest(logprobs[row], count, self.tokenizer) if count > 0 else ()
                found.append(Token("", token, logprob, top, data=token_bytes(self.tokenizer, token)))
            if opened.is_cancelled:
                return
            yield
        opened.put(PrefillProgress(0, len(tokens), echoed=tuple(found)))


def movable_tokens(tokenizer: Any, stored: Chat, asked: Chat, start: int) -> int:
    """Count the tokens after `start` that two chats would share if their volatile parts came after the tools."""
    moved = [each._replace(messages=behind_tools([*map(dict, each.messages)])[0]) for each in (stored, asked)]
    if [*moved[1].messages] == [*asked.messages]:
        return 0
    try:
        tokens = [chat_tokens(tokenizer, each.messages, each.tools, **each.arguments) for each in moved]
    except ValueError:  # the template refuses one of them
        return 0
    return max(0, common_rendering(*(each.tolist() for each in tokens)) - start)


def fresh_caches(models: Sequence[Any]) -> list[Any]:
    """A list of mlx-lm caches for a model, or for a model and its draft model."""
    return [cache for model in models for cache in mlx_lm_border.make_prompt_cache(model)]


def keep_first_space(tokenizer: Any) -> None:
    """Keep the space at the start of a reply's first token; mlx-lm removes it.

    Without the space, the reply has other tokens when it comes back in the next turn, and is prefilled again.
    """
    detokenizer = tokenizer._detokenizer  # each reply copies this detokenizer
    if isinstance(detokenizer, mlx_lm_border.SPMStreamingDetokenizer):
        detokenizer.trim_space = False
    elif isinstance(detokenizer, mlx_lm_border.BPEStreamingDetokenizer):
        detokenizer._maybe_trim_space = str


def likeliest(logprobs: mx.array, count: int, tokenizer: Any) -> tuple[LikelyToken, ...]:
    """Return the `count` likeliest tokens, the likeliest first. `logprobs`: (V,), V tokens in the vocabulary."""
    ids = mx.argpartition(-logprobs, kth=count - 1)[:count]
    found: list[Any] = [ids.tolist(), logprobs[ids].tolist()]
    top = sorted(zip(*found, strict=True), key=lambda each: (-each[1], each[0]))
    return tuple(LikelyToken(id, token_bytes(tokenizer, id), logprob) for id, logprob in top)


def token_bytes(tokenizer: Any, id: int) -> bytes:
    """Return the text of a token in UTF-8. A token may be only a part of a character."""
    detokenizer = tokenizer._detokenizer
    if isinstance(detokenizer, mlx_lm_border.SPMStreamingDetokenizer):
        return bytes(detokenizer.tokenmap[id].replace(detokenizer._sep, b" "))
    if isinstance(detokenizer, mlx_lm_border.BPEStreamingDetokenizer):
        found, byte_of = tokenizer.convert_ids_to_tokens(id) or "", mlx_lm_border.byte_decoder()
        return b"".join(bytes([byte_of[each]]) if each in byte_of else each.encode() for each in found)
    return str(tokenizer.decode([id])).encode()


def sampler_of(request: Request, tokenizer: Any, vocabulary_length: int) -> Sampler | None:
    """Return mlx-lm's sampler; None: decode greedily. ApiError: `top_k` is larger than the vocabulary."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return None
    if sampling.top_k >= vocabulary_length:
        wanted = f"wanted less than {vocabulary_length}, the size of the vocabulary"
        raise ApiError(400, f"top_k is {sampling.top_k}; {wanted}.")
    sampler: Sampler = mlx_lm_border.make_sampler(SimpleNamespace(sampling=sampling), tokenizer)
    return sampler if sampling.seed is None else SeededSampler(sampler, sampling.seed)


def processors_of(sampling: Sampling, vocabulary_length: int) -> Sequence[LogitsProcessor]:
    """mlx-lm's logits processors. ApiError: an id of `logit_bias` is no token."""
    for token in sampling.logit_bias:
        if token >= vocabulary_length:
            raise ApiError(400, f"logit_bias names token {token}; wanted 0 to {vocabulary_length - 1}.")
    processors: Sequence[LogitsProcessor] = mlx_lm_border.make_logits_processors(SimpleNamespace(logits=sampling))
    return processors


class SeededSampler:
    """Samples as `sampler` does after mx.random.seed(seed). Other requests do not change the result.

    MLX has one random state per thread. Each call sets the state of the request, then restores that of the thread.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler, self._seed = sampler, seed

    def __call__(self, logprobs: mx.array) -> mx.array:
        others = _random_seed()
        mx.random.seed(self._seed)
        try:
            return self._sampler(logprobs)
        finally:
            self._seed = _random_seed()
            mx.random.seed(others)


def _random_seed() -> int:
    """The seed that restores this thread's random state."""
    key: Any = mx.random.state
    high, low = np.asarray(key[0]).tolist()
    return int(high) << 32 | int(low)
