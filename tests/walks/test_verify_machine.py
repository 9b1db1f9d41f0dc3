"""Random walks over a PrefixCache whose stored state goes bad now and then, with verify=1.0.

Whatever a verified session is handed must spell its own prompt, wherever the fault lay and whoever else stood on the
path; the cache stays sound, and nothing that is quarantined is stored. Without faults nothing is ever quarantined.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixcache import PrefixCache
from radixcache.adapters.registry import leaves
from tests import inside
from tests.walks.common import NAMESPACES, quietly, short, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.spelling import SpellingModel, spells

SPANS = ("kv", "concatenate", "quantized")
POINTS = ("rotating", "arrays", "chunked", "list", "pair", "layer")


class VerifyMachine(RuleBasedStateMachine):
    """One PrefixCache, the sequences that were served from it, and the faults in it."""

    @initialize(
        kinds=st.lists(st.sampled_from(SPANS + POINTS), min_size=1, max_size=3),
        budget=st.sampled_from([6_000, 40_000, 1 << 30]),
        slots=st.integers(1, 3),
    )
    def make(self, kinds: list[str], budget: int, slots: int) -> None:
        self.model = SpellingModel(kinds)
        self.cache = PrefixCache(self.model, budget_bytes=budget, checkpoint_interval=5, live_slots=slots, verify=1.0)
        self.slots = slots
        self.opened: list[tuple[Any, list[int], str]] = []
        self.stored: dict[str, list[list[int]]] = {name: [] for name in NAMESPACES}
        self.pins: list[tuple[list[int], str]] = []
        self.is_spoilt = False

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
        session = self.cache.begin(tokens, namespace=namespace, reserve=data.draw(st.integers(0, 20)))
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
        tokens = data.draw(short)
        caches = self.model.make_cache()
        self.model(mx.array([tokens]), cache=caches)
        assert self.cache.insert(tokens, caches, namespace=namespace) <= len(tokens)
        self.stored[namespace].append(tokens)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def pin(self, data: Any, namespace: str) -> None:
        if self.stored[namespace]:
            base = data.draw(st.sampled_from(self.stored[namespace]))
            try:
                self.cache.pin(base, namespace)
            except ValueError:
                return

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


TestVerify = walking(VerifyMachine, examples=12)
TestVerifyLonger = pytest.mark.slow(walking(VerifyMachine, examples=50, steps=40))
