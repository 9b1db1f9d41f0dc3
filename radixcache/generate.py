"""stream_generate: mlx_lm.stream_generate with a PrefixCache: the same arguments, the same responses.

The stored beginning of a prompt is restored instead of prefilled, and a request's state is stored for the next one.
Decoding dispatches the forward pass of a token before it returns the token, so a stop token is stored too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream, speculative_generate_step, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from radixcache.chat_parts import Chat
from radixcache.prefix_cache import PrefixCache
from radixcache.sessions.session import Session, both_models
from radixcache.settings import is_whole

#: Further arguments of mlx_lm.stream_generate.
OPTIONS = {"sampler", "logits_processors", "prefill_step_size", "prompt_progress_callback", "num_draft_tokens"}
#: Arguments of mlx_lm.stream_generate that contradict a PrefixCache, and what to do instead.
REFUSED = {
    "prompt_cache": "the PrefixCache provides the caches",
    "max_kv_size": "give PrefixCache(caches=...) a callable that makes rotating caches",
    "input_embeddings": "the tree stores tokens; use keys= and embed=",
    "kv_bits": "use PrefixCache(kv_bits=...), which quantizes from offset 0",
    "kv_group_size": "use PrefixCache(kv_group_size=...)",
    "quantized_kv_start": "PrefixCache(kv_bits=...) quantizes from offset 0",
}

#: Decoded tokens between two releases of MLX's free buffers.
RELEASE_INTERVAL_TOKENS = 256

Token = tuple[int, mx.array, bool]
#: From a forward pass's tokens and logits (1, T, V): the next token (1,) and log-probabilities (1, V), both pending.
Choose = Callable[[Any, mx.array], tuple[mx.array, mx.array]]


@dataclass
class CachedGenerationResponse(GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response, and how many prompt tokens were restored."""

    cached_tokens: int = 0


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | NDArray[Any] | mx.array,
    max_tokens: int = 256,
    draft_model: Any = None,
    stream: Any = generation_stream,
    *,
    cache: PrefixCache,
    namespace: str = "",
    marks: Sequence[int] = (),
    priority: int = 0,
    keys: Any = None,
    embed: Callable[[int], mx.array] | None = None,
    chat: Chat | None = None,
    **kwargs: Any,
) -> Generator[CachedGenerationResponse, None, None]:
    """Generate text token by token, as mlx_lm.stream_generate does.

    Args:
        prompt: text or token ids.
        max_tokens: tokens to generate at most; -1 for no limit.
        draft_model: for speculative decoding; `cache` must have been made with both models' caches, in this order.
        cache: the PrefixCache to resume from and to store into.
        namespace: as in PrefixCache.begin().
        marks: as in PrefixCache.begin().
        priority: as in PrefixCache.begin().
        keys: as in PrefixCache.begin().
        embed: called with the resume offset; returns embeddings (T, D) of the prompt from there on, which the model
            gets as `input_embeddings` beside the tokens. `keys` must differ where embeddings do.
        chat: as in PrefixCache.begin().
        kwargs: sampler, logits_processors, prefill_step_size, prompt_progress_callback, num_draft_tokens.

    Raises:
        ValueError: an argument of mlx-lm that contradicts `cache`, max_tokens is 0, or `embed` without `keys` or with a
            draft model.
        CacheBusyError: every live slot of the cache is taken.
    """
    if not isinstance(cache, PrefixCache):
        raise ValueError(f"cache is {cache!r:.80}; wanted a PrefixCache.")
    for name in kwargs.keys() & REFUSED.keys():
        if kwargs.pop(name) is not None:
            raise ValueError(f"{name} cannot be used together with cache=: {REFUSED[name]}.")
    if not is_whole(max_tokens) or max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens!r}; wanted 1 or more, or -1 for no limit.")
    if embed is not None and (keys is None or draft_model is not None):
        raise ValueError("embed= needs keys=, as equal tokens may have different embeddings, and no draft_model.")
    if unknown := kwargs.keys() - OPTIONS:
        raise TypeError(f"stream_generate() got unexpected arguments: {', '.join(sorted(unknown))}.")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    reserve = min(max_tokens if max_tokens > 0 else 256, 4096)
    begin = partial(cache.begin, prompt, keys, namespace, marks, reserve, priority, chat=chat)
    tokens_of = partial(_tokens, model, draft_model, stream, max_tokens, embed, **kwargs)
    return _respond(model, tokenizer, max_tokens, stream, begin, tokens_of)


