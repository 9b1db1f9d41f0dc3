"""Random walks of rows beside sessions of two threads, with several live slots: every answer is a cold run's.

A session that another thread holds has state that this thread must not read. So rows and sessions have to find, copy or
evaluate again what is live there alone, live in another slot as well, or stored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest

from radixcache import CacheBusyError, PrefixCache, Row, Session
from radixcache.layers.trials import STORED_TOLERANCES
from tests.groups.cold import ROUNDING, cold, error, shared_model
from tests.prompts import tokens

KINDS = ("llama", "qwen3_next", pytest.param("gemma3_text", marks=pytest.mark.slow))
STEPS = 150


class Walk:
    def __init__(self, kind: str, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.model = shared_model(kind)
        bits = draw.choice([None, None, 8])
        self.bits = None if kind == "qwen3_next" else bits  # rounding can change its choice of experts
        budget_bytes, slots = draw.choice([1 << 30, 600_000, 300_000]), draw.randint(1, 3)
        interval = draw.choice([40, 2048])
        self.cache = PrefixCache(
            self.model, budget_bytes=budget_bytes, live_slots=slots, stored_bits=self.bits, checkpoint_interval=interval
        )
        self.group = self.cache.begin_many(capacity=100_000, segment_bytes=draw.choice([0, 0, None]))
        self.rows: dict[Row, list[int]] = {}
        self.known = [tokens(number, 30 + 20 * number) for number in range(1, 4)]
        self.other = ThreadPoolExecutor(1)
        self.held: Session | None = None

    def run(self) -> None:
        actions = [self.admit] * 5 + [self.prefill] * 5 + [self.step] * 4 + [self.close] * 2
        actions += [self.serve] * 4 + [self.hold] * 3 + [self.fetch, self.forget]
        for _ in range(STEPS):
            with suppress(CacheBusyError):
                self.draw.choice(actions)()
            self.group.check()
            self.cache.check()
        self.release()
        self.group.close()
        self.cache.close()
        self.other.shutdown()

    def prompt(self) -> list[int]:
        """The beginning of something that is known, mostly of a row's tokens, and some more."""
        rows = [*self.rows.values()]
        known = self.draw.choice(rows if rows and self.draw.random() < 0.6 else self.known)
        more = [self.draw.randrange(250) for _ in range(self.draw.choice([1, 2, 5, 30]))]
        return [*known[: self.draw.randint(0, len(known))], *more][:220]

    def agree(self, logits: mx.array | np.ndarray, said: Sequence[int]) -> None:
        tolerance = STORED_TOLERANCES[self.bits] if self.bits else ROUNDING
        assert error(mx.array(logits), cold(self.model, said)) < tolerance, (len(said), self.bits)

    def admit(self) -> None:
        if len(self.rows) < 5:
            prompt = self.prompt()
            marks = sorted(self.draw.sample(range(1, len(prompt) + 1), min(len(prompt), 2)))
            row = self.group.admit(prompt, marks=marks, mark_tokens=self.draw.choice([1, 64]))
            self.rows[row] = prompt

    def prefill(self) -> None:
        waiting = [row for row in self.rows if row.prompt_left]
        if waiting:
            row = self.draw.choice(waiting)
            logits = self.group.prefill(self.model, row, self.draw.choice([None, None, 7, 33]))
            if logits is not None:
                self.agree(logits[0, -1], self.rows[row])

    def step(self) -> None:
        ready = [row for row in self.rows if not row.prompt_left]
        if ready:
            some = self.draw.sample(ready, self.draw.randint(1, len(ready)))
            given = [self.draw.randrange(250) for _ in some]
            logits = self.group.step(self.model, some, given)
            for at, (row, token) in enumerate(zip(some, given, strict=True)):
                self.rows[row].append(token)
                self.agree(logits[at, -1], self.rows[row])

    def close(self) -> None:
        if self.rows:
            row = self.draw.choice([*self.rows])
            self.known = [*self.known[-12:], self.rows.pop(row)]
            row.close()

    def serve(self) -> None:
        prompt = self.prompt()

        def served() -> np.ndarray:
            with self.cache.begin(prompt) as session:
                session.prefill(self.model)
                return np.array(session.step(self.model, prompt[-1:])[0, -1].astype(mx.float32))

        found = self.other.submit(served).result() if self.draw.random() < 0.5 else served()
        self.agree(found, prompt)
        self.known = [*self.known[-12:], prompt]

    def hold(self) -> None:
        """Let a session of the other thread stay open, or close it."""
        if self.held is not None:
            self.release()
            return
        prompt, evaluates = self.prompt(), self.draw.random() < 0.5

        def held() -> Session:
            session = self.cache.begin(prompt)
            if evaluates:
                session.prefill(self.model)
            return session

        self.held = self.other.submit(held).result()

    def release(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            self.other.submit(held.close).result()

    def fetch(self) -> None:
        prompt = self.prompt()
        caches, rest = self.cache.fetch(prompt)
        self.agree(self.model(mx.array(rest)[None], cache=caches)[0, -1], prompt)
        self.cache.insert(prompt, caches)

    def forget(self) -> None:
        self.draw.choice([self.cache.clear, lambda: self.cache.reclaim(100_000)])()


# Each of the first two finds one of the mutants of what rows read in place with llama.
@pytest.mark.parametrize(
    "seed", [7, 16, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, 3, 4, 5, 6, 8))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_sessions_of_two_threads_answer_as_cold_runs_do(kind: str, seed: int) -> None:
    Walk(kind, seed).run()
