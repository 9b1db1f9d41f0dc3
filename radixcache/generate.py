"""stream_generate: mlx_lm.stream_generate with a PrefixCache behind it.

The same arguments, the same responses; what is stored of the prompt is restored instead of prefilled, and what this
request evaluates is there for the next one. Decoding is pipelined: the forward pass of a token is dispatched before
the token is handed out, so a stop token is part of what is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream, speculative_generate_step, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from radixcache.prefix_cache import PrefixCache
from radixcache.sessions.draft import both_models
from radixcache.sessions.session import Session

#: Arguments of mlx_lm.stream_generate that contradict a PrefixCache, and what to do instead.
REFUSED = {
    "prompt_cache": "the PrefixCache provides the caches",
    "max_kv_size": "give PrefixCache(caches=...) a callable that makes rotating caches",
    "input_embeddings": "the tree goes by tokens; use begin(keys=...) and your own loop",
    "kv_bits": "use PrefixCache(kv_bits=...), which quantizes from offset 0",
    "kv_group_size": "use PrefixCache(kv_group_size=...)",
    "quantized_kv_start": "PrefixCache(kv_bits=...) quantizes from offset 0",
}

Token = tuple[int, mx.array, bool]


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
    **kwargs: Any,
) -> Generator[CachedGenerationResponse, None, None]:
    """Generate text token by token, as mlx_lm.stream_generate does.

    Args:
        prompt: text or token ids.
        max_tokens: tokens to generate at most; -1 for no limit.
        draft_model: speculative decoding; `cache` must have been made with both models' caches, in this order.
        cache: the PrefixCache to resume from and to store into.
        namespace, marks, priority: as in PrefixCache.begin().
        kwargs: sampler, logits_processors, prefill_step_size, prompt_progress_callback, num_draft_tokens.

    Raises:
        ValueError: an argument of mlx-lm that cannot be honoured together with `cache`, or max_tokens is 0.
        CacheBusyError: the cache's live slot is taken.
    """
    for name in kwargs.keys() & REFUSED.keys():
        if kwargs.pop(name) is not None:
            raise ValueError(f"{name} cannot be used together with cache=: {REFUSED[name]}.")
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}; wanted 1 or more, or -1 for no limit.")
    unknown = kwargs.keys() - {
        "sampler", "logits_processors", "prefill_step_size", "prompt_progress_callback", "num_draft_tokens"
    }  # fmt: skip
    if unknown:
        raise TypeError(f"stream_generate() got unexpected arguments: {', '.join(sorted(unknown))}.")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    reserve = max_tokens if max_tokens > 0 else 256
    begin = {"namespace": namespace, "marks": marks, "priority": priority, "reserve": min(reserve, 4096)}
    return _respond(model, tokenizer, prompt, max_tokens, draft_model, stream, cache, begin, kwargs)


def _respond(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int,
    draft_model: Any,
    stream: Any,
    cache: PrefixCache,
    begin: dict[str, Any],
    kwargs: dict[str, Any],
) -> Generator[CachedGenerationResponse, None, None]:
    with wired_limit(model, [stream]), cache.begin(prompt, **begin) as session:
        length = len(session.prompt)
        detokenizer = tokenizer.detokenizer
        tokens = _tokens(model, draft_model, session, stream, max_tokens, kwargs)
        began = time.perf_counter()
        prompt_tps = 0.0
        finish = None
        try:
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
        finally:
            # Before the session closes: a speculative generator takes rejected tokens back when it ends.
            tokens.close()


def _tokens(
    model: Any, draft_model: Any, session: Session, stream: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Any:
    step_size = kwargs.pop("prefill_step_size", None)
    progress: Callable[[int, int], None] | None = kwargs.pop("prompt_progress_callback", None)
    draft_count = kwargs.pop("num_draft_tokens", 2)
    if draft_model is None:
        return _plain(model, session, stream, max_tokens, step_size, progress, **kwargs)
    return _speculative(model, draft_model, session, stream, max_tokens, step_size, progress, draft_count, kwargs)


def _plain(
    model: Any,
    session: Session,
    stream: Any,
    max_tokens: int,
    step_size: int | None,
    progress: Callable[[int, int], None] | None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
) -> Iterator[Token]:
    history = mx.array(session.prompt) if logits_processors else None

    def forward(tokens: Any) -> tuple[mx.array, mx.array]:
        nonlocal history
        with mx.stream(stream):
            logits = session.step(model, tokens)[:, -1, :]
            if history is not None:
                if isinstance(tokens, mx.array):
                    history = mx.concatenate([history, tokens])
                for processor in logits_processors or ():
                    logits = processor(history, logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            sampled = mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)
            mx.async_eval(sampled, logprobs)
        return sampled, logprobs.squeeze(0)

    with mx.stream(stream):
        session.prefill(model, step_size=step_size, on_progress=progress)
    sampled, logprobs = forward(session.prompt[-1:])
    count = 0
    while True:
        count += 1
        # The next forward pass is under way before this token is read.
        following = forward(sampled) if count != max_tokens else None
        token = int(sampled.item())  # type: ignore[arg-type]
        if count == 1 and progress is not None:
            progress(len(session.prompt), len(session.prompt))
        yield token, logprobs, False
        if following is None:
            return
        if count % 256 == 0:
            mx.clear_cache()
        sampled, logprobs = following


def _speculative(
    model: Any,
    draft_model: Any,
    session: Session,
    stream: Any,
    max_tokens: int,
    step_size: int | None,
    progress: Callable[[int, int], None] | None,
    draft_count: int,
    kwargs: dict[str, Any],
) -> Iterator[Token]:
    both = both_models(model, draft_model, len(session.caches))
    with mx.stream(stream):
        session.prefill(both, step_size=step_size, on_progress=progress)
    generator = speculative_generate_step(
        mx.array(session.prompt[-1:]),
        model,
        draft_model,
        stream,
        num_draft_tokens=draft_count,
        max_tokens=max_tokens if max_tokens > 0 else 1 << 30,
        prompt_cache=session.caches,
        **kwargs,
    )
    try:
        for token, logprobs, from_draft in generator:
            session.extend([int(token)])
            yield int(token), logprobs, bool(from_draft)
    finally:
        generator.close()
