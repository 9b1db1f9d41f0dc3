"""Which checkpoints go first: those between which few tokens lie, and none that is worth its bytes before others go."""

from __future__ import annotations

import pytest

from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.prefix_cache import PrefixCache
from radixcache.sized_cache import sized_cache
from radixcache.tree.state_tree import WORTH, is_costly
from tests.inside import nodes

INTERVAL = 32
#: What resumes at one offset: a checkpoint of recurrent layers, or the last 8 tokens of a window.
LAYOUTS = {"recurrent": SizedLayout(1, 64), "window": SizedLayout(1, 0, [(8, 8)])}


def cache_of(layout: SizedLayout, budget_bytes: int) -> PrefixCache:
    return sized_cache(
        layout, budget_bytes=budget_bytes, checkpoint_interval=INTERVAL, checkpoint_budget_bytes=1 << 20, tail_tokens=1
    )


def serve(cache: PrefixCache, first: int, length: int) -> int:
    """Serve the prompt of so many tokens that begins with this one; returns how many were cached."""
    with cache.begin(range(first, first + length)) as session:
        session.prefill(SizedModel())
        session.step(SizedModel(), session.prompt[-1:])
    cache.check()
    return session.cached_tokens


def give_up_something(cache: PrefixCache) -> None:
    stats = cache.stats
    cache.reclaim(stats.live_bytes + stats.paged_bytes - 1)
    cache.check()


def offsets(cache: PrefixCache) -> list[int]:
    """Where the paths have checkpoints for the distance alone."""
    found = ((node.end, node.payload.checkpoint) for node in nodes(cache))
    return sorted(end for end, checkpoint in found if checkpoint is not None and checkpoint.kind == "interval")


def test_a_checkpoint_is_costly_while_its_neighbours_are_close() -> None:
    assert is_costly(WORTH * 64 - 1, 64)
    assert not is_costly(WORTH * 64, 64)
    assert not is_costly(0, 0)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_long_prompt_evicts_nobody_for_checkpoints_that_are_costly(kind: str) -> None:
    layout = LAYOUTS[kind]
    # Room for both prompts, where each ends, and the point state of the live caches; not for one on the way besides.
    cache = cache_of(layout, 500 + 900 + 5 * 64)
    serve(cache, 0, 500)
    serve(cache, 1000, 900)
    assert serve(cache, 0, 500) == 499


def test_what_the_tree_has_of_a_prompt_counts_for_how_close_its_own_checkpoints_are() -> None:
    # Room for where two turns end, one checkpoint on the way, and the live caches; the second turn is 100 tokens long.
    cache = cache_of(LAYOUTS["window"], 300 + 1100 + 6 * 64)
    serve(cache, 0, 300)
    serve(cache, 5000, 1000)
    assert serve(cache, 5000, 1100) == 1000
    assert serve(cache, 0, 300) == 299


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_path_that_loses_its_end_is_resumed_on_the_way(kind: str) -> None:
    cache = cache_of(LAYOUTS[kind], 3000)
    serve(cache, 0, 2000)
    serve(cache, 5000, 1500)
    assert WORTH * 64 <= serve(cache, 0, 2000) < 1500


def test_those_go_first_between_whose_neighbours_the_fewest_tokens_lie() -> None:
    cache = cache_of(LAYOUTS["recurrent"], 1 << 20)
    serve(cache, 0, 330)
    path = list(range(32, 321, 32))
    assert offsets(cache) == path
    for gone in (320, 32, 96, 160, 224):
        give_up_something(cache)
        path.remove(gone)
        assert offsets(cache) == path


def test_what_is_worth_its_bytes_stays_as_long_as_its_path_has_an_end_to_lose() -> None:
    cache = cache_of(LAYOUTS["recurrent"], 1 << 20)
    serve(cache, 0, 1290)
    serve(cache, 5000, 10)  # the first path is nowhere live
    while len(offsets(cache)) > 2:
        give_up_something(cache)
    assert offsets(cache) == [512, 1024]  # 1,024 and 778 tokens between the neighbours of either
    left = []
    while (end := max(node.end for node in nodes(cache))) > 10:
        left.append(end)
        give_up_something(cache)
    assert left == [1290, 1289, 1024, 512]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("budget_bytes", "resumed"), [(3007, 2878), (3008, 2879)])
def test_of_a_prompt_that_does_not_fit_is_kept_what_does(kind: str, budget_bytes: int, resumed: int) -> None:
    # Up to an offset it takes a byte a token, and twice the 64 of what resumes there: live, and in the tree.
    cache = cache_of(LAYOUTS[kind], budget_bytes)
    serve(cache, 0, 3001)
    for length in (3100, 4000):
        assert serve(cache, 0, length) == resumed
        stats = cache.stats
        assert stats.live_bytes + stats.paged_bytes <= budget_bytes
