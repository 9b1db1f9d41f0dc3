"""stream_generate: mlx_lm.stream_generate with a PrefixCache: the same arguments, the same responses.

The stored prefix of a prompt is restored instead of prefilled, and a request's state is stored for later requests.
Decoding dispatches the forward pass of a token before it yields the token, so the state of a stop token is stored too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from radixcache.chat_parts import Chat
from radixcache.decode import DecodeLoop, Decoding, Drafts, LogitsProcessor, Sampler
from radixcache.errors import SessionClosedError, SnapshotError
from radixcache.layers.trials import BothModels
from radixcache.prefix_cache import PrefixCache
from radixcache.sessions.session import Session
from radixcache.sessions.solo import Embed, Solo, feed_with
from radixcache.settings import is_whole, require_count
from radixcache.speculate.drafting import MOST_PREDICTED, Drafted, Drafting, predicted_tokens
from radixcache.speculate.pace import DraftPace
from radixcache.tokens import TokenIds, token_ids

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


@dataclass
class CachedGenerationResponse(GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response, with the number of restored prompt tokens and counts of draft tokens by source."""

    cached_tokens: int = 0
    drafted: Mapping[str, Drafted] = field(default_factory=dict)


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
    embed: Embed | None = None,
    chat: Chat | None = None,
    speculate: Literal["tree", "prompt"] | None = None,
    prediction: str | Sequence[int] | NDArray[Any] | None = None,
    min_tokens: int = 0,
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
        embed: called with the resume offset, and with 0 if the request is verified. Returns embeddings (T, D) of the
            prompt from this offset on. The model gets them as `input_embeddings`, with the tokens. `keys` must differ
            where embeddings differ.
        chat: as in PrefixCache.begin().
        speculate: as in PrefixCache.drafting(): "tree" or "prompt". The reply, with a seed too, is the same as without
            drafts, up to rounding: passes over several tokens add numbers in another order.
        prediction: the expected reply, as text or token ids. At most twice `max_tokens` tokens of it are used.
        min_tokens: the reply has at least this many tokens before one of `tokenizer.eos_token_ids`.
        kwargs: sampler, logits_processors, prefill_step_size, prompt_progress_callback, num_draft_tokens.

    Raises:
        ValueError: an mlx-lm argument contradicts `cache`; max_tokens is 0; num_draft_tokens is below 0; `embed` is
            given without `keys` or with drafts; `speculate` or `prediction` is given with an exact cache.
        CacheBusyError: every live slot of the cache is taken.
    """
    if not isinstance(cache, PrefixCache):
        raise ValueError(f"cache is {cache!r:.80}; wanted a PrefixCache.")
    for name in kwargs.keys() & REFUSED.keys():
        if kwargs.pop(name) is not None:
            raise ValueError(f"{name} cannot be used together with cache=: {REFUSED[name]}.")
    if not is_whole(max_tokens) or max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens!r}; wanted 1 or more, or -1 for no limit.")
    if require_count("min_tokens", min_tokens, "tokens", least=0) > max_tokens > 0:
        raise ValueError(f"min_tokens is {min_tokens}; wanted at most max_tokens, {max_tokens}.")
    require_count("num_draft_tokens", kwargs.get("num_draft_tokens", 0), "tokens", least=0)
    if embed is not None and (keys is None or (draft_model, speculate, prediction) != (None,) * 3):
        raise ValueError(
            "embed= needs keys=, as equal tokens may have different embeddings, and no draft_model, speculate= or "
            "prediction=."
        )
    if unknown := kwargs.keys() - OPTIONS:
        raise TypeError(f"stream_generate() got unexpected arguments: {', '.join(sorted(unknown))}.")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    prompt = token_ids(prompt, name="prompt")
    if min_tokens:
        late = LateEnd(tokenizer.eos_token_ids, min_tokens)
        kwargs["logits_processors"] = [*(kwargs.get("logits_processors") or ()), late]
    limit = max_tokens if max_tokens > 0 else None
    if isinstance(prediction, str):
        prediction = predicted_tokens(prediction, tokenizer, None if limit is None else MOST_PREDICTED * limit)
    drafting = cache.drafting(prompt, namespace, speculate=speculate, prediction=prediction, max_tokens=limit)
    reserve = min(max_tokens if max_tokens > 0 else 256, 4096)
    begin = partial(cache.begin, prompt, keys, namespace, marks, reserve, priority, chat=chat)
    tokens_of = partial(_tokens, model, draft_model, stream, max_tokens, embed, drafting, **kwargs)
    return _respond(model, tokenizer, max_tokens, stream, begin, tokens_of, drafting.drafted)


def _respond(
    model: Any,
    tokenizer: Any,
    max_tokens: int,
    stream: Any,
    begin: Callable[[], Session],
    tokens_of: Callable[[Session], Any],
    drafted: Mapping[str, Drafted],
) -> Generator[CachedGenerationResponse, None, None]:
    # A speculative generator removes rejected tokens when it ends, so end it before the session closes.
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
                drafted=drafted,
            )
            if finish is not None:
                return


def _tokens(
    model: Any,
    draft_model: Any,
    stream: Any,
    max_tokens: int,
    embed: Embed | None,
    drafting: Drafting,
    session: Session,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    num_draft_tokens: int = 2,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
) -> Iterator[Token]:
    if draft_model is not None:
        model = BothModels(model, draft_model, len(session.caches))
    with mx.stream(stream):
        if embed is not None:
            model = feed_with(embed, session, model)
        session.prefill(model, prefill_step_size, prompt_progress_callback)
    said = decode(
        session,
        model,
        session.prompt,
        max_tokens,
        sampler=sampler,
        processors=logits_processors or (),
        drafting=drafting,
        draft_tokens=0 if draft_model is None else num_draft_tokens,
        stream=stream,
    )
    for count, token in enumerate(said):
        if count == 0 and prompt_progress_callback is not None:
            prompt_progress_callback(len(session.prompt), len(session.prompt))
        yield token


class LateEnd:
    """A logits processor of one reply: forbids end tokens before `min_tokens` tokens, like vLLM's `min_tokens`."""

    def __init__(self, ends: Collection[int], min_tokens: int) -> None:
        self._ends, self._left = ends, min_tokens

    def __call__(self, _: mx.array, logits: mx.array) -> mx.array:
        """Mask the end tokens in logits (1, V) while the reply has too few tokens."""
        self._left -= 1
        if self._left < 0:
            return logits
        ends = np.isin(np.arange(logits.shape[-1]), [*self._ends])
        return mx.where(mx.array(ends), -mx.inf, logits)


