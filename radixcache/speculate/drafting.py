"""Drafting: what is proposed to one request, from several sources, and what became of it. Never imports MLX.

A Source proposes tokens that may come next. Drafting asks all sources, takes the proposal with the most expected
tokens, and lets DraftPace say how many of these are worth checking:

    drafting = Drafting([TreeSource(index, namespace), PromptSource(prompt)], pace)
    proposal = drafting.propose(limit)          # at most `limit` tokens, or None
    ...                                         # one forward pass over the last token and the proposed ones
    drafting.advance(tokens, accepted)          # what the pass yielded: the accepted ones and one more

For replies that decode together, DecodeLoop asks each Drafting for a `candidate`, asks DraftPace once for all counts,
and calls `choose` of each Drafting.

A look for drafts takes time. After `IDLE_TOKENS` tokens of a reply without a draft, or `IDLE_LOOKS` looks of all
replies, looks may take `LOOK_SHARE` of the measured time of passes. With a slow model that is a look at each token.
With a tiny model it is a look at few tokens, and some short replies get none. A look that finds something is followed
by another one at the next token, because a draft is proposed behind the next token.

Invariants, asserted by `check`:

  D1  Of each source, 0 <= accepted <= proposed, and passes <= proposed.
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
#: After so many tokens or looks without a draft, looks are rare.
IDLE_TOKENS, IDLE_LOOKS = 16, 32
#: Most tokens from one look to the next.
MOST_STRIDE = 32
#: A reply is indexed in batches of so many tokens; by PromptSource also if its last tokens come again.
FED_TOKENS = 256
#: Tokens that are indexed at a time, in about 2 ms: by a look of a source, or by a pass for TreeSource.
LOOK_TOKENS = 2048
#: Tokens of a prediction that are used for each token that the reply may have: a reply may leave out half of it.
MOST_PREDICTED = 2
#: Characters of a predicted text that are tokenized at a time.
PIECE_CHARACTERS = 1 << 16
#: Tokens that are found again at least, and the bytes of a token as it waits to be indexed.
LEAST_FOUND, ID_BYTES = LENGTHS[-1], array("i").itemsize


class Source(Protocol):
    """Where proposals come from."""

    name: str

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        """At most `limit` tokens that are expected behind these last tokens (at least TAIL_TOKENS, if there are)."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The request's reply went on with these tokens since the last call."""


class TreeSource:
    """What the index has of the namespace; DraftIndex.source() makes one."""

    name = "tree"

    def __init__(
        self, index: SuffixIndex, namespace: str = "", lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._index, self._namespace, self._lock = index, namespace, nullcontext() if lock is None else lock

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        with self._lock:
            return self._index.propose(tail, limit, self._namespace)

    def extend(self, tokens: Sequence[int]) -> None:
        """Nothing: the session or row of the reply adds it to the index."""


class PromptSource:
    """The request's own prompt and reply: quoted text, repeated calls. Room for `reply_tokens`; then the oldest go.

    Each look indexes `LOOK_TOKENS` of the prompt, so no token waits for the whole of a long prompt. The reply is
    indexed in batches of `FED_TOKENS`, or as soon as a look needs its last tokens.
    """

    name = "prompt"

    def __init__(self, prompt: Any, reply_tokens: int = 4096) -> None:
        self._index = SuffixIndex((len(prompt) + reply_tokens) * 2 * TOKEN_BYTES)
        self._prompt, self._indexed_tokens = np.asarray(prompt), 0
        #: Token ids that are not indexed yet, behind the last ones that are.
        self._recent = bytearray(_raw(prompt[-LEAST_FOUND:]))
        self._indexed_bytes = len(self._recent)

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        self._indexed_tokens = _index_more(self._index, self._prompt, self._indexed_tokens)
        found = self._index.propose(tail, limit)
        if self._indexed_tokens == len(self._prompt) and (waiting := self._recent[self._indexed_bytes :]):
            # The last tokens stand among those that are not indexed, or a draft may go on there.
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

    The reply is compared with it from the start. Once they differ, the last tokens of the reply are looked up in an
    index of the prediction. Each look indexes `LOOK_TOKENS` of it, so a short reply never waits for a long prediction.
    """

    name = "prediction"

    def __init__(self, tokens: Any) -> None:
        self._tokens, self._indexed_tokens = np.asarray(tokens, np.int32), 0
        self._index = SuffixIndex(max(64, len(self._tokens)) * 2 * TOKEN_BYTES)
        self._at: int | None = 0  # where the reply goes on in the prediction, as far as it has followed

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
    """Return the first tokens of a predicted text; None: all. At most one piece more than needed is tokenized.

    Where two pieces meet, a token may differ from those of the whole text.
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
        passes: forward passes that checked some.
    """

    proposed: int = 0
    accepted: int = 0
    passes: int = 0


class Drafting:
    """What is proposed to one request.

    Args:
        sources: asked in this order; of equal proposals the first wins.
        pace: says how many tokens to propose.
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
        self._unread: list[int] = []  # of the reply, not given to the sources yet
        self._idle_tokens = 0  # of the reply since the last draft
        self._look_at = 0  # how many of these come before the next look
        self._has_found = False  # whether the last look found something, and the one before did not

    @property
    def is_empty(self) -> bool:
        """Whether nothing is ever proposed."""
        return not self._sources

    def candidate(self, limit: int = MOST_PROPOSED, rows: int = 1) -> Proposal:
        """The best proposal of at most `limit` tokens, with corrected chances; of no tokens if there is none.

        `rows`: of the pass, each of which is looked at.
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
        """Take the first `count` tokens of a candidate as what the next pass checks; None: nothing."""
        self._proposal = proposal.first(count) if count else NOTHING
        return self._proposal if count else None

    def propose(self, limit: int = MOST_PROPOSED) -> Proposal | None:
        """What the next pass over this request alone should check, at most `limit` tokens; None: nothing."""
        proposal = self.candidate(limit)
        return self.choose(proposal, self.pace.length([proposal])[0]) if proposal.tokens else None

    def rests(self) -> bool:
        """Whether no source is asked now."""
        return self._idle_tokens < self._look_at

    def _stride(self, rows: int) -> int:
        """Tokens from one look to the next, in passes of so many rows, as long as nothing is drafted."""
        return min(math.ceil(rows * self.pace.usual_look_s / (LOOK_SHARE * self.pace.seconds(1, rows))), MOST_STRIDE)

    def advance(self, tokens: Sequence[int], accepted: int = 0) -> None:
        """The reply went on with these tokens, of which the first `accepted` were those that were proposed last."""
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
        raise ValueError(f"{name} with an exact cache: passes over several tokens have other bits.")
    most = None if max_tokens is None else MOST_PREDICTED * require_count("max_tokens", max_tokens, "tokens")
    sources: list[Source] = []
    if prediction is not None and np.asarray(prediction, dtype=object).size:
        sources.append(PredictionSource(token_ids(prediction, settings.vocab_size, "prediction")[:most]))
    if speculate == "tree":
        sources.append(tree_source())
    if speculate is not None:
        sources.append(PromptSource(prompt))
    return Drafting(sources, pace, prompt)
