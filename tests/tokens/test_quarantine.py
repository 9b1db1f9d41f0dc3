"""Quarantine: which prompts begin with a quarantined prefix, against a plain list of them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given, settings

from radixcache.tokens import Keys, Quarantine

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=6)
names = st.sampled_from(["", "tenant"])


def keys(sequence: list[int]) -> Keys:
    return np.array(sequence, dtype=np.int64)


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.tuples(names, sequences, st.integers(0, 5)), max_size=12),
    asked=st.lists(st.tuples(names, sequences), min_size=1, max_size=12),
    cleared=st.sampled_from([None, "", "tenant", "neither"]),
)
@example(entries=[("", [1, 2], 0), ("", [1, 2, 0], 2)], asked=[("", [1, 2, 0])], cleared="neither")
def test_a_prompt_is_quarantined_from_the_smallest_start_of_the_prefixes_that_it_begins_with(
    entries: list[tuple[str, list[int], int]], asked: list[tuple[str, list[int]]], cleared: str | None
) -> None:
    quarantine = Quarantine()
    plain: list[tuple[str, list[int], int]] = []
    for namespace, sequence, start in entries:
        start %= len(sequence)
        quarantine.add(keys(sequence), start, namespace)
        plain.append((namespace, sequence, start))
        quarantine.check()
    for _ in range(2):
        for namespace, prompt in asked:
            starts = [start for name, k, start in plain if name == namespace and prompt[: len(k)] == k]
            assert quarantine.offset(keys(prompt), namespace) == (min(starts) if starts else None)
            assert quarantine.limit(keys(prompt), namespace) == min(starts, default=len(prompt))
        assert len(quarantine) == len({(name, tuple(k)) for name, k, _ in plain})
        quarantine.clear(cleared)
        quarantine.check()
        plain = [entry for entry in plain if cleared not in (None, entry[0])]


def test_beyond_its_capacity_the_prefix_added_longest_ago_goes() -> None:
    quarantine = Quarantine(capacity=3)
    for first in range(5):
        quarantine.add(keys([first, 1]), 1, "")
        quarantine.check()
    found = [quarantine.offset(keys([first, 1, 7]), "") for first in range(5)]
    assert found == [None, None, 1, 1, 1]


def test_it_holds_no_tokens() -> None:
    quarantine = Quarantine()
    secret = 123_456_789_123
    quarantine.add(keys([secret] * 50), 3, "tenant")
    text = repr(vars(quarantine))
    assert str(secret) not in text
    assert keys([secret]).tobytes() not in b"".join([name[2] for name in quarantine._entries])
