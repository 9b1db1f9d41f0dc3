"""Random walks with everything on: verification with faults, exact mode, explain, events, named pins, warm, slots.

Besides what the walks of test_verify_machine.py hold to: explain() says what begin() then does, quarantined or not,
and changes nothing; events add up to the tree; pins keep what they say, unless its state was found wrong; whatever
breaks off gives the second state back.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from radixcache import Event, PrefixCache, Reason
from tests import inside
from tests.tree.test_tree_machine import common
from tests.walks.common import NAMESPACES, Told, quietly, short
from tests.walks.common import small_steps as small_steps
from tests.walks.spelling import SpellingModel, spells
from tests.walks.test_prefix_cache_machine import ExactCache
from tests.walks.test_verify_machine import POINTS, SPANS, VerifyMachine

STEP = 3


def pin(cache: Any, tokens: list[int], namespace: str) -> None:
    with suppress(ValueError):  # not stored whole, or found wrong
        cache.pin(tokens, namespace, name="meanwhile", ttl_requests=2)


MEANWHILE: dict[str, Any] = {
    "clear": lambda cache, tokens, namespace: cache.clear(),
    "clear_quarantine": lambda cache, tokens, namespace: cache.clear_quarantine(),
    "explain": lambda cache, tokens, namespace: cache.explain([*tokens, 1], namespace),
    "fetch": lambda cache, tokens, namespace: cache.fetch(tokens, namespace),
    "pin": pin,
    "reclaim": lambda cache, tokens, namespace: cache.reclaim(0),
    "snapshot_stats": lambda cache, tokens, namespace: cache.snapshot_stats(namespace).exposition(),
    "view": lambda cache, tokens, namespace: cache.render(namespace=namespace),
}


class Explained:
    """A cache that is asked to explain every request that it is about to serve."""

    def begin(self: Any, tokens: Any, keys: Any = None, namespace: str = "", *args: Any, **kwargs: Any) -> Any:
        ids = [int(token) for token in tokens]
        before = inside.everything(self)
        found = self.explain(ids, namespace)
        assert inside.everything(self) == before
        session = super().begin(tokens, keys, namespace, *args, **kwargs)  # type: ignore[misc]
        assert (found.resumable_tokens, found.matched_tokens) == (session.cached_tokens, session.matched_tokens), found
        ends = [found.resumable_tokens, *(gap.end for gap in found.gaps)]
        assert [gap.start for gap in found.gaps] == ends[:-1], found
        assert ends[-1] == len(ids), found
        assert all(gap.start < gap.end for gap in found.gaps), found
        start = inside.quarantined_from(self, ids, namespace)
        for gap in found.gaps:
            # What is quarantined is said to be, and nothing else is; what was, with the tick at which it was found.
            is_quarantined = gap.reason == Reason.QUARANTINED and gap.tick is None
            assert is_quarantined == (start is not None and gap.end > start), (found, start)
        if session.reason is not None:
            reasons = {str(gap.reason) for gap in found.gaps if gap.start < session.matched_tokens}
            assert reasons & {str(session.reason), "evicted"}, (found, session.reason)
        return session


class ExplainedCache(Explained, PrefixCache):
    pass


class ExplainedExactCache(Explained, ExactCache):
    pass


class TogetherMachine(VerifyMachine):
    @initialize(
        kinds=st.lists(st.sampled_from(SPANS + POINTS), min_size=1, max_size=3),
        budget=st.sampled_from([1, 2_000, 6_000, 40_000, 1 << 30]),
        slots=st.integers(1, 3),
        exact=st.booleans(),
    )
    def make(self, kinds: list[str], budget: int, slots: int, exact: bool = False) -> None:
        self.model = SpellingModel(kinds)
        self.exact = exact
        self.told = Told()
        more: dict[str, Any] = {"exact": True, "step_size": STEP} if exact else {}
        with inside.settings(trim_tokens=STEP):
            self.cache = (ExplainedExactCache if exact else ExplainedCache)(
                self.model,
                budget_bytes=budget,
                checkpoint_interval=5,
                live_slots=slots,
                verify=1.0,
                on_event=self.listen,
                **more,
            )
        self.slots = slots
        self.opened: list[tuple[Any, list[int], str]] = []
        self.stored: dict[str, list[list[int]]] = {name: [] for name in NAMESPACES}
        self.pins: list[tuple[list[int], str]] = []
        self.is_spoilt = False

    def listen(self, event: Event) -> None:
        self.told(event)
        if event.kind == "quarantined":
            mismatch = event.detail["mismatch"]
            assert mismatch in self.cache.mismatches
            found = (mismatch.namespace, mismatch.quarantined_from)
            assert (event.namespace, event.start) == found or self.opened
            assert mismatch.tick <= event.tick  # others may have called since the request began

    def serve_one(self, data: Any, namespace: str, tokens: list[int] | None = None) -> tuple[Any, list[int]]:
        stored = list(self.stored[namespace])
        session, tokens = super().serve_one(data, namespace, tokens)
        assert session.matched_tokens <= max((common(tokens, other) for other in stored), default=0)
        return session, tokens

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def insert(self, data: Any, namespace: str) -> None:
        if not self.exact:
            super().insert(data, namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def pin(self, data: Any, namespace: str) -> None:
        if self.stored[namespace]:
            base = data.draw(st.sampled_from(self.stored[namespace]))
            tokens = base[: data.draw(st.integers(1, len(base)))]
            try:
                self.cache.pin(tokens, namespace)
            except ValueError:
                return
            self.pins.append((tokens, namespace))

    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        if self.pins:
            tokens, namespace = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            try:
                self.cache.unpin(tokens, namespace)
            except ValueError:
                assert self.is_spoilt  # lost with its state

    @rule(
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        name=st.sampled_from([None, "a", "b"]),
        lasts=st.sampled_from([None, 1, 3]),
    )
    def warm(self, data: Any, namespace: str, name: str | None, lasts: int | None) -> None:
        tokens = data.draw(short)
        if self.stored[namespace] and data.draw(st.booleans()):
            base = data.draw(st.sampled_from(self.stored[namespace][-6:]))
            tokens = base[: data.draw(st.integers(0, len(base)))] + tokens
        lasts = lasts if name is not None else None
        mismatches = self.cache.stats.verify_mismatches
        try:
            with quietly():
                self.cache.warm(self.model, tokens, namespace, name=name, ttl_requests=lasts)
            failure = ""
        except ValueError as error:
            failure = str(error)
        self.stored[namespace].append(tokens)
        length = len(tokens) // STEP * STEP if self.exact else len(tokens)
        limit = inside.unquarantined_tokens(self.cache, tokens[:length], namespace)
        assert ("quarantined" in failure) == (limit < length), (failure, limit)
        if failure:
            return
        if name is not None:
            pin = self.cache.names(namespace)[name]
            assert (pin.tokens, pin.requests_left) == (length, lasts)
        assert self.cache.explain([*tokens, 1], namespace).resumable_tokens == length or self.opened or self.slots > 1
        if self.cache.stats.verify_mismatches == mismatches and not self.is_spoilt:
            caches, remaining = self.cache.fetch([*tokens, 1], namespace)
            assert len(remaining) == len(tokens) + 1 - length
            spells(caches, tokens[:length], self.model.kinds)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def unpin_name(self, data: Any, namespace: str) -> None:
        names = self.cache.names(namespace)
        if names:
            self.cache.unpin(name=data.draw(st.sampled_from(sorted(names))), namespace=namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), after=st.integers(0, 6))
    def break_off(self, data: Any, namespace: str, after: int) -> None:
        """Ctrl-C in the middle of a forward pass, the cold run's perhaps."""
        if all(path.is_open for path in inside.paths(self.cache)):
            return
        tokens = data.draw(short)
        if self.stored[namespace]:
            tokens = data.draw(st.sampled_from(self.stored[namespace][-6:])) + tokens
        kind = data.draw(st.sampled_from([KeyboardInterrupt, MemoryError]))

        def model(ids: Any, cache: Any) -> Any:
            nonlocal after
            after -= 1
            if after < 0:
                raise kind
            return self.model(ids, cache=cache)

        with quietly():
            try:
                with self.cache.begin(tokens, namespace=namespace) as session:
                    session.prefill(model)
                    session.step(model, tokens[-1:])
            except kind:
                pass
        self.stored[namespace].append(tokens)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def others_call_meanwhile(self, data: Any, namespace: str) -> None:
        """Between the forward passes of a request, those of its cold run among them, others use the cache."""
        if all(path.is_open for path in inside.paths(self.cache)) or not self.stored[namespace]:
            return
        base = data.draw(st.sampled_from(self.stored[namespace][-6:]))
        tokens = base + data.draw(short)
        calls = data.draw(st.lists(st.sampled_from(sorted(MEANWHILE)), min_size=1, max_size=8))
        left = list(calls)

        def model(ids: Any, cache: Any) -> Any:
            logits = self.model(ids, cache=cache)
            if left:
                MEANWHILE[left.pop()](self.cache, base, namespace)
                self.cache.check()
            return logits

        before = self.cache.stats.verified_requests
        with quietly(), self.cache.begin(tokens, namespace=namespace) as session:
            resumed = session.cached_tokens
            session.prefill(model)
            session.step(model, tokens[-1:])
            if not resumed or self.cache.stats.verified_requests > before or not self.is_spoilt:
                spells(session.caches, tokens, self.model.kinds)
        self.stored[namespace].append(tokens)
        if "clear" in calls:
            self.pins.clear()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.told.check(self.cache)
        assert self.told.kinds["quarantined"] == self.cache.stats.verify_mismatches
        for node in inside.nodes(self.cache) if self.exact else []:
            assert not node.is_leaf or (node.payload.live or node.payload.is_kept) or node.end % STEP == 0, node
        if not self.is_spoilt:
            for tokens, namespace in self.pins:
                length = (len(tokens) - 1) // STEP * STEP if self.exact else len(tokens)
                assert inside.stored_tokens(self.cache, tokens, namespace) >= length


TestTogether = TogetherMachine.TestCase
TestTogether.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestTogetherLonger(TogetherMachine.TestCase):  # type: ignore[misc]
    """The same walk, more often and longer."""

    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
