"""What joins a cache to its store: where memory is short, state is on its way out, or what is read is not all there."""

# ruff: noqa: F811

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixcache import PrefixCache
from radixcache.layers import stored
from radixcache.paging.rates import StoreRates
from radixcache.paging.resume import Slots
from radixcache.stores.files import scan
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens
from tests.restarts import REPLY, Open, cold, is_close, opened, reading, serve  # noqa: F401


def held_bytes(model: Any, prompt: list[int]) -> int:
    with PrefixCache(model) as cache:
        serve(cache, model, prompt)
        return cache.stats.live_bytes + cache.stats.paged_bytes


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_what_is_evicted_on_its_way_out_of_the_live_caches_comes_back(opened: Open, kind: str) -> None:
    model = tiny_model(kind)
    first, second = tokens(1, 600, first=1), tokens(2, 600, first=2)
    budget_bytes = held_bytes(model, first) * 11 // 10
    with opened(write_on="eviction") as store, PrefixCache(model, store=store, budget_bytes=budget_bytes) as cache:
        serve(cache, model, first)
        serve(cache, model, second)
        assert inside.stored_tokens(cache, first) < 600
        assert cache.flush()
        assert serve(cache, model, [*first, *REPLY, 1])[0] == 603


@pytest.mark.parametrize("kind", ["llama", "llama_sliding"])
def test_what_is_cut_off_an_idle_live_path_comes_back(opened: Open, kind: str) -> None:
    model, prompt = tiny_model(kind), tokens(1, 600)
    with opened(write_on="eviction") as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt)
        cache.reclaim(0)
        assert inside.stored_tokens(cache, prompt) == 0
        assert cache.flush()
        assert serve(cache, model, [*prompt, *REPLY, 1])[0] == 603


def test_a_window_resumes_where_it_is_whole_on_disk(opened: Open) -> None:
    model, prompt = tiny_model("llama_sliding"), tokens(1, 300)
    with opened(write_on="eviction") as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt)
        cache.reclaim(0)  # tokens of windows that no checkpoint needs are the first to go
    with opened(write_on="eviction") as store, PrefixCache(model, store=store) as cache:
        cached, logits = serve(cache, model, prompt)
        assert 0 < cached < 299
        assert is_close(logits, cold(model, prompt))


def test_tokens_of_windows_come_back_where_memory_has_all_else(opened: Open) -> None:
    model, prompt = tiny_model("gemma3_text"), tokens(1, 600)
    branch = [*prompt[:400], *tokens(2, 20)]
    for store, found in ((None, 0), (opened(), 400)):
        with PrefixCache(model, store=store) as cache:
            serve(cache, model, prompt)
            cache.flush()
            inside.states(cache).windows.drop_unneeded(lambda: 1)
            assert inside.stored_tokens(cache, branch) == 400
            cached, logits = serve(cache, model, branch)
            assert cached == found
            assert is_close(logits, cold(model, branch))


def test_where_the_last_checkpoint_does_not_fit_an_earlier_one_is_taken(opened: Open, tmp_path: Path) -> None:
    model, prompt = tiny_model("falcon_h1"), tokens(1, 600)
    with opened() as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt[:200])
        cache.flush()
        nbytes = sum(file.nbytes for file in scan(tmp_path))
        serve(cache, model, prompt)
    # Room for one block more, at whose end there is no checkpoint.
    budget_bytes = nbytes + next(file.nbytes for file in scan(tmp_path) if file.head.end == 512) + 1000
    with opened() as store, PrefixCache(model, store=store, budget_bytes=budget_bytes) as cache:
        assert len(cache.fetch(prompt)[1]) == 400
        assert cache.stats.paged_bytes <= budget_bytes


@pytest.mark.parametrize(("kind", "least"), [("llama", 512), ("falcon_h1", 700)])
def test_a_trial_of_a_slow_disk_reads_no_more_than_it_has_to(
    opened: Open, kind: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model(kind), tokens(1, 1300)
    with opened() as store, PrefixCache(model, store=store) as cache:
        _, answer = serve(cache, model, prompt, marks=[700])
    monkeypatch.setattr(StoreRates, "is_worth_reading", lambda _, __, start, end: end <= 700)
    with opened() as store, PrefixCache(model, store=store) as cache:
        cached, logits = serve(cache, model, prompt)
        assert cached == least
        assert is_close(logits, answer)
        # What is behind that is too slow once more.
        cache.clear()
        monkeypatch.setattr(StoreRates, "is_worth_reading", lambda *_: False)
        assert serve(cache, model, prompt)[0] == 0
        assert cache.stats.store_decisions == {"brought": 1, "slower than prefill": 1}


def test_behind_the_last_checkpoint_nothing_of_recurrent_layers_is_stored(opened: Open) -> None:
    model, prompt = tiny_model("mamba2"), tokens(1, 300)
    with opened(write_on="second_use") as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt)
        inside.write_to_disk(cache, prompt[:200])
        assert cache.stats.kept_blocks == 0
        inside.write_to_disk(cache, prompt)
        assert cache.stats.kept_blocks == 2


def test_state_that_cannot_be_read_now_is_not_stored_in_part(
    opened: Open, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as store, PrefixCache(llama, store=store) as cache:
        monkeypatch.setattr(Slots, "hidden_from", lambda *_, **__: 0)
        serve(cache, llama, tokens(1, 90))
        assert cache.stats.kept_blocks == 0


def test_what_is_quarantined_is_not_brought_though_it_is_there(opened: Open, llama: Any, tmp_path: Path) -> None:
    prompt = tokens(1, 600)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, prompt)
        cache.flush()
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))
        inside.expel_tokens(cache, prompt, 550)
    shutil.copytree(tmp_path.with_name("copy"), tmp_path, dirs_exist_ok=True)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        inside.quarantine(cache, prompt, 550)
        cache.fetch(prompt)
        assert inside.stored_tokens(cache, prompt) == 550


@pytest.mark.parametrize(("kind", "part"), [("llama", "spans_in"), ("recurrent_gemma", "windows_in")])
def test_what_is_not_all_there_is_not_used(
    opened: Open, kind: str, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = tiny_model(kind), tokens(1, 90)
    with opened() as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt)
    monkeypatch.setattr(stored, part, lambda _, start, end, leaf_count: [None] * leaf_count)
    with opened() as store, PrefixCache(model, store=store) as cache:
        cached, logits = serve(cache, model, [*prompt, 1])
        assert cached == 0
        assert cache.stats.store_decisions == {"failed" if kind == "llama" else "windows are not whole": 1}
        assert np.isfinite(logits).all()


def test_a_store_that_never_answers_rightly_is_asked_a_few_times_and_told_of_once(
    opened: Open, llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokens(1, 90)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, prompt)
    with opened() as store, PrefixCache(llama, store=store, budget_bytes=1 << 24) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(store, "read", lambda wanted: iter([None] * len(wanted)))
            assert serve(cache, llama, prompt)[0] == 0
            assert 1 < cache.stats.store_decisions["damaged"] < 20
            cache.clear()

            def fail(*_: Any, **__: Any) -> Any:
                raise ValueError("no such thing")

            patch.setattr(store, "match", fail)
            assert [serve(cache, llama, each)[0] for each in (prompt, tokens(2, 30, first=1))] == [0, 0]
        assert [record.exc_info is not None for record in caplog.records] == [True]
        cache.clear()
        assert serve(cache, llama, prompt)[0] == 89
