"""Random walks of drafted replies: what is stored spells what was said, whatever was proposed and however it ended.

Each request says a given reply, of which a source proposes right and wrong tokens. It ends by itself, is cancelled
after any token, or fails in a layer of the model or in the sampler. Layers are of all kinds, and windows wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixcache import PrefixCache
from radixcache.generate import decode
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import DraftPace, Proposal
from tests import inside
from tests.walks.common import NAMESPACES, short, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.spelling import LayerError, SpellingModel, spells

LAYERS = [
    *(["kv"], ["concatenate", "quantized"], ["kv", "rotating"], ["rotating_keep", "kv"], ["chunked", "kv"]),
    *(["arrays"], ["kv", "arrays", "rotating"], ["list", "unused"], ["pair"], ["layer", "kv"], ["echo", "kv"]),
]
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


class DraftedMachine(SaidMachine):
    @initialize(kinds=st.sampled_from(LAYERS), budget=st.sampled_from([3000, 1 << 30]), interval=st.integers(2, 8))
    def open(self, kinds: list[str], budget: int, interval: int) -> None:
        self.model = SpellingModel(kinds)
        self.cache = PrefixCache(
            self.model,
            budget_bytes=budget,
            checkpoint_interval=interval,
            step_size=6,
            caches=self.model.make_cache,
        )
        self.said: dict[str, list[list[int]]] = {name: [] for name in NAMESPACES}

    @rule(
        prompt=short,
        reply=st.lists(st.integers(0, 3), min_size=1, max_size=30),
        wrong=st.sets(st.integers(0, 29), max_size=8),
        most=st.integers(1, 6),
        stop=st.integers(1, 30),
        failing=st.sampled_from(["", "", "layer", "sampler"]),
        at=st.integers(0, 12),
        namespace=st.sampled_from(NAMESPACES),
        follows=st.booleans(),
    )
    def serve(
        self,
        prompt: list[int],
        reply: list[int],
        wrong: set[int],
        most: int,
        stop: int,
        failing: str,
        at: int,
        namespace: str,
        follows: bool,
    ) -> None:
        if follows and self.said[namespace]:
            prompt = [*self.said[namespace][-1], *prompt]
        chosen: list[int] = []
        text = [*prompt, *reply]

        def expected(history: mx.array, logits: mx.array) -> mx.array:
            assert history.tolist() == text[: len(prompt) + len(chosen)]
            return logits

        def choose(_: mx.array) -> mx.array:
            if failing == "sampler" and len(chosen) == at:
                raise SamplerError
            chosen.append(reply[len(chosen)])
            return mx.array(chosen[-1:])

        drafts = Drafting([Guess(reply, sorted(wrong), most)], DraftPace(lambda rows, width: 1 + width / 100))
        found: list[int] = []
        try:
            with self.cache.begin(prompt, namespace=namespace) as session:
                spells(session.caches, prompt[: session.cached_tokens], self.model.kinds)
                session.prefill(self.model)
                more: dict[str, Any] = {"sampler": choose, "processors": [expected], "drafting": drafts}
                stream = decode(session, self.model, session.prompt, len(reply), **more)
                for token, _, _ in stream:
                    found.append(token)
                    if failing == "layer" and len(found) > at:
                        self.model.fail_in_layer = 0 if at % 2 else len(self.model.kinds) - 1
                    if len(found) == stop:
                        break
                stream.close()  # type: ignore[attr-defined]
        except (SamplerError, LayerError):
            pass
        finally:
            self.model.fail_in_layer = None
        assert found == reply[: len(found)]
        drafts.check()
        self.said[namespace].append([*prompt, *reply[: len(found) + 1]])
        self.holds_only_what_was_said(namespace)
        caches, rest = self.cache.fetch([*prompt, *found, WRONG], namespace)
        spells(caches, [*prompt, *found, WRONG][: len(prompt) + len(found) + 1 - len(rest)], self.model.kinds)


TestDrafted = walking(DraftedMachine, examples=25)
TestDraftedLonger = pytest.mark.slow(walking(DraftedMachine, examples=600, steps=30))
