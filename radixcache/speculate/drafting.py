"""Drafting: propose tokens for one request from several sources, and count the accepted ones. Never imports MLX.

A Source proposes tokens that may come next. Drafting asks all sources and takes the proposal with the highest expected
number of accepted tokens. DraftPace says how many of its tokens are worth checking:

    drafting = Drafting([TreeSource(index, namespace), PromptSource(prompt)], pace)
    proposal = drafting.propose(limit)          # at most `limit` tokens, or None
    ...                                         # one forward pass over the last token and the proposed ones
    drafting.advance(tokens, accepted)          # the tokens from the pass: the accepted ones and one more

For replies that decode together, DecodeLoop asks each Drafting for a `candidate`, asks DraftPace once for all counts,
and calls `choose` of each Drafting.

A look asks all sources, and takes time. After `IDLE_TOKENS` tokens of a reply without a draft, or `IDLE_LOOKS` looks of
all replies, looks may take `LOOK_SHARE` of the measured time of passes. With a slow model, there is a look at each
token. With a tiny model, there are few looks, and none in some short replies. After a look that finds something, the
pending token is read, and the next look comes at once: a draft must follow that token.

Invariants, asserted by `check`:

  D1  For each source, 0 <= accepted <= proposed, and passes <= proposed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from radixcache.settings import Settings, require_count
from radixcache.speculate.pace import LOOK_SHARE, MOST_PROPOSED, NOTHING, DraftPace, Proposal
from radixcache.speculate.suffix_index import LENGTHS, TAIL_TOKENS, TOKEN_BYTES, SuffixIndex
from radixcache.tokens import token_ids

#: The chance of each predicted token while the reply follows the prediction.
FOLLOWS = 0.8
#: After this many tokens or looks without a draft, looks are rare.
IDLE_TOKENS, IDLE_LOOKS = 16, 32
#: Most tokens from one look to the next.
MOST_STRIDE = 32
#: A reply is indexed in batches of this many tokens. PromptSource indexes at once if the last tokens recur.
FED_TOKENS = 256
#: Tokens that one look of a source indexes, or one pass for TreeSource, in about 2 ms.
LOOK_TOKENS = 2048
#: How many tokens of a prediction are used per token of `max_tokens`: a reply may leave out half of them.
MOST_PREDICTED = 2
#: Characters of a predicted text that are tokenized at a time.
PIECE_CHARACTERS = 1 << 16
#: Length of the shortest suffix that a look searches, and bytes of a token that waits to be indexed.
LEAST_FOUND, ID_BYTES = LENGTHS[-1], array("i").itemsize


class Source(Protocol):
    """Where proposals come from."""

    name: str

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        """Return at most `limit` tokens that may follow `tail`, the last tokens (TAIL_TOKENS or more, or all)."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the reply got since the last call."""