#: `left` of a reply without a limit, in tokens.
NO_LIMIT = 1 << 31
#: A token, its log-probabilities (V,), and whether it was drafted.
Token = tuple[int, mx.array, bool]


@dataclass(eq=False, kw_only=True)
class _SoloReply(Decoding):
    """A reply of at most `most_tokens` tokens (-1: no limit). `said`: tokens that were read but not yielded yet."""

    most_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count = 0
        self.said: list[Token] = []

    @property
    def left(self) -> int:
        return NO_LIMIT if self.most_tokens < 0 else self.most_tokens - self.count

    def take(self) -> bool:
        sampled = self.unread.popleft()
        token, _, _ = sampled.read()
        if token < 0:
            raise ValueError("the sampler returned an id outside the vocabulary.")
        logprobs: Any = sampled.logprobs
        self.said.append((token, logprobs, False))
        self.count += 1
        return self.left > 0


def decode(
    run: Any,
    model: Any,
    prompt: TokenIds,
    max_tokens: int,
    *,
    sampler: Sampler | None = None,
    processors: Sequence[LogitsProcessor] = (),
    drafting: Drafting | None = None,
    draft_tokens: int = 0,
    stream: Any = None,
    dtype: mx.Dtype | None = None,
) -> Iterator[Token]:
    """Yield at most `max_tokens` tokens (-1: no limit) of a reply that is decoded alone.

    The forward pass after a token is dispatched before this token is read. If the caller stops at the token, the pass
    is wasted, but waiting for the caller would slow down every other token. If drafts are likely to be right, the token
    is read first, and one pass checks the drafts after it.

    Args:
        run: a Session, prefilled up to the last token of the prompt; without drafts, any object with `step`, and with
            `owed_tokens` 0.
        prompt: int32 ids: at least the last one, and all ids if there are processors.
        draft_tokens: how many tokens the draft model proposes at a time; 0: there is no draft model.
        stream: MLX's stream for the forward passes; None for the current one.
        dtype: the type of the logits for sampling; None: the model's type.
    """
    if not draft_tokens and (drafting is None or drafting.is_empty):
        drafting = None
    reply = _SoloReply(
        tokens=prompt,
        most_tokens=max_tokens,
        sampler=sampler,
        processors=processors,
        has_logprobs=True,
        drafting=drafting,
        draft_tokens=draft_tokens,
        held_row=run,
    )
    pace, source = DraftPace() if drafting is None else drafting.pace, ""
    loop = DecodeLoop(model, Solo(), pace, dtype=dtype, raises=True, always_asks=True)
    goes_on = True

    def read(replies: Sequence[Any], leave: int = 0) -> Sequence[Any]:
        while len(reply.unread) > leave:
            reply.take()
            if drafting is not None:
                drafting.advance([reply.said[-1][0]])
        return replies

    try:
        while goes_on:
            goes_on, drafts, is_ahead = reply.left > len(reply.unread), Drafts(), False
            with nullcontext() if stream is None else mx.stream(stream):
                if goes_on:
                    drafts = loop.propose([reply], read)
                    is_ahead, first = bool(reply.unread), len(reply.said)
                    loop.run([reply], drafts, _SoloReply.take)
                    reply.said[first:-1] = [(token, logprobs, True) for token, logprobs, _ in reply.said[first:-1]]
                    source = drafts[reply].source if drafts else source
                read([reply], leave=int(goes_on))
            if drafting is not None:
                loop.times.end_round(1, is_plain=is_ahead and not drafts)
            while reply.said:
                yield reply.said.pop(0)
    finally:
        # Accepted draft tokens that the caller did not take are not part of the reply.
        if (unsaid := sum(is_drafted for _, _, is_drafted in reply.said)) and drafting is not None:
            drafting.drafted[source].accepted -= unsaid
            with suppress(SessionClosedError, SnapshotError):
                run.rewind(min(run.position, run.known_tokens - unsaid))
