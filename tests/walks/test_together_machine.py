"""Random walks with everything on: verification with faults, exact mode, explain, events, named pins, warm, slots.

The rules of prefix_cache_machine.py, and more: stored state goes bad now and then. Whatever a verified session is
handed must spell its own prompt, wherever the fault lay and whoever else stood on the path; the cache stays sound, and
nothing that is quarantined is stored. Without faults nothing is ever quarantined. Whatever breaks off gives the second
state back.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis.stateful import precondition, rule

from radixcache import Event, Explanation, PrefixCache, Reason
from radixcache.adapters.registry import leaves
from tests import inside
from tests.walks.common import NAMESPACES, quietly, short, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.prefix_cache_machine import ExactCache, ExactMachine, PrefixCacheMachine

KINDS = ("kv", "concatenate", "quantized", "rotating", "arrays", "chunked", "list", "pair", "layer")


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


class TogetherMachine(PrefixCacheMachine):
    """One PrefixCache that verifies each request, and the faults in it."""

    kinds_of = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)
    more: Any = {"verify": 1.0}  # noqa: RUF012
    reasons = (*PrefixCacheMachine.reasons, Reason.QUARANTINED)
    is_spoilt = False

    def cache_class(self, model: Any, **more: Any) -> PrefixCache:
        self.quiet = ExitStack()
        self.quiet.enter_context(quietly())
        return (ExactCache if "exact" in more else PrefixCache)(model, **{**more, "on_event": self.listen})

    def listen(self, event: Event) -> None:
        self.told(event)
        if event.kind == "quarantined":
            mismatch = event.detail["mismatch"]
            assert mismatch in self.cache.mismatches
            found = (mismatch.namespace, mismatch.quarantined_from)
            assert (event.namespace, event.start) == found or self.opened
            assert mismatch.tick <= event.tick  # others may have called since the request began

    def teardown(self) -> None:
        super().teardown()
        getattr(self, "quiet", ExitStack()).close()

    # What a fault makes untrue

    def spelled(self, caches: list[Any], tokens: list[int]) -> None:
        if not self.is_spoilt:
            super().spelled(caches, tokens)

    def is_warm(self, tokens: list[int], namespace: str) -> None:
        if not self.is_spoilt:
            super().is_warm(tokens, namespace)

    def keeps_what_is_pinned(self) -> None:
        stats = self.cache.stats
        assert (stats.verify_bytes, stats.verify_mismatches) == (0, self.told.kinds["quarantined"])
        if not self.is_spoilt:
            assert (stats.verify_mismatches, stats.quarantined) == (0, 0), self.cache.mismatches
            super().keeps_what_is_pinned()
        for node in inside.nodes(self.cache) if stats.quarantined else ():
            if node.is_leaf:
                assert inside.unquarantined_tokens(self.cache, node.prefix(), node.namespace) == node.end, node

    def unpin_one(self, tokens: list[int], namespace: str) -> None:
        try:
            super().unpin_one(tokens, namespace)
        except ValueError:
            assert self.is_spoilt  # lost with its state

    @property
    def is_pinned(self) -> bool:
        return super().is_pinned or any(self.cache.names(name) for name in NAMESPACES)

    def explain(self, tokens: list[int], namespace: str) -> Explanation:
        """What is quarantined is said to be, and nothing else is; what was, with the tick at which it was found."""
        found = super().explain(tokens, namespace)
        start = inside.quarantined_from(self.cache, tokens, namespace)
        for gap in found.gaps:
            is_quarantined = gap.reason == Reason.QUARANTINED and gap.tick is None
            assert is_quarantined == (start is not None and gap.end > start), (found, start)
        return found

    # A layer that fails under a cold run is no mismatch.

    @precondition(lambda self: False)
    @rule()
    def fail_in_a_layer(self) -> None: ...

    @precondition(lambda self: False)
    @rule()
    def own_loop_breaks_off(self) -> None: ...

    def serve_verified(self, tokens: list[int], namespace: str, step_size: int | None, model: Any) -> None:
        """Prefill, or step at once; what was verified spells the prompt, and so does what was not restored."""
        before = self.cache.stats.verified_requests
        with self.cache.begin(tokens, namespace=namespace) as session:
            resumed = session.cached_tokens
            if step_size is None:
                session.step(model, session.remaining)
            else:
                session.prefill(model, step_size=step_size)
                session.step(model, tokens[-1:])
            if not resumed or self.cache.stats.verified_requests > before:
                super().spelled(session.caches, tokens)
        self.stored[namespace].append(tokens)

    @precondition(lambda self: any(self.stored.values()))
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), stands=st.booleans())
    def spoil_and_ask(self, data: Any, namespace: str, stands: bool) -> None:
        """A fault on a stored path, and a request that goes on from it; perhaps a session stands there already."""
        if not self.stored[namespace]:
            return
        tokens = data.draw(st.sampled_from(self.stored[namespace][-6:]))
        if path := inside.path_of(self.cache, tokens, namespace):
            self.spoil(data, data.draw(st.sampled_from(path)))
        self.lossless = self.lossless and not self.is_spoilt
        standing = None
        if stands and len(self.opened) < self.slots - 1:
            standing = self.cache.begin([*tokens, 1], namespace=namespace)
        step_size = data.draw(st.sampled_from([None, 3, 7, 2048]))
        self.serve_verified(tokens + data.draw(short), namespace, step_size, self.model)
        if standing is not None:
            standing.close()
            self.stored[namespace].append([*tokens, 1])

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

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear_quarantine(self, namespace: str | None) -> None:
        self.cache.clear_quarantine(namespace)

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

        with suppress(kind), self.cache.begin(tokens, namespace=namespace) as session:
            session.prefill(model)
            session.step(model, tokens[-1:])
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

        self.lossless = False
        self.serve_verified(tokens, namespace, 2048, model)
        if "clear" in calls:
            self.pins, self.names, self.held = [], {}, {name: set() for name in NAMESPACES}


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


class TogetherExactMachine(TogetherMachine, ExactMachine):
    """The same in exact mode."""

    more: Any = {**ExactMachine.more, **TogetherMachine.more}  # noqa: RUF012


TestTogether = walking(TogetherMachine, examples=12)
TestTogetherExact = walking(TogetherExactMachine, examples=8)
TestTogetherLonger = pytest.mark.slow(walking(TogetherMachine, examples=60, steps=40))
