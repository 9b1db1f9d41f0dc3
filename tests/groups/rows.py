"""What the tests of groups share: groups that are checked, rows that are prefilled and stepped, models that watch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import Group, PrefixCache, Row
from radixcache.groups.passes import Way
from tests import inside
from tests.groups.cold import ROUNDING, cold, cold_last, error, opened, serve
from tests.prompts import tokens

SYSTEM = tokens(1, 60)
#: Two on the system prompt, that have 9 and 30 tokens of their own, and two that have nothing in common.
PROMPTS = ([*SYSTEM, *tokens(2, 9)], [*SYSTEM, *tokens(3, 30)], tokens(4, 40), tokens(5, 23))
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


class Watched:
    """A model that notes the shape (R, T) of each pass; it may raise in front of the n-th, or behind a bad token."""

    def __init__(
        self, model: Any, bad: int | None = None, *, fails_at: int = 0, error: type[BaseException] = ValueError
    ) -> None:
        self.model, self.bad, self.fails_at, self.error = model, bad, fails_at, error
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, ids: mx.array, **named: Any) -> mx.array:
        self.shapes.append(tuple(ids.shape))
        if len(self.shapes) == self.fails_at:
            raise self.error("the model broke off")
        logits: mx.array = self.model(ids, **named)
        if self.bad is not None and self.bad in np.array(ids):
            raise ValueError("a bad token")
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


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
        serve(cache, model, stores)
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


class Talk:
    """What the rows of a group are told, drafted or not, and what they answer.

    Attributes:
        rows: those that were there first.
        texts: the tokens of each row that was prefilled.
        next: the likeliest token behind them.
    """

    def __init__(self, group: Group, model: Any, alone: Any = None) -> None:
        """`alone`: what answers cold, in place of the model."""
        self.group, self.model, self.alone = group, model, model if alone is None else alone
        self.rows, self.random = group.rows, random.Random(0)
        self.texts: dict[Row, list[int]] = {}
        self.next: dict[Row, int] = {}
        self._answers: dict[Row, list[mx.array]] = {}

    def prefill(self, *rows: Row) -> None:
        """Prefill these rows side by side."""
        for row in rows:
            self.texts[row], self._answers[row] = row.prompt.tolist(), []
        for row, logits in self.group.prefill_many(self.model, rows):
            self.next[row] = int(mx.argmax(logits[0, 0]))

    def join(self, prompt: Sequence[int]) -> Row:
        """Admit and prefill another row."""
        row = self.group.admit(prompt)
        self.prefill(row)
        return row

    def step(self, *rows: Row) -> None:
        """Step these rows with their likeliest tokens."""
        logits = self.group.step(self.model, rows, [self.next[row] for row in rows])
        for row, found in zip(rows, logits, strict=True):
            self._say(row, [self.next[row]], found)
        self.group.check()

    def check_drafts(self, *rows: Row, most: int = 4) -> None:
        """Draft what is right, wrong or both, differently long in each row; each keeps what is right."""
        drafts = [self._drafted(row, self.random.randint(0, most)) for row in rows]

        def accept(logits: mx.array) -> list[int]:
            choices = np.array(mx.argmax(logits, axis=-1))
            return [_right_tokens(its, chosen) for its, chosen in zip(drafts, choices, strict=True)]

        self.keep(rows, drafts, accept)

    def keep(self, rows: Sequence[Row], drafts: list[list[int]], accept: Callable[[mx.array], list[int]]) -> None:
        """Check these drafts, and keep as many of each row as `accept` says of the logits (R, T, V)."""
        seen: list[mx.array] = []

        def see(logits: mx.array) -> list[int]:
            seen.append(logits)
            return accept(logits)

        counts = self.group.check_drafts(self.model, rows, drafts, see)
        for row, its, count, logits in zip(rows, drafts, counts, seen[0], strict=True):
            self._say(row, its[:count], logits[:count])
        self.group.check()

    def check(self) -> None:
        """Compare all answers with cold runs."""
        for row, answers in self._answers.items():
            if answers:
                wanted = cold_last(self.alone, self.texts[row], len(answers))
                assert all(error(*each) < ROUNDING for each in zip(answers, wanted, strict=True)), row

    def _drafted(self, row: Row, count: int) -> list[int]:
        """The next token and so many more: what the model will say, up to a random place, then something else."""
        text, right = [*self.texts[row], self.next[row]], self.random.randint(0, count)
        for at in range(count):
            likeliest = int(mx.argmax(cold(self.alone, text)))
            text.append(likeliest if at < right else (likeliest + 1 + self.random.randint(0, 200)) % 250)
        return text[len(self.texts[row]) :]

    def _say(self, row: Row, its: list[int], logits: mx.array) -> None:
        mx.eval(logits)
        self.texts[row] += its
        self._answers[row] += list(logits)
        self.next[row] = int(mx.argmax(logits[-1]))
        assert row.known_keys().tolist() == self.texts[row]


def _right_tokens(drafts: list[int], choices: np.ndarray) -> int:
    """How many drafted tokens are those that were chosen in front of them; the first one is no draft."""
    pairs = zip(drafts[1:], choices, strict=False)
    return 1 + next((at for at, (token, chosen) in enumerate(pairs) if token != chosen), len(drafts) - 1)


@contextmanager
def talking(
    kind: str,
    prompts: Sequence[Any],
    *,
    stores: Sequence[int] = (),
    budget_bytes: int = 1 << 30,
    watches: bool = False,
    **group: Any,
) -> Iterator[Talk]:
    """A group of these rows; their answers are checked, and what they leave. `watches`: the model is a Watched one."""
    model, cache = opened(kind, budget_bytes=budget_bytes)
    if stores:
        serve(cache, model, stores)
    with cache.begin_many(prompts, **{"capacity": 6000, **group}) as opened_group:
        talk = Talk(opened_group, Watched(model) if watches else model, model)
        yield talk
        talk.check()
        opened_group.check()
    cache.check()
    for text in talk.texts.values():
        serve(cache, model, [*text, 7])


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
