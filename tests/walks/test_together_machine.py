"""Random walks with everything on: verification with faults, exact mode, explain, events, named pins, warm, slots.

Stored state goes bad now and then. Whatever a verified session is handed must spell its own prompt, wherever the fault
lay and whoever else stood on the path; the cache stays sound, and nothing that is quarantined is stored. Without faults
nothing is ever quarantined. explain() says what begin() then does, and changes nothing; events add up to the tree; pins
keep what they say, unless its state was found wrong; whatever breaks off gives the second state back.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixcache import Event, PrefixCache, Reason
from radixcache.adapters.registry import leaves
from tests import inside
from tests.prompts import common
from tests.walks.common import NAMESPACES, Told, quietly, short, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.prefix_cache_machine import ExactCache
from tests.walks.spelling import SpellingModel, spells

SPANS = ("kv", "concatenate", "quantized")
POINTS = ("rotating", "arrays", "chunked", "list", "pair", "layer")
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


class TogetherMachine(RuleBasedStateMachine):
    """One PrefixCache, the sequences that were served from it, and the faults in it."""

    @initialize(
        kinds=st.lists(st.sampled_from(SPANS + POINTS), min_size=1, max_size=3),
        budget=st.sampled_from([1, 2_000, 6_000, 40_000, 1 << 30]),
        slots=st.integers(1, 3),
        exact=st.booleans(),
    )
    def make(self, kinds: list[str], budget: int, slots: int, exact: bool) -> None:
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

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for session, _, _ in self.opened:
                session.close()
            self.cache.clear()
            stats = self.cache.stats
            assert (stats.live_bytes, stats.paged_bytes, stats.verify_bytes, stats.nodes) == (0, 0, 0, 0), stats

    def serve_one(self, data: Any, namespace: str, tokens: list[int] | None = None) -> tuple[Any, list[int]]:
        """Begin, prefill and step; what was verified spells the prompt, and so does what was not restored."""
        tokens = tokens or []
        if not tokens and self.stored[namespace] and data.draw(st.integers(0, 3)):
            base = data.draw(st.sampled_from(self.stored[namespace][-6:]))
            tokens = base[: data.draw(st.integers(0, len(base)))] if data.draw(st.booleans()) else base
        tokens = tokens + data.draw(short)
        before = self.cache.stats.verified_requests
        longest = max((common(tokens, other) for other in self.stored[namespace]), default=0)
        session = self.cache.begin(tokens, namespace=namespace, reserve=data.draw(st.integers(0, 20)))
        assert session.matched_tokens <= longest
        resumed = session.cached_tokens
        with quietly():
            if data.draw(st.booleans()):
                session.prefill(self.model, step_size=data.draw(st.sampled_from([3, 7, 2048])))
                session.step(self.model, tokens[-1:])
            else:
                session.step(self.model, session.remaining)
        if not resumed or self.cache.stats.verified_requests > before or not self.is_spoilt:
            spells(session.caches, tokens, self.model.kinds)
        return session, tokens

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), reply=st.lists(st.integers(0, 3), max_size=5))
    def serve(self, data: Any, namespace: str, reply: list[int]) -> None:
        session, tokens = self.serve_one(data, namespace)
        for token in reply:
            session.step(self.model, [token])
        session.close()
        self.stored[namespace].append(tokens + reply)

    @precondition(lambda self: len(self.opened) < self.slots - 1)
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), early=st.booleans())
    def begin_and_stay(self, data: Any, namespace: str, early: bool) -> None:
        """A session that stays open; `early`: it has not evaluated anything, nor been verified."""
        if early and self.stored[namespace]:
            tokens = data.draw(st.sampled_from(self.stored[namespace][-6:]))
            self.opened.append((self.cache.begin(tokens, namespace=namespace), tokens, namespace))
        else:
            self.opened.append((*self.serve_one(data, namespace), namespace))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), token=st.integers(0, 3))
    def go_on(self, data: Any, token: int) -> None:
        index = data.draw(st.integers(0, len(self.opened) - 1))
        session, tokens, namespace = self.opened[index]
        if session.position == len(tokens):
            session.step(self.model, [token])
            self.opened[index] = (session, [*tokens, token], namespace)

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def close_one(self, data: Any) -> None:
        session, tokens, namespace = self.opened.pop(data.draw(st.integers(0, len(self.opened) - 1)))
        session.close()
        self.stored[namespace].append(tokens)

    @precondition(lambda self: any(self.stored.values()))
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def spoil_and_ask(self, data: Any, namespace: str) -> None:
        """A fault on the path of a stored sequence, and a request that goes on from it."""
        if not self.stored[namespace]:
            return
        tokens = data.draw(st.sampled_from(self.stored[namespace][-6:]))
        path = inside.path_of(self.cache, tokens, namespace)
        if path:
            self.spoil(data, data.draw(st.sampled_from(path)))
        if not all(path.is_open for path in inside.paths(self.cache)):
            session, tokens = self.serve_one(data, namespace, tokens)
            session.close()
            self.stored[namespace].append(tokens)

    def spoil(self, data: Any, node: Any) -> None:
        """Change one number of its snapshot, of its checkpoint, or in the live buffers of an idle slot."""
        spans, checkpoint = node.payload.spans, node.payload.checkpoint
        snapshots = [] if spans is None else [each for each in spans.leaves if each is not None]
        points = [] if checkpoint is None else [each for each in checkpoint.leaves if each is not None]
        idle = [path.slot for path in inside.paths(self.cache) if path.tip is not None and not path.is_open]
        if snapshots:
            snapshot = data.draw(st.sampled_from(snapshots))
            index = data.draw(st.integers(0, len(snapshot.segments) - 1))
            arrays = list(snapshot.segments[index])
            self.is_spoilt |= change(arrays, data)
            snapshot.segments[index] = tuple(arrays)
        elif points and data.draw(st.booleans()):
            snapshot = data.draw(st.sampled_from(points))
            if isinstance(snapshot.state, tuple):
                self.is_spoilt |= change(snapshot.state[0], data)
            else:
                for index, array in enumerate(snapshot.state):
                    arrays = [array]
                    self.is_spoilt |= change(arrays, data)
                    snapshot.state[index] = arrays[0]
        elif idle:
            slot = data.draw(st.sampled_from(idle))
            offset = inside.paths(self.cache)[slot].offset
            cache = data.draw(st.sampled_from(leaves(inside.paths(self.cache)[slot].caches)))
            if type(cache).__name__ in ("KVCache", "ConcatenateKVCache"):
                arrays = [cache.keys[..., :offset, :]]
                self.is_spoilt |= change(arrays, data)
                keys = np.array(cache.keys)
                keys[..., :offset, :] = np.array(arrays[0])
                cache.keys = mx.array(keys)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def insert(self, data: Any, namespace: str) -> None:
        if self.exact:
            return
        tokens = data.draw(short)
        caches = self.model.make_cache()
        self.model(mx.array([tokens]), cache=caches)
        assert self.cache.insert(tokens, caches, namespace=namespace) <= len(tokens)
        self.stored[namespace].append(tokens)

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

    @rule(wanted=st.sampled_from([0, 3_000]))
    def reclaim(self, wanted: int) -> None:
        self.cache.reclaim(wanted)

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear_quarantine(self, namespace: str | None) -> None:
        self.cache.clear_quarantine(namespace)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats = self.cache.stats
        assert stats.verify_bytes == 0
        assert self.is_spoilt or (stats.verify_mismatches, stats.quarantined) == (0, 0), self.cache.mismatches
        for node in inside.nodes(self.cache):
            if node.is_leaf and stats.quarantined:
                assert inside.unquarantined_tokens(self.cache, node.prefix(), node.namespace) == node.end, node
        self.told.check(self.cache)
        assert self.told.kinds["quarantined"] == self.cache.stats.verify_mismatches
        for node in inside.nodes(self.cache) if self.exact else []:
            assert not node.is_leaf or (node.payload.live or node.payload.is_kept) or node.end % STEP == 0, node
        if not self.is_spoilt:
            for tokens, namespace in self.pins:
                length = (len(tokens) - 1) // STEP * STEP if self.exact else len(tokens)
                assert inside.stored_tokens(self.cache, tokens, namespace) >= length


def change(arrays: list[Any], data: Any) -> bool:
    """Change one number of one of the arrays, by more than rounding; whether there was one that may be changed."""
    index = data.draw(st.integers(0, len(arrays) - 1))
    if arrays[index] is None or arrays[index].dtype == mx.uint32 or not arrays[index].size:
        return False
    values = np.array(arrays[index])
    place = data.draw(st.integers(0, values.size - 1))
    values.reshape(-1)[place] += 40
    arrays[index] = mx.array(values)
    return True


TestTogether = walking(TogetherMachine, examples=18)
TestTogetherLonger = pytest.mark.slow(walking(TogetherMachine, examples=60, steps=40))