def _respond(
    model: Any,
    tokenizer: Any,
    max_tokens: int,
    stream: Any,
    begin: Callable[[], Session],
    tokens_of: Callable[[Session], Generator[Token, None, None]],
) -> Generator[CachedGenerationResponse, None, None]:
    # A speculative generator removes rejected tokens when it ends: before the session closes.
    with wired_limit(model, [stream]), begin() as session, closing(tokens_of(session)) as tokens:
        length, detokenizer = len(session.prompt), tokenizer.detokenizer
        began, prompt_tps, finish = time.perf_counter(), 0.0, None
        for count, (token, logprobs, from_draft) in enumerate(tokens, start=1):
            if count == 1:
                prompt_tps = length / (time.perf_counter() - began)
                began = time.perf_counter()
            if token in tokenizer.eos_token_ids:
                finish = "stop"
            else:
                detokenizer.add_token(token)
                finish = "length" if count == max_tokens else None
            if finish is not None:
                detokenizer.finalize()
            yield CachedGenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logprobs,
                from_draft=from_draft,
                prompt_tokens=length,
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - began),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=finish,
                cached_tokens=session.cached_tokens,
            )
            if finish is not None:
                return


def _tokens(
    model: Any,
    draft_model: Any,
    stream: Any,
    max_tokens: int,
    embed: Callable[[int], mx.array] | None,
    session: Session,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    num_draft_tokens: int = 2,
    **sampling: Any,
) -> Generator[Token, None, None]:
    whole = model if draft_model is None else both_models(model, draft_model, len(session.caches))
    with mx.stream(stream):
        if embed is not None:
            model = whole = _fed_with(embed(session.position), model)
        session.prefill(whole, step_size=prefill_step_size, on_progress=prompt_progress_callback)
    if draft_model is not None:
        sampling |= {"max_tokens": max_tokens if max_tokens > 0 else 1 << 30, "num_draft_tokens": num_draft_tokens}
        last, caches = mx.array(session.prompt[-1:]), session.caches
        generator = speculative_generate_step(last, model, draft_model, stream, prompt_cache=caches, **sampling)
        with closing(generator):
            for token, logprobs, from_draft in generator:
                session.extend([int(token)])
                yield int(token), logprobs, bool(from_draft)
        return
    choose = _chooser(session.prompt, **sampling)
    tokens = decode(session, model, session.prompt[-1:], choose, max_tokens=max_tokens, stream=stream)
    for count, (token, logprobs) in enumerate(tokens):
        if count == 0 and prompt_progress_callback is not None:
            prompt_progress_callback(len(session.prompt), len(session.prompt))
        yield token, logprobs, False


def _fed_with(embeddings: mx.array, model: Any) -> Callable[..., Any]:
    """The model, called with these embeddings (T, D) of its next tokens, and as usual behind them."""
    rest: mx.array | None = embeddings

    def fed(tokens: mx.array, cache: list[Any]) -> Any:
        nonlocal rest
        if rest is None:
            return model(tokens, cache=cache)
        count = tokens.shape[1]
        rows, rest = rest[None, :count], rest[count:] if count < len(rest) else None
        return model(tokens, cache=cache, input_embeddings=rows)

    return fed


def _chooser(
    prompt: Any,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
) -> Choose:
    history = mx.array(prompt[:-1]) if logits_processors else None

    def choose(tokens: Any, logits: mx.array) -> tuple[mx.array, mx.array]:
        nonlocal history
        logits = logits[:, -1, :]
        if history is not None:
            history = mx.concatenate([history, mx.array(tokens)])
            for processor in logits_processors or ():
                logits = processor(history, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs), logprobs

    return choose


def decode(
    run: Any, model: Any, last: Any, choose: Choose, *, max_tokens: int, stream: Any = None
) -> Iterator[tuple[int, mx.array]]:
    """Yield at most `max_tokens` tokens (-1: no limit), each with its log-probabilities (V,).

    The forward pass that follows a token is dispatched before that token is read. If the caller stops at a token, that
    pass is wasted; waiting for the decision would slow down every other token.

    Args:
        run: has `step`, as a Session, and is prefilled up to the prompt's last token: `last`, (1,).
        stream: MLX's stream for the forward passes; None for the current one.
    """

    def forward(tokens: Any) -> tuple[mx.array, mx.array]:
        with nullcontext() if stream is None else mx.stream(stream):
            sampled, logprobs = choose(tokens, run.step(model, tokens))
            mx.async_eval(sampled, logprobs)
        return sampled, logprobs.squeeze(0)

    following = forward(last)
    count = 0
    while count != max_tokens:
        count += 1
        sampled, logprobs = following
        if count != max_tokens:
            following = forward(sampled)
        yield int(sampled.item()), logprobs  # type: ignore[arg-type]
        if count % RELEASE_INTERVAL_TOKENS == 0:
            mx.clear_cache()