class TreeSource:
    """Proposes from the index of the namespace; DraftIndex.source() makes one."""

    name = "tree"

    def __init__(
        self, index: SuffixIndex, namespace: str = "", lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._index, self._namespace, self._lock = index, namespace, nullcontext() if lock is None else lock

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        with self._lock:
            return self._index.propose(tail, limit, self._namespace)

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing: the session or row of the reply adds the tokens to the index."""


class PromptSource:
    """Proposes from the request's own prompt and reply. Has room for `reply_tokens`, then drops the oldest.

    Each look indexes `LOOK_TOKENS` of the prompt, so no token waits until all of a long prompt is indexed. The reply is
    indexed in batches of `FED_TOKENS`, or as soon as a look needs the reply's last tokens.
    """

    name = "prompt"

    def __init__(self, prompt: Any, reply_tokens: int = 4096) -> None:
        self._index = SuffixIndex((len(prompt) + reply_tokens) * 2 * TOKEN_BYTES)
        self._prompt, self._indexed_tokens = np.asarray(prompt), 0
        #: Bytes of the last indexed token ids, then of those that are not indexed yet.
        self._recent = bytearray(_raw(prompt[-LEAST_FOUND:]))
        self._indexed_bytes = len(self._recent)

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        self._indexed_tokens = _index_more(self._index, self._prompt, self._indexed_tokens)
        found = self._index.propose(tail, limit)
        if self._indexed_tokens == len(self._prompt) and (waiting := self._recent[self._indexed_bytes :]):
            # Needed: the last tokens occur earlier among the waiting ones, or the draft may continue there.
            is_needed = found.tokens or self._recent.find(_raw(tail[-LEAST_FOUND:]), 0, -ID_BYTES) >= 0
            if is_needed or len(waiting) >= FED_TOKENS * ID_BYTES:
                self._index.extend(array("i", waiting))
                del self._recent[: -LEAST_FOUND * ID_BYTES]
                self._indexed_bytes = len(self._recent)
                found = self._index.propose(tail, limit)
        return found._replace(source=self.name) if found.tokens else NOTHING

    def extend(self, tokens: Sequence[int]) -> None:
        self._recent += _raw(tokens)


class PredictionSource:
    """The reply that a client expects (OpenAI's `prediction`).

    The reply is compared with the prediction from the start. Once they differ, the reply's last tokens are looked up in
    an index of the prediction. A look indexes `LOOK_TOKENS`, so a short reply never waits for a long prediction.
    """

    name = "prediction"

    def __init__(self, tokens: Any) -> None:
        self._tokens, self._indexed_tokens = np.asarray(tokens, np.int32), 0
        self._index = SuffixIndex(max(64, len(self._tokens)) * 2 * TOKEN_BYTES)
        self._at: int | None = 0  # the next position in the prediction; None: the reply differs from it

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        self._indexed_tokens = _index_more(self._index, self._tokens, self._indexed_tokens)
        if self._at is None:
            return self._index.propose(tail, limit)._replace(source=self.name)
        tokens = tuple(self._tokens[self._at : self._at + limit].tolist())
        return Proposal(tokens, (FOLLOWS,) * len(tokens), self.name, min(self._at, TAIL_TOKENS))

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._at is not None:
                follows = self._at < len(self._tokens) and self._tokens[self._at] == token
                self._at = self._at + 1 if follows else None


def predicted_tokens(text: str, tokenizer: Any, most_tokens: int | None) -> list[int]:
    """Return the first `most_tokens` tokens of a predicted text (None: all). Tokenizes no piece after these.

    Where two pieces meet, tokens may differ from the tokens of the whole text.
    """
    tokens: list[int] = []
    for start in range(0, len(text), PIECE_CHARACTERS):
        tokens += tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)
        if most_tokens is not None and len(tokens) >= most_tokens:
            return tokens[:most_tokens]
    return tokens


def _index_more(index: SuffixIndex, tokens: NDArray[Any], indexed_tokens: int) -> int:
    """Index the next LOOK_TOKENS tokens; return how many are indexed."""
    end = min(indexed_tokens + LOOK_TOKENS, len(tokens))
    if end > indexed_tokens:
        index.add(tokens[:end], context=indexed_tokens)
    return end


@dataclass
class Drafted:
    """What became of a source's proposals.

    Attributes:
        proposed: tokens that were checked.
        accepted: tokens that were accepted; each saved a forward pass over one token.
        passes: forward passes that checked any of these tokens.
    """

    proposed: int = 0
    accepted: int = 0
    passes: int = 0


class Drafting:
    """Proposes tokens for one request.

    Args:
        sources: asked in this order; the first of equally good proposals wins.
        pace: decides how many tokens to check.
        known: the prompt's last tokens, or all of it; `advance` adds the reply.

    Attributes:
        drafted: counts by source.
    """

    def __init__(self, sources: Sequence[Source], pace: DraftPace, known: Sequence[int] = ()) -> None:
        self.pace = pace
        self.drafted: dict[str, Drafted] = {}
        self._sources = list(sources)
        self._tail = [int(each) for each in known[-TAIL_TOKENS:]]
        self._proposal = NOTHING
        self._unread: list[int] = []  # reply tokens that the sources do not have yet
        self._idle_tokens = 0  # reply tokens since the last draft
        self._look_at = 0  # the value of _idle_tokens at the next look
        self._has_found = False  # whether the last look found something, and the one before did not

    @property
    def is_empty(self) -> bool:
        """Whether there is no source, so that nothing is ever proposed."""
        return not self._sources

    def candidate(self, limit: int = MOST_PROPOSED, rows: int = 1) -> Proposal:
        """The best proposal of at most `limit` tokens, with corrected chances; NOTHING if there is none.

        `rows`: how many rows the pass has; each row takes its own look.
        """
        best, most = NOTHING, 0.0
        if self.rests():
            return best
        is_idle = self._idle_tokens >= IDLE_TOKENS or self.pace.idle_looks >= IDLE_LOOKS
        stride = self._stride(rows) if is_idle else 1
        if is_idle and self.pace.look_s < 0:
            self._look_at = self._idle_tokens + stride
            return best
        began_s = perf_counter()
        self._catch_up()
        for source in self._sources:
            if (proposal := source.propose(self._tail, limit)).tokens:
                proposal = self.pace.corrected(proposal)
                if (expected := proposal.expected()) > most:
                    best, most = proposal, expected
        self.pace.idle_looks += 1
        self._has_found = bool(best.tokens) and not self._has_found
        self._look_at = self._idle_tokens + (1 if self._has_found else stride)
        if is_idle:
            self.pace.looked(perf_counter() - began_s)
        return best

    def choose(self, proposal: Proposal, count: int) -> Proposal | None:
        """Let the next pass check the first `count` tokens of a candidate. Returns these; None if `count` is 0."""
        self._proposal = proposal.first(count) if count else NOTHING
        return self._proposal if count else None

    def propose(self, limit: int = MOST_PROPOSED) -> Proposal | None:
        """At most `limit` tokens that the next pass over this request alone should check; None: no tokens."""
        proposal = self.candidate(limit)
        return self.choose(proposal, self.pace.length([proposal])[0]) if proposal.tokens else None

    def rests(self) -> bool:
        """Whether the next look is not due yet."""
        return self._idle_tokens < self._look_at

    def _stride(self, rows: int) -> int:
        """Tokens from one look to the next, in passes of `rows` rows, while nothing is drafted."""
        return min(math.ceil(rows * self.pace.usual_look_s / (LOOK_SHARE * self.pace.seconds(1, rows))), MOST_STRIDE)

    def advance(self, tokens: Sequence[int], accepted: int = 0) -> None:
        """Add tokens to the reply. The first `accepted` of them are accepted tokens of the last proposal."""
        proposal, self._proposal = self._proposal, NOTHING
        if not proposal.tokens:
            self._idle_tokens += len(tokens)
        else:
            self._idle_tokens = self._look_at = self.pace.idle_looks = 0
            self.pace.note_accepted(proposal, accepted)
            drafted = self.drafted.setdefault(proposal.source, Drafted())
            drafted.proposed += len(proposal.tokens)
            drafted.accepted += accepted
            drafted.passes += 1
        self._unread += tokens

    def _catch_up(self) -> None:
        """Give the sources the tokens of the reply since the last look."""
        if fresh := self._unread:
            self._unread, self._tail = [], [*self._tail, *fresh][-TAIL_TOKENS:]
            for source in self._sources:
                source.extend(fresh)

    def check(self) -> None:
        """Assert D1, and the invariants of the pace."""
        self.pace.check()
        for name, drafted in self.drafted.items():
            assert 0 <= drafted.accepted <= drafted.proposed, (name, drafted)
            assert drafted.passes <= drafted.proposed, (name, drafted)


def _raw(tokens: Any) -> bytes:
    return array("i", tokens).tobytes()


def drafting_of(
    prompt: Any,
    tree_source: Callable[[], Source],
    pace: DraftPace,
    settings: Settings,
    speculate: str | None,
    prediction: Any,
    max_tokens: int | None,
) -> Drafting:
    """The sources of a request in the order in which they are asked; arguments as in PrefixCache.drafting."""
    if speculate not in ("tree", "prompt", None):
        raise ValueError(f'speculate is {speculate!r:.80}; wanted "tree", "prompt" or None.')
    if settings.exact and (speculate is not None or prediction is not None):
        name = "prediction" if speculate is None else "speculate"
        raise ValueError(f"{name} with an exact cache: passes over several tokens round differently.")
    most = None if max_tokens is None else MOST_PREDICTED * require_count("max_tokens", max_tokens, "tokens")
    sources: list[Source] = []
    if prediction is not None and np.asarray(prediction, dtype=object).size:
        sources.append(PredictionSource(token_ids(prediction, settings.vocab_size, "prediction")[:most]))
    if speculate == "tree":
        sources.append(tree_source())
    if speculate is not None:
        sources.append(PromptSource(prompt))
    return Drafting(sources, pace, prompt)
