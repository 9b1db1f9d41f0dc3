"""The index finds the longest chain token for token, and lets go of what was used longest ago."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from radixcache.stores.block import Block, root_key
from radixcache.stores.index import Index, Link
from tests.stores.made import MODEL, chain, stated

ROOT = root_key(MODEL, "")


def _matched(index: Index, tokens: Sequence[int], grid: int = 0, at_checkpoints: bool = False) -> list[Link]:
    return index.match(ROOT, np.array(tokens, np.int64), grid, at_checkpoints)


def _index(*chains: list[Block]) -> Index:
    index = Index()
    for number, block in enumerate(block for each in chains for block in each):
        index.add(block.head, 10, number)
    return index


def _end(links: list[Link]) -> int:
    return links[-1].end if links else 0


def test_a_chain_goes_on_from_inside_of_a_block_and_is_used_with_it() -> None:
    whole = chain([1, 2, 3, 4], step=4)
    branch = _following(whole[0], [8, 9], cut=3)
    twig = _following(branch[0], [7], cut=1)
    index = _index(whole, branch, twig, chain([5]))
    index.check()
    links = _matched(index, [1, 2, 3, 8, 9, 6])
    assert [(link.start, link.end, link.block_end) for link in links] == [(0, 3, 4), (3, 5, 5)]
    assert [(link.start, link.end) for link in _matched(index, [1, 2, 3, 8, 7])] == [(0, 3), (3, 4), (4, 5)]
    assert _end(_matched(index, [1, 2, 8, 9])) == 2, "it is behind three of its tokens, not two"
    assert _end(_matched(index, [1, 2, 3, 4, 8, 9])) == 4, "nor behind all four"
    assert [link.end for link in index.match(ROOT, np.array([1, 2, 3, 8, 9]), is_whole=True)] == []
    index.touch(twig[0].head.key, 50)
    oldest = index.oldest()
    assert oldest is not None
    assert oldest.tokens.tolist() == [5]


def test_keys_tell_where_a_block_begins_inside_of_another_one() -> None:
    whole = chain([1, 2, 3, 4], step=4)[0]
    keys = {each.head.key for cut in range(4) for each in _following(whole, [3, 4], cut)}
    keys |= {each.head.key for cut in range(4) for each in _following(whole, [cut, 3, 4])}
    assert len(keys) == 8


def test_a_chain_longer_than_python_may_nest_64_bit_tokens_and_grids_are_matched() -> None:
    tokens = list(range(1200))
    assert _end(_matched(_index(chain(tokens, step=1)), tokens)) == 1200
    index = _index(chain([5, 1 << 40]), chain([5, -(1 << 40)]), chain(range(8), grid=0), chain(range(4), grid=4))
    assert _end(_matched(index, [5, 1 << 40])) == 2
    assert _end(_matched(index, [5, (1 << 40) + (1 << 32)])) == 1
    assert [_end(_matched(index, range(8), grid=grid)) for grid in (4, 8, 0)] == [4, 0, 8]


SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=7)


@given(
    st.lists(st.tuples(SEQUENCES, st.integers(1, 3)), max_size=6),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 2), SEQUENCES), max_size=4),
    SEQUENCES,
    st.data(),
)
@settings(max_examples=60)
def test_a_match_is_as_long_as_any_stored_chain_agrees(
    stored: list[tuple[list[int], int]],
    branches: list[tuple[int, int, list[int]]],
    tokens: list[int],
    data: st.DataObject,
) -> None:
    blocks = {block.head.key: block for ids, step in stored for block in chain(ids, step)}
    for number, cut, ids in branches if blocks else ():
        inside = list(blocks.values())[number % len(blocks)]
        if cut < len(inside.head.tokens):
            blocks |= {each.head.key: each for each in _following(inside, ids, cut)}
    index = Index()
    for number, block in enumerate(data.draw(st.permutations(list(blocks.values())))):
        index.add(block.head, 1, number)
        index.check()
    for key in data.draw(st.lists(st.sampled_from(sorted(blocks)), unique=True)) if blocks else ():
        index.drop(key, "block")
        del blocks[key]
        index.check()
    links = _matched(index, tokens)
    assert _end(links) == _longest(blocks, tokens)
    for before, link in zip([None, *links], links, strict=False):
        assert blocks[link.key].head.parent == (before.key if before else ROOT)


def _longest(blocks: dict[bytes, Block], tokens: list[int]) -> int:
    """How far the tokens of any block, with those of all before it, agree; each chain is walked by itself."""
    longest = 0
    for block in blocks.values():
        prefix, head, cut = list[int](), block.head, 0
        while True:
            prefix = [*head.tokens.tolist()[: cut or None], *prefix]
            if head.parent == ROOT:
                break
            if head.parent not in blocks:
                prefix = []
                break
            head, cut = blocks[head.parent].head, head.cut
        agreed = next((at for at, (a, b) in enumerate(zip(prefix, tokens, strict=False)) if a != b), None)
        longest = max(longest, min(len(prefix), len(tokens)) if agreed is None else agreed)
    return longest


def _following(block: Block, tokens: list[int], cut: int = 0) -> list[Block]:
    head = block.head
    start = head.start + (cut or len(head.tokens))
    return [stated(replace(head, parent=head.key, start=start, tokens=np.array(tokens, np.int64), cut=cut))]
