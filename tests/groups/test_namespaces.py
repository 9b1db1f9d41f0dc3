"""Rows of one group may be of several namespaces: they decode together, and nothing of one shows in another."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import Group, PrefixCache, Row
from tests import inside
from tests.groups.cold import opened, shared_model
from tests.groups.rows import checked, prefilled
from tests.prompts import tokens

PROMPT = tokens(1, 60)


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def model(request: Any) -> Any:
    return shared_model(request.param)


def admitted(group: Group, model: Any, namespace: str, prompt: list[int] = PROMPT) -> tuple[Row, mx.array]:
    row = group.admit(prompt, namespace=namespace)
    return row, prefilled(group, model, row)


def test_an_open_row_of_another_namespace_is_not_shared_and_one_of_the_same_is(model: Any) -> None:
    cache = PrefixCache(model, budget_bytes=64 << 20)
    with cache.begin_many(capacity=1000) as group:
        admitted(group, model, "ann")
        longer = [*PROMPT, 5]
        assert group.sharable_tokens(np.array(longer), "ben") == 0
        assert group.sharable_tokens(np.array(longer), "ann") == len(PROMPT)
        ben, _ = admitted(group, model, "ben", longer)
        ann, _ = admitted(group, model, "ann", longer)
        assert (ben.cached_tokens, ben.matched_tokens, ben.reason) == (0, 0, None)
        assert ann.cached_tokens == len(PROMPT)
        assert group.used_tokens >= 2 * len(PROMPT), "nothing of ben's is counted with ann's"
        checked(cache, group)


def test_what_rows_stored_is_found_in_their_own_namespace_alone(model: Any) -> None:
    cache = PrefixCache(model, budget_bytes=64 << 20)
    with cache.begin_many(capacity=1000, namespace="group's") as group:
        for namespace in ("ann", "ben", None):
            row = group.admit(PROMPT, namespace=namespace)
            group.prefill(model, row)
        checked(cache, group)
    for namespace in ("ann", "ben", "group's"):
        assert cache.explain([*PROMPT, 3], namespace).resumable_tokens == len(PROMPT)
    assert cache.explain([*PROMPT, 3], "").resumable_tokens == 0
    cache.check()


def test_what_was_found_wrong_in_one_namespace_stays_trusted_in_another() -> None:
    model, cache = opened("llama", budget_bytes=64 << 20)
    for namespace in ("ann", "ben"):
        cache.warm(model, PROMPT, namespace)
    with cache.begin_many(capacity=1000) as group:
        rows = [admitted(group, model, name, [*PROMPT, 5])[0] for name in ("ann", "ben")]
        with cache.begin([*PROMPT, 5], namespace="ann") as session:
            inside.find_wrong(cache, session, len(PROMPT), 0)
        assert [row.clean_tokens for row in rows] == [0, len(PROMPT) + 1]
        checked(cache, group)
    assert cache.explain([*PROMPT, 5, 6], "ann").resumable_tokens == 0
    assert cache.explain([*PROMPT, 5, 6], "ben").resumable_tokens == len(PROMPT) + 1
