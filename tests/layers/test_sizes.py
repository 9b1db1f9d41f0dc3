"""SizedLayout: a cache changes nothing of its layout, and windows are stored once."""

from __future__ import annotations

from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache


def test_two_caches_on_one_layout_each_have_a_grid_of_their_own() -> None:
    layout, model = SizedLayout(1), SizedModel()
    exact = sized_cache(layout, budget_bytes=1 << 20, exact=True, step_size=16)
    plain = sized_cache(layout, budget_bytes=1 << 20)
    other = sized_cache(layout, budget_bytes=1 << 20, exact=True, step_size=32)
    prompt = list(range(70))
    for cache, resumed in ((exact, 64), (plain, 70), (other, 64), (exact, 64)):
        for _ in range(2):
            with cache.begin([*prompt, 1]) as session:
                session.prefill(model)
                session.step(model, [1])
        assert session.cached_tokens == resumed
        cache.check()


def test_of_windows_what_is_wanted_and_still_there_is_stored_once() -> None:
    layout = SizedLayout(4, windows=[(5, 3)])
    (window,) = layout.windows
    caches = layout.fresh()
    for keys in (20, 4):
        caches[0].advance(keys)
    # What the last pass saw: its 4 keys, and 4 in front of the first.
    assert layout.held(caches) == {window: [(16, 24)]}
    taken = layout.capture(caches, 10, 24, {window: [(10, 18), (22, 24)]})
    assert (layout.stored(taken, window), taken.nbytes) == ([(16, 18), (22, 24)], 12)
    upper, lower, _ = layout.split(taken, 17)
    assert [layout.stored(each, window) for each in (upper, lower)] == [[(16, 17)], [(17, 18), (22, 24)]]
    merged, _ = layout.merge(upper, lower)
    assert (layout.stored(merged, window), merged.nbytes) == ([(16, 18), (22, 24)], 12)
    kept, _ = layout.within(merged, {window: [(17, 23)]})
    assert (layout.stored(kept, window), kept.nbytes) == ([(17, 18), (22, 23)], 6)
