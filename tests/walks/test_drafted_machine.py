"""Random walks of drafted replies: what is stored spells what was said, whatever was proposed and however it ended.

Each request says a given reply, of which a source proposes right and wrong tokens. It ends by itself, is cancelled
after any token, or fails in a layer of the model or in the sampler. Layers are of all kinds, and windows wrap.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis.stateful import initialize, rule

from radixcache import PrefixCache
from radixcache.generate import decode
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import DraftPace
from tests.walks.common import NAMESPACES, short, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.drafts import WRONG, Guess, SaidMachine, SamplerError
from tests.walks.spelling import LayerError, SpellingModel, spells

LAYERS = [
    *(["kv"], ["concatenate", "quantized"], ["kv", "rotating"], ["rotating_keep", "kv"], ["chunked", "kv"]),
    *(["arrays"], ["kv", "arrays", "rotating"], ["list", "unused"], ["pair"], ["layer", "kv"], ["echo", "kv"]),
]


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
