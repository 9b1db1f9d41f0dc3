"""Random walks of replies that decode together with drafts: what is stored spells what was said, however each ended.

Several requests at a time say given replies. A source, a draft model or both propose right and wrong tokens to each. A
request ends by itself, is cancelled, or fails in its sampler; a pass of all rows fails in a layer of either model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis.stateful import initialize, rule

from radixcache import PrefixCache
from radixcache.groups.batch import LostStateError
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import DraftPace
from runner.engine.generator import ParallelGenerator
from runner.models.tiny import tiny_tokenizer
from tests import inside
from tests.walks.common import NAMESPACES, short, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.drafts import WRONG, Guess, SaidMachine, SamplerError
from tests.walks.spelling import LayerError, SpellingModel, spells

LAYERS = [["kv"], ["kv", "rotating"], ["arrays"], ["kv", "arrays", "rotating"], ["rotating"]]

asked = st.tuples(
    short,
    st.lists(st.integers(0, 3), min_size=1, max_size=20),  # the reply
    st.sets(st.integers(0, 19), max_size=8),  # where the source is wrong
    st.integers(0, 5),  # how many tokens it proposes at most
    st.integers(0, 3),  # how many the draft model proposes
    st.sampled_from(["length", "length", "cancelled", "sampler"]),
    st.integers(0, 12),  # at which token
    st.sampled_from(NAMESPACES),
)


class DraftedRowsMachine(SaidMachine):
    @initialize(
        kinds=st.sampled_from(LAYERS),
        drafting=st.sampled_from([None, *LAYERS]),
        budget=st.sampled_from([3000, 1 << 30]),
        interval=st.integers(2, 8),
    )
    def open(self, kinds: list[str], drafting: list[str] | None, budget: int, interval: int) -> None:
        self.model = SpellingModel(kinds)
        self.draft = None if drafting is None else SpellingModel(drafting)
        self.kinds = [*kinds, *(drafting or [])]
        self.cache = PrefixCache(
            self.model, budget_bytes=budget, checkpoint_interval=interval, step_size=6, caches=self.new_caches
        )
        inside.assume_pace(self.cache, DraftPace(lambda rows, width: 1 + width / 100))
        self.said: dict[str, list[list[int]]] = {name: [] for name in NAMESPACES}

    def new_caches(self) -> list[Any]:
        return [*self.model.make_cache(), *([] if self.draft is None else self.draft.make_cache())]

    @rule(
        requests=st.lists(asked, min_size=1, max_size=4),
        follows=st.booleans(),
        joins=st.integers(0, 20),
        passes=st.sampled_from([None, None, 3, 6, 9, 14]),
        fails_in_draft=st.booleans(),
    )
    def serve(self, requests: list[Any], follows: bool, joins: int, passes: int | None, fails_in_draft: bool) -> None:
        """Serve all; the last one joins later. A pass behind so many raises, of the model or the draft model."""
        tokenizer = tiny_tokenizer()
        failing = self.draft if fails_in_draft and self.draft is not None else self.model
        generator: Any = ParallelGenerator(
            self.cache, self.model, tokenizer, capacity=4096, step_size=6, draft_model=self.draft
        )
        with generator:
            generator._drafting = lambda *_, prediction, **__: Drafting([prediction], self.cache.drafting([0]).pace)
            tickets: list[Any] = []
            prompts: list[list[int]] = []

            def submit(request: Any) -> None:
                prompt, reply, wrong, most, count, way, at, namespace = request
                if follows and self.said[namespace]:
                    prompt = [*self.said[namespace][-1], *prompt]
                prompts.append(prompt)
                tickets.append(
                    generator.submit(
                        prompt,
                        max_tokens=len(reply),
                        stop_tokens=(),
                        namespace=namespace,
                        sampler=saying(reply, at if way == "sampler" else None),
                        prediction=Guess(reply, sorted(wrong), most),
                        num_draft_tokens=count,
                    )
                )

            for request in requests[:-1]:
                submit(request)
            for number in range(200):
                if number == joins or (len(tickets) < len(requests) and all(t.completion for t in tickets)):
                    submit(requests[-1]) if len(tickets) < len(requests) else None
                for ticket, (*_, way, at, _) in zip(tickets, requests, strict=False):
                    if way == "cancelled" and number == at:
                        ticket.cancel()
                if number == 2:
                    failing.passes_left = passes
                generator.round()
                generator.group.check()
                if len(tickets) == len(requests) and all(ticket.completion for ticket in tickets):
                    break
            failing.passes_left = None
        for ticket, prompt, (_, reply, *_, namespace) in zip(tickets, prompts, requests, strict=True):
            done = ticket.completion
            found = [*done.tokens]
            assert found == reply[: len(found)]
            assert done.done_reason in ("length", "error", "cancelled")
            if done.done_reason == "error":
                assert isinstance(done.error, (SamplerError, LayerError, LostStateError)), done.error
            assert done.done_reason != "length" or len(found) == len(reply)
            self.said[namespace].append([*prompt, *reply[: len(found) + 1]])
        for prompt, ticket, (*_, namespace) in zip(prompts, tickets, requests, strict=True):
            self.holds_only_what_was_said(namespace)
            text = [*prompt, *ticket.completion.tokens, WRONG]
            caches, rest = self.cache.fetch(text, namespace)
            spells(caches, text[: len(text) - len(rest)], self.kinds)


def saying(reply: list[int], failing_at: int | None) -> Callable[[mx.array], mx.array]:
    """A sampler that says these tokens, and may raise at one of them."""
    said = iter(enumerate(reply))

    def sample(_: mx.array) -> mx.array:
        at, token = next(said)
        if at == failing_at:
            raise SamplerError
        return mx.array([token])

    return sample


TestDraftedRows = walking(DraftedRowsMachine, examples=12, steps=6)
TestDraftedRowsLonger = pytest.mark.timeout(900)(pytest.mark.slow(walking(DraftedRowsMachine, examples=400, steps=20)))
