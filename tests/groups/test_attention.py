"""Cascade attention gives what one softmax over everything that a row sees gives, in whatever parts it is read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache.groups import attention
from radixcache.groups.attention import BLOCK_TOKENS, Readers, cascade

#: Who reads each segment, of 5 rows; None: all.
LEVELS: list[list[tuple[int, ...] | None]] = [
    [],
    [None],
    [None, None],
    [None, (0, 1), (3, 4)],
    [(4, 1), (0, 2, 3)],
    [(2,), (2,), (0, 4), None],
]
ROWS = 5


def everything(
    queries: np.ndarray,
    tails: tuple[np.ndarray, np.ndarray],
    segments: list[tuple[np.ndarray, np.ndarray]],
    readers: list[tuple[int, ...] | None],
    seen: np.ndarray,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attention of each row by itself, in float64: (R, Hq, T, Dv). `seen` is bool, (R, T, C)."""
    rows, query_heads, tokens, width = queries.shape
    group = query_heads // tails[0].shape[1]
    out = np.zeros((rows, query_heads, tokens, tails[1].shape[-1]))
    for row in range(rows):
        its = [pair for pair, read in zip(segments, readers, strict=True) if read is None or row in read]
        for head in range(query_heads):
            keys = np.concatenate([*(pair[0][0, head // group] for pair in its), tails[0][row, head // group]])
            values = np.concatenate([*(pair[1][0, head // group] for pair in its), tails[1][row, head // group]])
            scores = queries[row, head] @ keys.T / np.sqrt(width)
            in_place = len(keys) - seen.shape[-1]
            scores[:, in_place:][~seen[row]] = -np.inf
            if sinks is not None:
                scores = np.concatenate([scores, np.full((tokens, 1), sinks[head])], axis=1)
                values = np.concatenate([values, np.zeros((1, values.shape[1]))])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[row, head] = weights / weights.sum(axis=1, keepdims=True) @ values
    return out


def arrays(seed: int, rows: int, tokens: int, heads: int, group: int, scale: float, segments: int) -> Any:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, scale, shape).astype(np.float32)

    queries = normal(rows, heads * group, tokens, 16)
    tails = normal(rows, heads, 7, 16), normal(rows, heads, 7, 8)
    return queries, tails, [(normal(1, heads, 3 + n, 16), normal(1, heads, 3 + n, 8)) for n in range(segments)]


def cascaded(
    queries: np.ndarray,
    tails: tuple[np.ndarray, ...],
    segments: list[tuple[np.ndarray, np.ndarray]],
    readers: list[tuple[int, ...] | None],
    *,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    scale: float = 0.25,
) -> np.ndarray:
    """What `cascade` gives of these arrays."""
    given = {name: mx.array(array) for name, array in (("mask", mask), ("sinks", sinks)) if array is not None}
    pairs = [(mx.array(keys), mx.array(values)) for keys, values in segments]
    known = Readers(len(queries), readers)
    return np.array(cascade(mx.array(queries), *map(mx.array, tails), known, pairs, scale=scale, **given))


@pytest.mark.parametrize("readers", LEVELS)
@pytest.mark.parametrize(("heads", "group"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_get_what_one_softmax_over_all_that_they_see_gives(
    readers: list[tuple[int, ...] | None], heads: int, group: int, with_sinks: bool
) -> None:
    queries, tails, segments = arrays(1, ROWS, 1, heads, group, 1.0, len(readers))
    padding = np.arange(7) >= np.array([0, 3, 6, 2, 0])[:, None, None]
    sinks = np.linspace(-1, 2, heads * group).astype(np.float32) if with_sinks else None
    found = cascaded(queries, tails, segments, readers, mask=padding[:, None], sinks=sinks, scale=16**-0.5)
    wanted = everything(queries, tails, segments, readers, padding, sinks)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-6
    if readers and readers != [None]:
        others = everything(queries, tails, segments, [(0,)] * len(readers), padding, sinks)
        assert np.abs(found - others).max() > 1e-2


@pytest.mark.parametrize("fewest_powers", [0, 4096])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("segments_read", [0, 3])
def test_one_row_alone_gets_what_one_softmax_over_all_parts_gives(
    segments_read: int, with_sinks: bool, fewest_powers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, group = 2, 3
    monkeypatch.setattr(attention, "FEWEST_POWERS", fewest_powers)
    queries, tails, segments = arrays(8, 1, 1, heads, group, 3.0, segments_read)
    seen = np.arange(7)[None, None] >= 2
    sinks = np.linspace(-1, 2, heads * group).astype(np.float32) if with_sinks else None
    found = cascaded(queries, tails, segments, [None] * segments_read, mask=seen[:, None], sinks=sinks)
    wanted = everything(queries, tails, segments, [None] * segments_read, seen, sinks)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-5


def test_so_many_tokens_that_they_are_attended_in_blocks_see_no_token_before_its_time() -> None:
    tokens, columns = 2 * BLOCK_TOKENS + 5, 2 * BLOCK_TOKENS + 9
    random = np.random.default_rng(5)
    queries = random.normal(0, 1, (2, 4, tokens, 16)).astype(np.float32)
    tails = tuple(random.normal(0, 1, (2, 2, columns, width)).astype(np.float32) for width in (16, 8))
    _, _, segments = arrays(6, 2, 1, 2, 2, 1.0, 2)
    readers: list[tuple[int, ...] | None] = [None, (1,)]
    padding = np.arange(columns) >= np.array([0, 3])[:, None, None]
    seen = np.tril(np.ones((tokens, columns), dtype=bool), columns - tokens) & padding
    for mask, of_each in ((seen[:, None], seen), (seen[0], seen[[0, 0]])):  # one for each row, and one for all
        found = cascaded(queries, tails, segments, readers, mask=mask)
        assert np.abs(found - everything(queries, tails, segments, readers, of_each, None)).max() < 5e-6


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1.0, 12.0]), where=st.integers(0, 2))
def test_scores_of_any_size_in_any_part_do_not_overflow(seed: int, scale: float, where: int) -> None:
    """One part may hold scores that make all others count for nothing."""
    queries, tails, segments = arrays(seed, 3, 1, 1, 2, 1.0, 2)
    (segments[where][0] if where < 2 else tails[0])[...] *= scale
    readers: list[tuple[int, ...] | None] = [None, (0, 2)]
    everybody = np.ones((3, 1, 7), dtype=bool)
    found = cascaded(queries, tails, segments, readers)
    assert np.abs(found - everything(queries, tails, segments, readers, everybody, None)).max() < 1e-5
