"""What the tests of groups share: groups that are checked, rows that are prefilled and stepped, models that watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import Group, PrefixCache, Row
from radixcache.groups.passes import Way
from tests import inside
from tests.groups.cold import ROUNDING, cold_last, error, opened
from tests.prompts import tokens

WAYS = {
    "llama": Way.SEGMENTS,
    "gemma3_text": Way.SEGMENTS,
    "gemma3n": Way.SEGMENTS,
    "gemma4_text": Way.SEGMENTS,
    "gpt_oss": Way.SEGMENTS,
    "qwen3_next": Way.SEGMENTS,
    "recurrent_gemma": Way.SEGMENTS,
    "mamba2": Way.SEGMENTS,
    "deepseek_v3": Way.BATCH,
    "plamo2": Way.BATCH,
    "kimi_linear": Way.BATCH,
    "gpt_bigcode": Way.SINGLE,
}
#: Kinds of which rows are in one batch.
TOGETHER = [
    kind if kind in ("llama", "gemma3n", "qwen3_next") else pytest.param(kind, marks=pytest.mark.slow)
    for kind, way in WAYS.items()
    if way is not Way.SINGLE
]


def stored(cache: PrefixCache, model: Any, prompt: Sequence[int], marks: Sequence[int] = ()) -> None:
    """Evaluate all of a prompt in a session of its own."""
    with cache.begin(prompt, marks=marks) as session:
        session.prefill(model)
        session.step(model, session.prompt[-1:])
    cache.check()


def checked(cache: PrefixCache, group: Group) -> None:
    cache.check()
    group.check()
    assert cache.stats.live_bytes == group.nbytes + inside.slots_bytes(cache)


@contextmanager
def grouped(
    kind: str, prompts: Sequence[Any] = (), *, stores: Sequence[int] = (), interval: int = 2048, **group: Any
) -> Iterator[tuple[Any, PrefixCache, Group]]:
    """A group of these rows, checked at the end. `stores`: a prompt that is in the tree before."""
    model, cache = opened(kind, checkpoint_interval=interval)
    if stores:
        stored(cache, model, stores)
    with cache.begin_many(prompts, **group) as opened_group:
        yield model, cache, opened_group
        checked(cache, opened_group)
    cache.check()


def prefilled(group: Group, model: Any, row: Row, chunk: int | None = None) -> mx.array:
    """Logits (V,) of the row's last prompt token."""
    while True:
        logits = group.prefill(model, row, chunk)
        if logits is not None:
            assert logits.shape[:2] == (1, 1)
            return logits[0, 0]


def decoded(group: Group, model: Any, rows: list[Row], logits: list[mx.array], steps: int) -> list[list[int]]:
    """Greedy tokens of each row, every step's logits compared with those of a cold run of all of them."""
    said: list[list[int]] = [[] for _ in rows]
    answers: list[list[mx.array]] = [[] for _ in rows]
    token = mx.argmax(mx.stack(logits), axis=-1)
    for _ in range(steps):
        found = group.step(model, rows, token)
        assert found.shape[:2] == (len(rows), 1)
        for row, replies, answered, last, each in zip(rows, said, answers, token.tolist(), found, strict=True):
            replies.append(last)
            answered.append(each[0])
            assert row.known_keys().tolist()[-len(replies) :] == replies
        token = mx.argmax(found[:, -1], axis=-1)
    for row, answered in zip(rows, answers, strict=True):
        wanted = cold_last(model, row.known_keys().tolist(), steps)
        assert all(error(*each) < ROUNDING for each in zip(answered, wanted, strict=True))
    return said


class Failing:
    """Passes calls on to a model, and raises at the n-th."""

    def __init__(self, model: Any, at: int, error: type[BaseException]) -> None:
        self.model, self.at, self.error, self.calls = model, at, error, 0
        self.layers = model.layers

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.calls += 1
        if self.calls == self.at:
            raise self.error("the model broke off")
        return self.model(ids, cache=cache)


class Counting:
    """A model that notes the shape (R, T) of each pass, and raises behind one that has a bad token."""

    def __init__(self, model: Any, bad: int | None = None) -> None:
        self.model, self.bad = model, bad
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, ids: mx.array, **named: Any) -> mx.array:
        self.shapes.append(tuple(ids.shape))
        logits: mx.array = self.model(ids, **named)
        if self.bad is not None and self.bad in np.array(ids):
            raise ValueError("a bad token")
        return logits


def known(model: Any, budget_bytes: int | None = None, **more: Any) -> PrefixCache:
    """A cache that has seen its model run."""
    cache = PrefixCache(model, budget_bytes=budget_bytes, **more)
    with cache.begin(tokens(9, 8)) as session:
        session.prefill(model)
    cache.clear()
    return cache


def row_bytes(model: Any, length: int) -> int:
    """What one row with so many tokens takes of a budget without bounds."""
    with known(model).begin_many([tokens(1, length)], capacity=length) as group:
        group.prefill(model, group.rows[0])
        return group.nbytes
