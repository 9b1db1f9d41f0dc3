"""stream_generate: mlx_lm.stream_generate with a PrefixCache: the same arguments, the same responses.

The stored beginning of a prompt is restored instead of prefilled, and a request's state is stored for the next one.
Decoding dispatches the forward pass of a token before it returns the token, so a stop token is stored too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from radixcache.chat_parts import Chat
from radixcache.layers.trials import BothModels
from radixcache.prefix_cache import PrefixCache
from radixcache.sessions.session import Session
from radixcache.settings import is_whole, require_count
from radixcache.speculate.drafting import MOST_PREDICTED, Drafted, Drafting, predicted_tokens
from radixcache.speculate.pace import MODEL, MOST_PROPOSED, Proposal
from radixcache.speculate.suffix_index import TAIL_TOKENS
from radixcache.tokens import token_ids

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
#: With more tokens to evaluate again, nothing is drafted; a draft model finds all of them in the tail.
MOST_OWED = TAIL_TOKENS

Token = tuple[int, mx.array, bool]
#: From a forward pass's tokens and logits (1, T, V): the next token (1,) and log-probabilities (1, V), both pending.
Choose = Callable[[Any, mx.array], tuple[mx.array, mx.array]]


@dataclass
class CachedGenerationResponse(GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response, how many prompt tokens were restored, and by source what became of the drafted tokens."""

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
    embed: Callable[[int], mx.array] | None = None,
    chat: Chat | None = None,
    speculate: Literal["tree", "prompt"] | None = None,
    prediction: str | Sequence[int] | NDArray[Any] | None = None,
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
            gets as `input_embeddings` beside the tokens; also with 0 if the request is verified. `keys` must differ
            where embeddings do.
        chat: as in PrefixCache.begin().
        speculate: as in PrefixCache.drafting(): "tree" or "prompt". The tokens are those of a reply without drafts, and
            with a seed the same are drawn; up to rounding, as passes over several tokens add up in another order.
        prediction: what the reply will be, as text or token ids, as far as the caller can tell. At most twice
            `max_tokens` tokens of it are used.
        kwargs: sampler, logits_processors, prefill_step_size, prompt_progress_callback, num_draft_tokens.

    Raises:
        ValueError: an argument of mlx-lm that contradicts `cache`, max_tokens is 0, num_draft_tokens is below 0, or
            `embed` without `keys` or with drafts; `speculate` or `prediction` with an exact cache.
        CacheBusyError: every live slot of the cache is taken.
    """
    if not isinstance(cache, PrefixCache):
        raise ValueError(f"cache is {cache!r:.80}; wanted a PrefixCache.")
    for name in kwargs.keys() & REFUSED.keys():
        if kwargs.pop(name) is not None:
            raise ValueError(f"{name} cannot be used together with cache=: {REFUSED[name]}.")
    if not is_whole(max_tokens) or max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens!r}; wanted 1 or more, or -1 for no limit.")
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
    tokens_of: Callable[[Session], Generator[Token, None, None]],
    drafted: Mapping[str, Drafted],
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
                drafted=drafted,
            )
            if finish is not None:
                return


def _tokens(
    model: Any,
    draft_model: Any,
    stream: Any,
    max_tokens: int,
    embed: Callable[[int], mx.array] | None,
    drafting: Drafting,
    session: Session,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    num_draft_tokens: int = 2,
    **sampling: Any,
) -> Generator[Token, None, None]:
    if draft_model is not None:
        model = BothModels(model, draft_model, len(session.caches))
        if num_draft_tokens:
            drafting.model = DraftModel(session, model, num_draft_tokens, stream)
    with mx.stream(stream):
        if embed is not None:
            model = _fed_with(embed, session, model)
        session.prefill(model, step_size=prefill_step_size, on_progress=prompt_progress_callback)
    choose, last = _chooser(session.prompt, **sampling), session.prompt[-1:]
    drafts = None if drafting.is_empty else drafting
    tokens = decode(session, model, last, choose, max_tokens=max_tokens, stream=stream, drafting=drafts)
    for count, token in enumerate(tokens):
        if count == 0 and prompt_progress_callback is not None:
            prompt_progress_callback(len(session.prompt), len(session.prompt))
        yield token


def _fed_with(embed: Callable[[int], mx.array], session: Session, model: Any) -> Callable[..., Any]:
    """The model, called with the embeddings of a session's prompt, and behind it as usual.

    A cold run that verifies the session, and a session that starts over, begin at offset 0.
    """
    first, rows = session.position, embed(session.position)
    others, others_position = None, 0

    def fed(tokens: mx.array, cache: list[Any]) -> Any:
        nonlocal first, rows, others, others_position
        count = tokens.shape[1]
        if cache is session.caches:
            position = session.position
        else:
            position = others_position if cache is others else 0
            others, others_position = cache, position + count
        if position >= len(session.prompt):
            return model(tokens, cache=cache)
        if position < first:
            first, rows = position, embed(position)
        return model(tokens, cache=cache, input_embeddings=rows[None, position - first : position - first + count])

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
    run: Any,
    model: Any,
    last: Any,
    choose: Choose,
    *,
    max_tokens: int,
    stream: Any = None,
    drafting: Drafting | None = None,
) -> Iterator[Token]:
    """Yield at most `max_tokens` tokens (-1: no limit), with log-probabilities (V,), and whether each was drafted.

    The forward pass that follows a token is dispatched before that token is read. If the caller stops at a token, that
    pass is wasted; waiting for the decision would slow down every other token. Where drafted tokens are likely, the
    token is read first, and one pass checks what is proposed behind it.

    Args:
        run: has `step`, as a Session, and is prefilled up to the prompt's last token: `last`, (1,).
        stream: MLX's stream for the forward passes; None for the current one.
        drafting: what is proposed; `run` is a Session then.
    """
    if drafting is None:
        decoding = _Decoding(run, model, last, choose, max_tokens, stream)
    else:
        decoding = _Drafted(run, model, last, choose, max_tokens, stream, drafting)
    for count, token in enumerate(decoding.tokens(), start=1):
        yield token
        if count % RELEASE_INTERVAL_TOKENS == 0:
            mx.clear_cache()


def check(tokens: Sequence[int], logits: mx.array, choose: Choose) -> list[tuple[int, mx.array]]:
    """Choose what is said behind each of some tokens, of which all but the first are drafted, until a draft is wrong.

    `choose` is called for one position after the other, and for none behind a wrong draft: samplers, processors and
    grammars find what they would find without drafts, and as many random numbers are drawn.

    Args:
        tokens: T token ids: a known one, then the drafted ones.
        logits: (1, T, V), those behind each.
        choose: called with a list of one of the tokens, and the logits (1, 1, V) behind it.

    Returns:
        1 to T tokens with log-probabilities (V,). All but the last are drafted tokens.
    """
    said: list[tuple[int, mx.array]] = []
    for at in range(len(tokens)):
        sampled, logprobs = choose([tokens[at]], logits[:, at : at + 1])
        said.append((int(sampled.item()), logprobs.squeeze(0)))  # type: ignore[arg-type]
        if said[-1][0] not in tokens[at + 1 : at + 2]:
            break
    return said


class _Decoding:
    """A reply as it grows. `owed`: the tokens, known or pending, that the next pass evaluates."""

    def __init__(self, run: Any, model: Any, last: Any, choose: Choose, max_tokens: int, stream: Any) -> None:
        self._run, self._model, self._choose, self._stream = run, model, choose, stream
        self._left = max_tokens
        self._owed = last

    def tokens(self) -> Iterator[Token]:
        yield from self._ahead()

    def _ahead(self) -> Iterator[Token]:
        """Dispatch each pass before the token in front of it is read, until `_waits`."""
        following = self._forward(self._owed)
        goes_on = True
        while goes_on:
            self._left -= 1
            sampled, logprobs = following
            goes_on = self._left != 0 and not self._waits()
            if goes_on:
                following = self._forward(sampled)
            token = int(sampled.item())  # type: ignore[arg-type]
            self._note(token, is_known=goes_on)
            yield token, logprobs, False

    def _forward(self, tokens: Any) -> tuple[mx.array, mx.array]:
        last = tokens[-1:] if isinstance(tokens, list) else tokens
        with self._streaming():
            sampled, logprobs = self._choose(last, self._run.step(self._model, tokens))
            mx.async_eval(sampled, logprobs)
        return sampled, logprobs.squeeze(0)

    def _streaming(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else mx.stream(self._stream)

    def _waits(self) -> bool:
        """Whether the pending token must be read before the next pass is dispatched."""
        return False

    def _note(self, token: int, *, is_known: bool) -> None:
        """A token was read; `is_known`: the pass that follows it was dispatched."""


class _Drafted(_Decoding):
    """A Session's reply, of which several tokens at a time are checked.

    The session knows the tokens that were said, and no others, whenever the caller has the word. Where layers cannot
    take back the rejected tokens alone, the accepted ones are `owed` again.
    """

    def __init__(
        self, run: Session, model: Any, last: Any, choose: Choose, max_tokens: int, stream: Any, drafting: Drafting
    ) -> None:
        super().__init__(run, model, [int(each) for each in last], choose, max_tokens, stream)
        self._drafting = drafting
        self._unsaid: list[int] = []  # tokens of plain passes that `drafting` was not told of
        self._read_s = time.perf_counter()

    def tokens(self) -> Iterator[Token]:
        while self._left != 0:
            proposal = self._drafting.propose(self._most()) if len(self._owed) <= MOST_OWED else None
            yield from self._ahead() if proposal is None else self._checked(proposal)

    def _most(self) -> int:
        """How many tokens may be proposed: the pass says one more."""
        return min(self._left - 1, MOST_PROPOSED) if self._left > 0 else MOST_PROPOSED

    def _waits(self) -> bool:
        if self._drafting.model is None and self._drafting.rests(len(self._unsaid)):
            return False
        self._tell()
        return self._drafting.is_likely(self._most())

    def _note(self, token: int, *, is_known: bool) -> None:
        self._unsaid.append(token)
        if len(self._owed) > 1:
            self._tell(len(self._owed))
        self._owed = [token]
        if not is_known:
            self._tell()
            self._run.extend([token])

    def _tell(self, tokens_in_pass: int = 1) -> None:
        """Tell `drafting` what passes over so many tokens said, each pass a token."""
        if self._unsaid:
            self._note_time(tokens_in_pass, len(self._unsaid))
            self._drafting.said(self._unsaid)
            self._unsaid = []

    def _checked(self, proposal: Proposal) -> Iterator[Token]:
        """Say the drafted tokens that are right, and the one behind them."""
        run, owed, draft = self._run, self._owed, proposal.tokens
        start, tokens = run.position, [*owed, *draft]
        with self._streaming():
            logits = run.step(self._model, tokens, drafted=len(draft))
            said = check(tokens[len(owed) - 1 :], logits[:, len(owed) - 1 :], self._choose)
        self._note_time(len(tokens))
        self._drafting.said([token for token, _ in said], len(said) - 1, given=0)
        self._left -= len(said)
        for token, logprobs in said[:-1]:
            run.extend([token])
            self._drafting.drafted[proposal.source].accepted += 1
            yield token, logprobs, True
        text = [*owed, *(token for token, _ in said)]
        with self._streaming():
            reached = run.rewind(start + len(text) - 1, least=start)
        run.extend(text[run.known_tokens - start :])
        self._owed = text[reached - start :]
        yield *said[-1], False

    def _note_time(self, tokens_in_pass: int, passes: int = 1) -> None:
        """Note the time of the last passes, with what the caller did: a pass over several tokens waits for that."""
        before, self._read_s = self._read_s, time.perf_counter()
        self._drafting.pace.note(tokens_in_pass, (self._read_s - before) / passes)


class DraftModel:
    """A smaller model as a source of drafts: what it would say itself, on the session's caches behind the model's.

    Each checked pass runs over the caches of both, so all layers stand at one offset. What the draft model runs ahead
    is a scratch.
    """

    name = MODEL

    def __init__(self, session: Session, both: BothModels, count: int, stream: Any) -> None:
        """`count`: tokens that it proposes at a time."""
        self._session, self._both, self._count, self._stream = session, both, count, stream

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        session, both = self._session, self._both
        tokens = mx.array([[*tail[session.position - session.known_tokens :]]])
        with mx.stream(self._stream), session.scratch(both.first) as caches:
            count = min(limit, self._count)
            (said,), (chances,) = both.drafted(tokens, count, lambda ids: both.draft_model(ids, cache=caches))
        return Proposal(tuple(said), tuple(chances), self.name)

    def extend(self, tokens: Sequence[int]) -> None:
        """Nothing: the session has them."""
