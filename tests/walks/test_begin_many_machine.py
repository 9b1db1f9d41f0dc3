"""Random walks over groups, sessions, served requests and evictions: every answer is a cold run's, every byte counts.

Prompts are made of few blocks of few tokens, so that they share, part and go on from each other all the time, and are
longer than the windows. The models are real ones, tiny; what a cold run answers is worked out once per sequence.

Budgets go down to one byte and refuse nothing. They hold whenever nothing is open. What MLX has allocated is what the
cache has booked, with Python's collector off, also after passes that raise and requests that fail or are cancelled.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixcache import CacheFullError, Group, PrefixCache, Row
from radixcache.errors import ShiftError
from radixcache.groups.batch import LostStateError
from radixcache.layers.trials import STORED_TOLERANCES
from runner.engine.generator import ParallelGenerator
from tests import inside
from tests.engine.test_parallel_generate import load
from tests.groups.cold import ROUNDING, cold, error, shared_model
from tests.memory import active_bytes
from tests.prompts import common
from tests.sessions.test_failures import Fuse, fused, raising

#: With bits: what is not live is stored in so many.
KINDS = ("llama", "gemma3_text", "mamba", "llama in 8 bits")
SLOW_KINDS = ("llama_sliding", "qwen3_next", "recurrent_gemma", "gemma3_text in 8 bits")
BLOCKS = [[block * 8 + place % 5 for place in range(11)] for block in range(3)]
NAMESPACES = ("", "b")
#: Cells of a group: a handful of prompts, so that they run out at times.
CAPACITY = 160

prompts = st.tuples(
    st.lists(st.integers(0, len(BLOCKS) - 1), min_size=1, max_size=5), st.lists(st.integers(30, 33), max_size=4)
).map(lambda parts: tuple([token for block in parts[0] for token in BLOCKS[block]] + parts[1]))


class Groups(RuleBasedStateMachine):
    """A cache with sessions and at most two groups open on it."""

    kind = "llama"
    stored_bits: int | None = None

    @initialize(budget=st.sampled_from([0, 20, 200, 500, 10_000]), interval=st.sampled_from([13, 4096]))
    def make(self, budget: int, interval: int) -> None:
        self.model: Any = shared_model(self.kind)
        token_bytes = 3072
        gc.collect()
        gc.disable()
        sizes: Any = {"budget_bytes": max(1, budget * token_bytes), "checkpoint_interval": interval}
        self.cache = PrefixCache(self.model, stored_bits=self.stored_bits, **sizes)
        self.loaded = load(self.kind)
        inside.try_ways(self.loaded.model)
        self.other_bytes = active_bytes(collects=False)  # the models, and what cold runs answered
        self.groups: list[Group] = []
        self.asked: set[tuple[str, tuple[int, ...]]] = set()

    def rows(self) -> list[tuple[Group, Row]]:
        return [(group, row) for group in self.groups for row in group.rows]

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES), mark=st.integers(0, 60), steps=st.integers(0, 2))
    def serve(self, prompt: tuple[int, ...], namespace: str, mark: int, steps: int) -> None:
        with self.cache.begin(prompt, namespace=namespace, marks=[min(mark, len(prompt))]) as session:
            assert session.cached_tokens <= self.longest(prompt, namespace)
            session.prefill(self.model)
            for token in (*prompt[-1:], *(30 + index for index in range(steps))):
                logits = session.step(self.model, [token])
            self.agree(logits[0, -1], (*prompt, *(30 + index for index in range(steps))))
        self.asked.add((namespace, (*prompt, *(30 + index for index in range(steps)))))

    @precondition(lambda self: len(self.groups) < 2)
    @rule(namespace=st.sampled_from(NAMESPACES), segment_bytes=st.sampled_from([0, 12 * 1024, 1 << 30]))
    def open(self, namespace: str, segment_bytes: int) -> None:
        group = self.cache.begin_many(capacity=CAPACITY, namespace=namespace, segment_bytes=segment_bytes)
        self.groups.append(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), prompt=prompts, mark=st.integers(0, 60))
    def admit(self, data: st.DataObject, prompt: tuple[int, ...], mark: int) -> None:
        group = drawn(data, self.groups)
        before = self.cache.stats.requests
        longest = self.longest(prompt, group.namespace)
        used, evictions = group.used_tokens, self.cache.stats.evictions
        promised = group.sharable_tokens(np.array(prompt))
        try:
            row = group.admit(prompt, marks=[min(mark, len(prompt))])
        except CacheFullError:
            assert self.cache.stats.requests == before
            return
        assert row.remaining.tolist() == list(prompt[row.cached_tokens :])
        assert row.cached_tokens == row.position <= min(longest, len(prompt) - 1)
        assert row.cached_tokens <= row.matched_tokens <= longest
        assert (row.reason is None) == (row.cached_tokens == row.matched_tokens)
        if self.cache.stats.evictions == evictions:
            assert group.used_tokens - used == row.cached_tokens - promised
        if self.kind == "llama":
            # Whatever another row has in cells is shared.
            shared = [common(self.clean(each), prompt) for each in group.rows if each is not row]
            assert row.cached_tokens >= min(max(shared, default=0), len(prompt) - 1)

    @precondition(lambda self: self.rows())
    @rule(data=st.data(), chunk=st.sampled_from([1, 7, 20, None]))
    def prefill(self, data: st.DataObject, chunk: int | None) -> None:
        group = drawn(data, [group for group in self.groups if group.rows])
        rows = [row for row in group.rows if row.prompt_left]
        if not rows:
            return
        rows = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
        before = [row.position for row in rows]
        found = {}
        try:
            found.update(group.prefill_many(self.model, rows, chunk))
        except CacheFullError:
            assert len(rows) > 1 or rows[0].position == before[0]
            return
        assert set(found) == {row for row in rows if not row.prompt_left}
        for row, logits in found.items():
            if row.clean_tokens == row.position:
                self.agree(logits[0, 0], self.evaluated(row))

    @precondition(lambda self: self.rows())
    @rule(data=st.data(), token=st.integers(30, 33))
    def step(self, data: st.DataObject, token: int) -> None:
        group = drawn(data, [group for group in self.groups if group.rows])
        rows = [row for row in group.rows if not row.prompt_left]
        if not rows:
            return
        rows = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
        tokens = mx.array([30 + (token + index) % 4 for index in range(len(rows))])
        try:
            logits = group.step(self.model, rows, tokens)
        except CacheFullError:
            return
        for row, found in zip(rows, logits, strict=True):
            if row.clean_tokens == row.position:
                self.agree(found[0], self.evaluated(row))

    @precondition(lambda self: self.rows())
    @rule(
        data=st.data(),
        drafts=st.lists(st.lists(st.integers(30, 33), min_size=1, max_size=5), min_size=3, max_size=3),
        rejected=st.lists(st.integers(0, 4), min_size=3, max_size=3),
        fails=st.sampled_from([False, False, False, True]),
    )
    def check_drafts(self, data: st.DataObject, drafts: list[list[int]], rejected: list[int], fails: bool) -> None:
        """Any rows keep any part of what was drafted for them; or the caller fails, and all stays as it was."""
        group = drawn(data, [group for group in self.groups if group.rows])
        rows = [row for row in group.rows if not row.prompt_left][:3]
        if not rows:
            return
        drafts, before = drafts[: len(rows)], [self.known(row) for row in rows]
        kept = [max(1, len(each) - count) for each, count in zip(drafts, rejected, strict=False)]
        found: list[mx.array] = []

        def accept(logits: mx.array) -> list[int]:
            found.append(logits)
            mx.eval(logits)
            if fails:
                raise ValueError("refused")
            return kept

        try:
            group.check_drafts(self.model, rows, drafts, accept)
        except (CacheFullError, ValueError):
            assert [self.known(row) for row in rows] == before
            return
        for row, known, its, count, logits in zip(rows, before, drafts, kept, found[0], strict=True):
            assert self.known(row) == (*known, *its[:count])
            for at in range(count if row.clean_tokens == row.position else 0):
                self.agree(logits[at], (*known, *its[: at + 1]))

    @precondition(lambda self: self.rows())
    @rule(data=st.data(), begin=st.integers(0, 60), count=st.integers(0, 20), from_end=st.booleans())
    def remove(self, data: st.DataObject, begin: int, count: int, from_end: bool) -> None:
        group, row = drawn(data, self.rows())
        end = min(begin + count, row.position)
        begin = min(begin, end)
        if from_end:
            begin, end = row.position - (end - begin), row.position
        before = self.evaluated(row)
        try:
            group.remove(self.model, row, begin, end)
        except (CacheFullError, ShiftError):
            assert self.evaluated(row) == before
            return
        assert tuple(row.known_keys().tolist()[: row.position]) == before[:begin] + before[end:]
        assert begin == end or row.clean_tokens <= begin

    @precondition(lambda self: self.rows())
    @rule(data=st.data())
    def close_row(self, data: st.DataObject) -> None:
        group, row = drawn(data, self.rows())
        told, is_whole = self.clean(row), row.clean_tokens == row.position
        row.close()
        assert row not in group.rows
        self.stored(group, told, is_whole)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), leave=st.booleans())
    def close_group(self, data: st.DataObject, leave: bool) -> None:
        group = self.groups.pop(data.draw(st.integers(0, len(self.groups) - 1)))
        told = [(self.clean(row), row.clean_tokens == row.position) for row in group.rows]
        if leave:
            del group
        else:
            group.close()
            for each in told:
                self.stored(group, *each)
        for each, _ in told:
            self.asked.add(("", each))
            self.asked.add(("b", each))

    @rule(data=st.data(), prompt=prompts, after=st.integers(1, 3))
    def fail(self, data: st.DataObject, prompt: tuple[int, ...], after: int) -> None:
        """A pass of a session or of rows raises in the middle layer, before or behind what the layer writes."""
        is_row = bool(self.rows()) and data.draw(st.booleans())
        blow = raising(ValueError, data.draw(st.booleans()))
        with fused(self.model, Fuse(after, blow)), suppress(ValueError, CacheFullError, LostStateError):
            if is_row:
                group, row = drawn(data, self.rows())
                while True:
                    group.prefill(self.model, row, 5) if row.prompt_left else group.step(self.model, [row], [31])
            with self.cache.begin(prompt) as session:
                session.prefill(self.model, step_size=7)
        if is_row and row.lost is not None:  # its wrapped windows had been overwritten
            row.close()
        self.asked.add(("", prompt))

    @rule(
        asked=st.lists(st.tuples(prompts, st.sampled_from(["length", "cancelled", "error"])), max_size=4),
        tokens=st.integers(1, 30),
    )
    def serve_together(self, asked: list[tuple[tuple[int, ...], str]], tokens: int) -> None:
        """Requests of a ParallelGenerator on the cache; each ends in one way."""

        def refuse(_: Any) -> Any:
            raise ValueError("refused")

        loaded = self.loaded
        with ParallelGenerator(self.cache, loaded.model, loaded.tokenizer, capacity=4096, step_size=16) as generator:
            tickets = []
            for prompt, way in asked:
                sampler = refuse if way == "error" else None
                tickets.append(generator.submit(prompt, max_tokens=tokens, reserve=1, stop_tokens=(), sampler=sampler))
            for count, _ in enumerate(generator):
                for ticket, (_, way) in zip(tickets, asked, strict=True):
                    if way == "cancelled" and count >= 3:
                        ticket.cancel()
            for ticket, (prompt, way) in zip(tickets, asked, strict=True):
                done = ticket.completion
                assert done is not None
                assert done.done_reason == way or (way == "cancelled" and done.done_reason == "length"), done
                self.asked.add(("", (*prompt, *done.tokens)))

    @rule(keep=st.integers(0, 400))
    def reclaim(self, keep: int) -> None:
        self.cache.reclaim(keep * 1000)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for group in self.groups:
            group.check()
        stats = self.cache.stats
        if not self.groups:
            assert stats.live_bytes + stats.paged_bytes <= stats.budget_bytes
        assert stats.over_budget_bytes == max(0, stats.live_bytes + stats.paged_bytes - stats.budget_bytes)
        held, active = stats.live_bytes + stats.paged_bytes, active_bytes(collects=False)
        assert abs(active - self.other_bytes - held) <= 0.01 * held + 4096, (active, held)
        live = inside.slots_bytes(self.cache) + sum(group.nbytes for group in self.groups)
        assert stats.live_bytes == live

    def teardown(self) -> None:
        for group in getattr(self, "groups", []):
            group.close()
        if hasattr(self, "cache"):
            self.cache.check()
            self.cache.clear()
            assert self.cache.stats.live_bytes + self.cache.stats.paged_bytes == 0
        gc.enable()

    def agree(self, found: mx.array, prompt: tuple[int, ...]) -> None:
        before = active_bytes(collects=False)
        wanted = cold(self.model, prompt)
        self.other_bytes += active_bytes(collects=False) - before
        assert error(found, wanted) < (STORED_TOLERANCES[self.stored_bits] if self.stored_bits else ROUNDING)

    def known(self, row: Row) -> tuple[int, ...]:
        return tuple(row.known_keys().tolist())

    def evaluated(self, row: Row) -> tuple[int, ...]:
        return tuple(row.known_keys().tolist()[: row.position])

    def clean(self, row: Row) -> tuple[int, ...]:
        """What of a row may be stored or shared."""
        return tuple(row.clean_keys().tolist())

    def stored(self, group: Group, told: tuple[int, ...], is_whole: bool) -> None:
        """With room for it, what a row evaluated is resumed at its end, or before that where it was shifted."""
        self.asked.add((group.namespace, told))
        if told and self.cache.stats.budget_bytes >= 10_000 * 3072 and len(told) > 1:
            found = self.cache.explain([*told, 99], group.namespace).resumable_tokens
            assert found == len(told) or not (is_whole or self.kind == "llama")

    def longest(self, prompt: tuple[int, ...], namespace: str) -> int:
        """The longest prefix of a prompt that anybody has evaluated in a namespace."""
        known = [told for name, told in self.asked if name == namespace]
        known += [self.clean(row) for group, row in self.rows() if group.namespace == namespace]
        return max((common(told, prompt) for told in known), default=0)


def drawn(data: st.DataObject, values: list[Any]) -> Any:
    """One of some values. Hypothesis would keep them, and with them a group that is to be let go of."""
    return values[data.draw(st.integers(0, len(values) - 1))]


@pytest.mark.usefixtures("exact_allocations")
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)])
def test_groups_of_rows_keep_to_their_invariants_and_answer_as_cold_runs_do(kind: str) -> None:
    class OfKind(Groups):
        pass

    OfKind.kind, _, bits = kind.partition(" in ")
    OfKind.stored_bits = int(bits.removesuffix(" bits")) if bits else None
    run_state_machine_as_test(OfKind, settings=settings(max_examples=4, stateful_step_count=25, deadline=None))
