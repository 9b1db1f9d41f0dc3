"""Random walks over PrefixCache with caches that spell their tokens, against a plain record of what was evaluated.

Caches that are handed out must spell exactly the prefix that they claim. Every invariant holds after every call, and so
does the budget unless a pin or an open session exceeds it. Grid and trim steps are small, so that short sequences cross
them. With several live slots, one session stays open while others come and go.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixcache import CacheBusyError, Explanation, PrefixCache, Reason, Session, SnapshotError
from radixcache.tree.history import History
from tests import inside
from tests.prompts import common
from tests.walks.common import NAMESPACES, Told, short
from tests.walks.spelling import LayerError, SpellingModel, spells

SPANS = ("kv", "concatenate", "quantized", "unused", "none")
POINTS = ("rotating", "rotating_keep", "arrays", "chunked", "list", "pair", "layer", "echo")


class PrefixCacheMachine(RuleBasedStateMachine):
    """One PrefixCache and the sequences that were ever evaluated in it."""

    kinds_of: Any = st.lists(st.sampled_from(SPANS + POINTS), min_size=1, max_size=4)
    cache_class: Any = PrefixCache
    more: Any = {}  # noqa: RUF012  further arguments of the cache
    width = 2  # of keys and values
    #: Why something may not be matched.
    reasons: tuple[Reason, ...] = (Reason.EVICTED, Reason.DIVERGED, Reason.NEVER_STORED)

    @initialize(
        data=st.data(),
        budget=st.sampled_from([1, 400, 2_000, 6_000, 40_000, 1 << 30]),
        policy=st.sampled_from(["lru", "fifo"]),
        interval=st.sampled_from([5, 2048]),
        slots=st.integers(1, 3),
    )
    def make(self, data: Any, budget: int, policy: str, interval: int, slots: int) -> None:
        kinds = data.draw(self.kinds_of)
        self.told = Told()
        # What the tree was ever seen to hold, as one path per leaf and look.
        self.held: dict[str, set[tuple[int, ...]]] = {name: set() for name in NAMESPACES}
        self.model = SpellingModel(kinds if set(kinds) - {"unused", "none"} else [*kinds, "kv"], self.width)
        self.cache = self.cache_class(
            self.model,
            budget_bytes=budget,
            policy=policy,
            checkpoint_interval=interval,
            checkpoint_budget_bytes=budget,
            live_slots=slots,
            on_event=self.told,
            **self.more,
        )
        self.slots = slots
        # Sessions that stay open from one rule to the next: the session, its tokens so far, its namespace.
        self.opened: list[tuple[Any, list[int], str]] = []
        self.stored: dict[str, list[list[int]]] = {name: [] for name in NAMESPACES}
        self.pins: list[tuple[list[int], str]] = []
        #: What is pinned by name, and whether until it is unpinned.
        self.names: dict[tuple[str, str], tuple[list[int], bool]] = {}
        self.lossless = budget == 1 << 30
        if "unused" in self.model.kinds:
            # That a layer is never written shows in a forward pass that was seen through. Before there was one, a
            # caller's own loop may have broken off in front of it, and what it evaluated is not stored.
            with self.cache.begin([0, 0]) as session:
                session.prefill(self.model)
            self.cache.clear()
            inside.states(self.cache).events.history = History()
        self.pure = not set(self.model.kinds) & set(POINTS)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for session, _, _ in self.opened:
                session.close()
            for tokens, namespace in self.pins:
                self.unpin_one(tokens, namespace)
            self.cache.clear()
            stats = self.cache.stats
            assert (stats.live_bytes, stats.paged_bytes, stats.verify_bytes, stats.nodes) == (0, 0, 0, 0), stats

    def longest(self, tokens: list[int], namespace: str) -> int:
        return max((common(tokens, other) for other in self.stored[namespace]), default=0)

    def sequence(self, data: Any, namespace: str) -> list[int]:
        """A new sequence, or one that branches off a stored one, at any depth."""
        tokens: list[int] = []
        if self.stored[namespace] and data.draw(st.booleans()):
            base = data.draw(st.sampled_from(self.stored[namespace]))
            tokens = base[: data.draw(st.integers(0, len(base)))]
        return tokens + data.draw(short)

    def spelled(self, caches: list[Any], tokens: list[int]) -> None:
        spells(caches, tokens, self.model.kinds)

    def open(self, data: Any, namespace: str) -> tuple[Any, list[int]]:
        tokens = self.sequence(data, namespace)
        marks = data.draw(st.lists(st.integers(0, len(tokens)), max_size=2))
        longest = self.longest(tokens, namespace)
        explanation = self.explain(tokens, namespace)
        session = self.cache.begin(tokens, namespace=namespace, marks=marks, reserve=data.draw(st.integers(0, 20)))
        self.foreseen(explanation, session)
        assert session.cached_tokens <= session.matched_tokens <= longest
        assert session.cached_tokens < len(tokens)
        assert (session.reason is None) == (session.cached_tokens == session.matched_tokens)
        assert session.remaining.tolist() == tokens[session.cached_tokens :]
        if self.lossless and self.pure:
            assert session.matched_tokens == longest
            assert session.cached_tokens == min(longest, len(tokens) - 1)
        self.spelled(session.caches, tokens[: session.cached_tokens])
        return session, tokens

    def foreseen(self, explanation: Explanation, session: Any) -> None:
        assert explanation.resumable_tokens == session.cached_tokens, (explanation, session.cached_tokens)
        assert explanation.matched_tokens == session.matched_tokens, (explanation, session.matched_tokens)
        if session.reason is not None:
            found = {str(gap.reason) for gap in explanation.gaps if gap.start < session.matched_tokens}
            # A checkpoint that is missing may have been there once.
            wanted = {str(session.reason), "evicted"} if session.reason == "no_checkpoint" else {str(session.reason)}
            assert found & wanted, (found, session.reason)

    @precondition(lambda self: len(self.opened) < self.slots - 1)
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), step=st.sampled_from([3, 2048]))
    def begin_and_stay(self, data: Any, namespace: str, step: int) -> None:
        session, tokens = self.open(data, namespace)
        session.prefill(self.model, step_size=step)
        session.step(self.model, tokens[-1:])
        self.opened.append((session, tokens, namespace))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), reply=short)
    def go_on(self, data: Any, reply: list[int]) -> None:
        """The requests that came in between have not touched what an open session stands on."""
        index = data.draw(st.integers(0, len(self.opened) - 1))
        session, tokens, namespace = self.opened[index]
        self.spelled(session.caches, tokens)
        for token in reply:
            self.step(session, token, lazily=data.draw(st.booleans()))
        self.opened[index] = (session, self.take_back(data, session, tokens + reply), namespace)

    def take_back(self, data: Any, session: Any, tokens: list[int]) -> list[int]:
        """What a session takes back it never had: neither caches, nor tokens, nor bytes. Returns the tokens it has."""
        prompt = session.prompt.tolist()
        for batch in data.draw(st.lists(short, max_size=3)):
            held = self.cache.stats.checkpoint_bytes
            session.step(self.model, batch)
            whole = tokens + batch
            offset = data.draw(st.integers(0, len(whole)) | st.integers(len(tokens), len(whole)))
            reached = session.rewind(offset)
            assert reached == offset or (reached < offset and not self.pure)
            assert reached >= len(tokens) or offset <= len(tokens)
            assert (session.position, session.known_tokens) == (reached, max(reached, len(prompt)))
            assert reached == len(whole) or self.cache.stats.checkpoint_bytes <= held
            self.spelled(session.caches, whole[:reached])
            self.cache.check()
            if prompt[reached:]:
                session.step(self.model, prompt[reached:])
            tokens = whole[:reached] + prompt[reached:]
        return tokens

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def close_one(self, data: Any) -> None:
        session, tokens, namespace = self.opened.pop(data.draw(st.integers(0, len(self.opened) - 1)))
        self.spelled(session.caches, tokens)
        session.close()
        self.stored[namespace].append(tokens)
        self.resumes(tokens, namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), step=st.sampled_from([3, 7, 2048]), reply=short)
    def serve(self, data: Any, namespace: str, step: int, reply: list[int]) -> None:
        session, tokens = self.open(data, namespace)
        with session:
            session.prefill(self.model, step_size=step)
            session.step(self.model, tokens[-1:])
            for token in reply:
                self.step(session, token, lazily=data.draw(st.booleans()))
                self.check_open_budget()
            tokens = self.take_back(data, session, tokens + reply)
        self.stored[namespace].append(tokens)
        self.resumes(tokens, namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), step=st.sampled_from([2, 5]))
    def cancel(self, data: Any, namespace: str, step: int) -> None:
        session, tokens = self.open(data, namespace)
        after = data.draw(st.integers(0, 4))
        done = session.cached_tokens

        def progress(evaluated: int, total: int) -> None:
            nonlocal after, done
            done = max(done, evaluated)
            after -= 1
            if after < 0:
                raise KeyboardInterrupt

        try:
            with session:
                session.prefill(self.model, step_size=step, on_progress=progress)
        except KeyboardInterrupt:
            pass
        if done:
            self.stored[namespace].append(tokens[:done])
            self.resumes(tokens[:done], namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), reply=short)
    def fail_in_a_layer(self, data: Any, namespace: str, reply: list[int]) -> None:
        session, tokens = self.open(data, namespace)
        layer = data.draw(st.integers(0, len(self.model.kinds) - 1))
        at = data.draw(st.integers(0, len(reply)))
        retry = data.draw(st.booleans())
        fed = tokens
        try:
            with session:
                if at == 0:
                    self.model.fail_in_layer = layer
                session.prefill(self.model, step_size=4)
                session.step(self.model, tokens[-1:])
                for index, token in enumerate(reply, start=1):
                    if index == at:
                        self.model.fail_in_layer = layer
                    try:
                        session.step(self.model, [token])
                    except LayerError:
                        if not retry:
                            raise
                        self.model.fail_in_layer = None
                        self.catch_up(session, [*fed, token])
                    fed = [*fed, token]
                self.spelled(session.caches, fed)
        except LayerError:
            position = session.position
            assert position <= len(fed)
        finally:
            self.model.fail_in_layer = None
        if session.position:
            self.stored[namespace].append(fed[: session.position])

    def catch_up(self, session: Any, tokens: list[int]) -> None:
        """After a failure: evaluate what the session fell back behind, one token at a time."""
        self.spelled(session.caches, tokens[: session.position])
        for token in tokens[session.position :]:
            session.step(self.model, [token])

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), reply=short, ahead=st.integers(-1, 2))
    def own_loop(self, data: Any, namespace: str, reply: list[int], ahead: int) -> None:
        """A loop that calls the model itself and reports fewer, or more, tokens than it evaluated."""
        session, tokens = self.open(data, namespace)
        with session:
            if data.draw(st.booleans()):
                session.prefill(self.model)
            elif session.cached_tokens < len(tokens) - 1:
                self.model(mx.array(tokens[session.cached_tokens : -1])[None], cache=session.caches)
            fed = [tokens[-1], *reply]
            for token in fed[: max(1, len(fed) + min(ahead, 0))]:
                self.model(mx.array([[token]]), cache=session.caches)
            for token in [1] * max(0, ahead):
                self.model(mx.array([[token]]), cache=session.caches)
            session.extend(reply)
        self.stored[namespace].append(tokens + reply)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), reply=short)
    def own_loop_breaks_off(self, data: Any, namespace: str, reply: list[int]) -> None:
        """A layer raises under a loop that calls the model itself: nobody rolled the layers back."""
        session, tokens = self.open(data, namespace)
        done = [*tokens[:-1]]
        layer = self.layer_with_state(data)

        def loop() -> None:
            with session:
                session.prefill(self.model, step_size=5)
                session.extend(reply)
                for token in [tokens[-1], *reply[:-1]]:
                    self.model(mx.array([[token]]), cache=session.caches)
                    done.append(token)
                self.model.fail_in_layer = layer
                self.model(mx.array([reply[-1:]]), cache=session.caches)

        with pytest.raises(LayerError):
            loop()
        self.model.fail_in_layer = None
        if done:
            self.stored[namespace].append(done)
            self.resumes(done if self.pure else [], namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def others_while_open(self, data: Any, namespace: str) -> None:
        session, tokens = self.open(data, namespace)
        with session:
            session.prefill(self.model, step_size=6)
            if len(self.opened) == self.slots - 1:
                with pytest.raises(CacheBusyError, match="slot"):
                    self.cache.begin(tokens)
            self.fetch_one(data, namespace)
            self.insert_one(data, namespace, 0)
            self.cache.reclaim(data.draw(st.sampled_from([0, 3_000])))
            self.lossless = False
            self.cache.check()
            session.step(self.model, tokens[-1:])
            self.spelled(session.caches, tokens)
        self.stored[namespace].append(tokens)
        self.resumes(tokens, namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def fetch(self, data: Any, namespace: str) -> None:
        self.fetch_one(data, namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), beyond=st.integers(-2, 2))
    def insert(self, data: Any, namespace: str, beyond: int) -> None:
        self.insert_one(data, namespace, beyond)

    def explain(self, tokens: list[int], namespace: str) -> Explanation:
        """Explain a prompt: nothing changes by it, the gaps tile what is not resumed, their reasons are true."""
        before = inside.everything(self.cache)
        explanation = self.cache.explain(tokens, namespace)
        assert inside.everything(self.cache) == before
        gaps, matched = explanation.gaps, explanation.matched_tokens
        ends = [explanation.resumable_tokens, *(gap.end for gap in gaps)]
        assert [gap.start for gap in gaps] == ends[:-1]
        assert ends[-1] == len(tokens)
        assert all(gap.start < gap.end for gap in gaps)
        held = max((common(tokens, list(other)) for other in self.held[namespace]), default=0)
        for gap in gaps:
            if gap.start >= matched:
                assert gap.reason in (Reason.EVICTED, Reason.QUARANTINED) or gap.start >= held, (explanation, held)
                assert gap.reason in self.reasons, gap
                assert gap.reason != Reason.EVICTED or gap.end <= self.longest(tokens, namespace), gap
            if gap.reason == Reason.DIVERGED:
                assert gap.start == matched
                assert gap.stored[0] != tokens[matched] == gap.asked[0]
        return explanation

    def fetch_one(self, data: Any, namespace: str) -> None:
        tokens = self.sequence(data, namespace)
        explanation = self.explain(tokens, namespace)
        caches, remaining = self.cache.fetch(tokens, namespace=namespace)
        cached = len(tokens) - len(remaining)
        if all(path.is_open for path in inside.paths(self.cache)):
            self.fetched(explanation, cached)
        assert len(remaining) > 0
        assert remaining.tolist() == tokens[cached:]
        assert cached <= self.longest(tokens, namespace)
        self.spelled(caches, tokens[:cached])
        self.model(mx.array(remaining)[None], cache=caches)
        self.spelled(caches, tokens)

    def fetched(self, explanation: Explanation, cached_tokens: int) -> None:
        assert explanation.resumable_tokens == cached_tokens

    def insert_one(self, data: Any, namespace: str, beyond: int) -> None:
        tokens = self.sequence(data, namespace)
        evaluated = (tokens + [2] * beyond) if beyond > 0 else tokens[: len(tokens) + beyond]
        caches = self.model.make_cache()
        for start in range(0, len(evaluated), 6):
            self.model(mx.array(evaluated[start : start + 6])[None], cache=caches)
        before = self.cache.dump()
        blind = not any(hasattr(c, "offset") or hasattr(c, "caches") for c in caches if c is not None)
        if blind and beyond:
            return  # recurrent state has no offset: the caller vouches for it
        try:
            self.cache.insert(tokens, caches, namespace=namespace)
        except SnapshotError:
            assert beyond > 0
            assert not self.pure
            assert self.cache.dump() == before
            return
        if evaluated:
            self.stored[namespace].append(tokens[: len(evaluated)])

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def pin(self, data: Any, namespace: str) -> None:
        if not self.stored[namespace]:
            return
        base = data.draw(st.sampled_from(self.stored[namespace]))
        tokens = base[: data.draw(st.integers(1, len(base)))]
        before = self.cache.dump()
        try:
            self.cache.pin(tokens, namespace)
        except ValueError:
            assert self.cache.dump() == before
        else:
            self.pins.append((tokens, namespace))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        self.unpin_one(*self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    def unpin_one(self, tokens: list[int], namespace: str) -> None:
        self.cache.unpin(tokens, namespace)

    @rule(
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        name=st.sampled_from([None, "a", "b"]),
        lasts=st.sampled_from([None, 1, 3]),
        step=st.sampled_from([3, 2048]),
    )
    def warm(self, data: Any, namespace: str, name: str | None, lasts: int | None, step: int) -> None:
        tokens = self.sequence(data, namespace)
        self.stored[namespace].append(tokens)
        before = self.cache.names(namespace)
        try:
            self.cache.warm(
                self.model, tokens, namespace, name=name, ttl_requests=None if name is None else lasts, step_size=step
            )
        except ValueError:
            assert not self.lossless or not self.warmed_length(tokens)
            left = {each for each, pin in before.items() if pin.requests_left not in (None, 1)}
            assert left <= set(self.cache.names(namespace)) <= set(before)
            return
        if name is not None:
            self.names[namespace, name] = (tokens, lasts is None)
        self.is_warm(tokens, namespace)

    def is_warm(self, tokens: list[int], namespace: str) -> None:
        caches, remaining = self.cache.fetch([*tokens, 1], namespace)
        length = self.warmed_length(tokens)
        assert len(remaining) == len(tokens) + 1 - length
        self.spelled(caches, tokens[:length])

    @rule(namespace=st.sampled_from(NAMESPACES), name=st.sampled_from(["a", "b"]))
    def unpin_name(self, namespace: str, name: str) -> None:
        if name in self.cache.names(namespace):
            self.cache.unpin(name=name, namespace=namespace)
            self.names.pop((namespace, name), None)

    @rule(wanted=st.sampled_from([0, 1_000, 10_000]))
    def reclaim(self, wanted: int) -> None:
        before = self.cache.stats
        freed = self.cache.reclaim(wanted)
        after = self.cache.stats
        assert freed == before.live_bytes + before.paged_bytes - after.live_bytes - after.paged_bytes
        if not self.is_pinned and not self.opened:
            assert after.live_bytes + after.paged_bytes <= wanted
        self.lossless = False

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats = self.cache.stats
        if not self.is_pinned and not self.opened:
            assert stats.live_bytes + stats.paged_bytes <= stats.budget_bytes, stats
        self.told.check(self.cache)
        for node in inside.nodes(self.cache):
            if node.is_leaf:
                self.held[node.namespace].add(tuple(node.prefix().tolist()))
        self.keeps_what_is_pinned()

    def keeps_what_is_pinned(self) -> None:
        for tokens, namespace in self.pins:
            keys = np.asarray(tokens[: self.pinned_length(tokens)], dtype=np.int64)
            assert inside.stored_tokens(self.cache, keys, namespace) == len(keys), (tokens, namespace)
        for (namespace, name), (tokens, stays) in list(self.names.items()):
            pin = self.cache.names(namespace).get(name)
            if pin is None:
                assert not stays, (namespace, name)
                del self.names[namespace, name]
                continue
            length = self.warmed_length(tokens)
            assert (pin.tokens, pin.requests_left is None) == (length, stays), (namespace, name, pin)
            keys = np.asarray(tokens[:length], dtype=np.int64)
            assert inside.stored_tokens(self.cache, keys, namespace) == length, (tokens, namespace)

    @property
    def is_pinned(self) -> bool:
        return bool(self.pins or self.names)

    def pinned_length(self, tokens: list[int]) -> int:
        return len(tokens)

    def warmed_length(self, tokens: list[int]) -> int:
        return len(tokens)

    def layer_with_state(self, data: Any) -> int:
        """A layer behind which some state is not written: a pass that breaks off there is not complete."""
        written = [layer for layer, kind in enumerate(self.model.kinds) if kind not in ("unused", "none")]
        layer: int = data.draw(st.integers(0, written[-1]))
        return layer

    def step(self, session: Any, token: int, lazily: bool) -> None:
        session.step(self.model, mx.array([token]) + mx.array([0]) if lazily else [token])

    def check_open_budget(self) -> None:
        """While a session is open only what it stands on, and pins, may exceed the budget."""
        stats = self.cache.stats
        over = stats.live_bytes + stats.paged_bytes - stats.budget_bytes
        assert over <= 0 or self.is_pinned or stats.duplicate_bytes == 0, stats

    def resumes(self, tokens: list[int], namespace: str) -> None:
        """With room for everything, what was just evaluated is there: wholly, or up to a checkpoint."""
        if self.lossless and tokens:
            keys = np.asarray(tokens, dtype=np.int64)
            assert inside.stored_tokens(self.cache, keys, namespace) == len(tokens)


class OnGridSession(Session):
    """Prefills in the chunks of its cache, whatever it is asked for."""

    def prefill(self, model: Any, step_size: int | None = None, on_progress: Any = None) -> None:
        super().prefill(model, on_progress=on_progress)


class ExactCache(PrefixCache):
    def begin(self, *args: Any, **kwargs: Any) -> Any:
        session = super().begin(*args, **kwargs)
        session.__class__ = OnGridSession
        return session


class ExactMachine(PrefixCacheMachine):
    """Everything above in exact mode: what is resumed, stored and checkpointed ends on the grid."""

    cache_class = ExactCache
    more: Any = {"exact": True, "step_size": 3}  # noqa: RUF012

    def open(self, data: Any, namespace: str) -> tuple[Any, list[int]]:
        self.pure = False  # not exact to the token
        session, tokens = super().open(data, namespace)
        assert session.cached_tokens % 3 == 0
        return session, tokens

    def insert_one(self, data: Any, namespace: str, beyond: int) -> None:
        tokens = self.sequence(data, namespace)
        with pytest.raises(ValueError, match="exact cache"):
            self.cache.insert(tokens, self.model.make_cache(), namespace=namespace)

    def resumes(self, tokens: list[int], namespace: str) -> None:
        """With room for everything, each prefilled chunk is there; how much of a sequence was, only the tree knows."""
        for node in inside.nodes(self.cache):
            if node.is_leaf and not (node.payload.live or node.payload.is_kept):
                assert node.end % 3 == 0, self.cache.dump()

    def pinned_length(self, tokens: list[int]) -> int:
        return (len(tokens) - 1) // 3 * 3

    def warmed_length(self, tokens: list[int]) -> int:
        return len(tokens) // 3 * 3
