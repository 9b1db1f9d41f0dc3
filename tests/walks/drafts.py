"""What the walks of drafted replies share: a source that guesses, and what was said in each namespace."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixcache import PrefixCache
from radixcache.speculate.pace import Proposal
from tests import inside

WRONG = 7  # a token that no reply has


class SamplerError(ValueError):
    pass


class Guess:
    """Proposes the reply, with a wrong token wherever `wrong` says so; a request says how many tokens at most."""

    name = "guess"

    def __init__(self, reply: Sequence[int], wrong: Sequence[int], most: int) -> None:
        self._guess = [WRONG if at in wrong else token for at, token in enumerate(reply)]
        self._most, self._at = most, 0

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        found = tuple(self._guess[self._at : self._at + min(limit, self._most)])
        return Proposal(found, (0.9,) * len(found), self.name)

    def extend(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)


class SaidMachine(RuleBasedStateMachine):
    """Has a cache, and what was said in each namespace."""

    cache: PrefixCache
    said: dict[str, list[list[int]]]

    @rule(share=st.integers(0, 3))
    def evict(self, share: int) -> None:
        self.cache.reclaim(self.cache.stats.paged_bytes * share // 4)

    def holds_only_what_was_said(self, namespace: str) -> None:
        for node in inside.nodes(self.cache, namespace):
            prefix = node.prefix().tolist()
            assert any(said[: len(prefix)] == prefix for said in self.said[namespace]), prefix

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
