"""A cache with a store on disk: what one process leaves another one finds, and nothing that lies there is ever wrong.

Nothing here depends on how fast anything is: what the store has is read, unless a test says otherwise.
"""

# ruff: noqa: F811

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import DiskStore, PrefixCache
from radixcache.layers.layout import Layout
from radixcache.paging.rates import StoreRates
from radixcache.stores.files import scan
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens
from tests.restarts import REPLY, Open, cold, conversation, is_close, opened, quantized, reading, serve  # noqa: F401

#: One of each kind of state: spans, windows, a mix with recurrent layers; quantized.
FAST = [("llama", None), ("gemma3_text", None), ("falcon_h1", None), ("llama", 8)]
#: Every other class of cache, and mix of classes.
SLOW = [
    (kind, None)
    for kind in (
        "llama4", "mamba2", "gpt_oss", "step3p5", "gemma3n", "rwkv7", "baichuan_m1", "recurrent_gemma",
        "deepseek_v32", "longcat_flash_ngram", "deepseek_v41",
    )
]  # fmt: skip
#: On disk and, among the slow tests, in Redis.
EITHER = pytest.mark.parametrize("opened", ["disk", pytest.param("redis", marks=pytest.mark.slow)], indirect=True)


@pytest.mark.parametrize(("kind", "kv_bits"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_restart_before_each_turn_costs_no_cached_token(opened: Open, kind: str, kv_bits: int | None) -> None:
    model, more = tiny_model(kind), quantized(kv_bits)
    one = PrefixCache(model, **more)
    for prompt in conversation():
        wanted, _ = serve(one, model, prompt)
        again = tiny_model(kind)
        with opened() as store, PrefixCache(again, store=store, **more) as cache:
            found, logits = serve(cache, again, prompt)
            assert (found, cache.stats.brought_tokens) == (wanted, wanted)
            assert "failed" not in cache.stats.store_decisions
        assert is_close(logits, cold(model, prompt, kv_bits), kv_bits)


@pytest.mark.parametrize(("kind", "wanted"), [("llama", 600), ("falcon_h1", 584)])  # the latter at its checkpoint
def test_two_first_requests_after_a_restart_find_what_is_stored(
    opened: Open, kind: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first learns the shapes from its block."""
    model, prompts = tiny_model(kind), [tokens(number, 600, first=number) for number in (1, 2)]
    with opened() as store, PrefixCache(model, store=store) as cache:
        for prompt in prompts:
            serve(cache, model, prompt)
    again, is_learning, is_second_done = tiny_model(kind), threading.Event(), threading.Event()
    cached: list[int] = []
    with opened() as store, PrefixCache(again, store=store, live_slots=2) as cache:
        learn = Layout._note_use

        def interrupted(layout: Layout, in_use: Sequence[bool]) -> None:
            is_learning.set()
            is_second_done.wait(0.5)  # it is not, where learning holds the lock
            learn(layout, in_use)

        monkeypatch.setattr(Layout, "_note_use", interrupted)

        def ask(prompt: Sequence[int]) -> None:
            with cache.begin([*prompt, 5]) as session:
                cached.append(session.cached_tokens)

        first = threading.Thread(target=ask, args=prompts[:1])
        first.start()
        assert is_learning.wait(60)
        second = threading.Thread(target=ask, args=prompts[1:])
        second.start()
        second.join(2)
        is_second_done.set()
        first.join()
        second.join()
        cache.check()
    assert cached == [wanted, wanted]


@EITHER
@pytest.mark.parametrize("kind", ["llama_sliding", "lfm2"])
def test_rows_and_fetch_find_what_sessions_left_and_sessions_what_rows_left(opened: Open, kind: str) -> None:
    model = tiny_model(kind)
    first, second, third, _ = conversation()
    with opened() as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, first)
    with opened() as store, PrefixCache(model, store=store) as cache:
        caches, remaining = cache.fetch(second)
        assert len(second) - len(remaining) == len(first) + len(REPLY)
        logits = np.array(model(mx.array(remaining)[None], cache=caches)[0, -1].astype(mx.float32))
        assert is_close(logits, cold(model, second)[0])
    with opened() as store, PrefixCache(model, store=store) as cache:
        with cache.begin_many(capacity=4096) as group:
            row = group.admit(second)
            assert row.cached_tokens == len(first) + len(REPLY)
            last = group.prefill(model, row)
            assert last is not None
            assert is_close(np.array(last[0, -1].astype(mx.float32)), cold(model, second)[0])
            for token in REPLY:
                group.step(model, [row], [token])
        cache.check()
    with opened() as store, PrefixCache(model, store=store) as cache:
        assert serve(cache, model, third)[0] == len(second) + len(REPLY)


@EITHER
@pytest.mark.parametrize("kind", ["mamba2", "gemma3_text"])
def test_a_checkpoint_in_front_of_the_one_that_was_brought_is_found_too(opened: Open, kind: str) -> None:
    model = tiny_model(kind)
    first, *_, branch = conversation()
    with opened() as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, first, marks=(400,))
    with opened() as store, PrefixCache(model, store=store) as cache:
        assert serve(cache, model, [*first, *REPLY, 1])[0] == len(first) + len(REPLY)
        cached, logits = serve(cache, model, branch)
        assert cached == 400
        assert is_close(logits, cold(model, branch))


@EITHER
def test_what_was_inserted_is_stored_and_caches_without_a_model_find_it(opened: Open, llama: Any) -> None:
    prompt = tokens(1, 90)
    with opened() as store, PrefixCache(caches=llama.make_cache, store=store, identity="mine") as cache:
        caches = cache.fetch(prompt)[0]
        llama(mx.array([prompt]), cache=caches)
        cache.insert(prompt, caches)
    with opened() as store, PrefixCache(caches=llama.make_cache, store=store, identity="mine") as cache:
        assert serve(cache, llama, [*prompt, 1])[0] == 90


def test_a_store_without_a_model_or_a_name_for_it_is_refused(opened: Open, llama: Any) -> None:
    for identity in (None, "", 3):
        with pytest.raises(ValueError, match="identity"):
            PrefixCache(caches=llama.make_cache, store=opened(), identity=identity)  # type: ignore[arg-type]


@EITHER
def test_state_of_other_weights_caches_or_namespaces_is_not_found(opened: Open, llama: Any) -> None:
    prompt = tokens(1, 90)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, prompt, namespace="a")
    other = tiny_model("llama", 1)
    nearly = tiny_model("llama")
    nearly.update({"model": {"norm": {"weight": nearly.model.norm.weight * 1.001}}})
    store = opened()
    for model, namespace, more in (
        (llama, "b", {}),
        (other, "a", {}),
        (nearly, "a", {}),
        (llama, "a", quantized(8)),
        (llama, "a", {"identity": "another"}),
        (llama, "a", {"exact": True, "step_size": 16}),
    ):
        with PrefixCache(model, store=store, **more) as cache:
            assert serve(cache, model, prompt, namespace=namespace)[0] == 0, (namespace, more)
    with PrefixCache(tiny_model("llama"), store=store) as cache:
        assert serve(cache, llama, prompt, namespace="a")[0] == 89


@EITHER
def test_an_exact_cache_resumes_on_exact_blocks_alone_and_bit_for_bit(opened: Open, llama: Any) -> None:
    prompt = tokens(1, 90)
    exact: dict[str, Any] = {"exact": True, "step_size": 16}
    wanted = serve(PrefixCache(llama, **exact), llama, prompt)[1]
    for found in (0, 80):
        with opened() as store, PrefixCache(llama, store=store, **exact) as cache:
            cached, logits = serve(cache, llama, prompt)
            assert cached == found
            assert np.array_equal(logits, wanted)
    with opened() as store, PrefixCache(llama, store=store, exact=True, step_size=32) as cache:
        assert serve(cache, llama, prompt)[0] == 0


@EITHER
def test_state_that_was_found_wrong_is_taken_off_the_disk(opened: Open, llama: Any) -> None:
    prompt = tokens(1, 600)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, prompt)
        inside.expel_tokens(cache, prompt, 550)
        serve(cache, llama, prompt)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        assert serve(cache, llama, prompt)[0] == 550


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_behind_a_damaged_block_what_was_in_front_of_it_is_used(opened: Open, tmp_path: Path, kind: str) -> None:
    model, prompt = tiny_model(kind), tokens(1, 600)
    with opened() as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt[:200])
        serve(cache, model, prompt)
    store = opened()
    last = max(scan(tmp_path), key=lambda file: (file.head.end, file.head.kind == "block"))
    (tmp_path / last.name).write_bytes(b"")
    with PrefixCache(model, store=store) as cache:
        cached, logits = serve(cache, model, prompt)
        assert cached >= 200
        assert is_close(logits, cold(model, prompt))


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_each_token_is_written_once_though_what_came_before_is_not_written_yet(
    opened: Open, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go_on, store_block = tiny_model(kind), threading.Event(), DiskStore._write
    monkeypatch.setattr(DiskStore, "_write", lambda *its: go_on.wait(60) and store_block(*its))
    prompts = conversation()[:3]
    with opened() as store, PrefixCache(model, store=store) as cache:
        for prompt in prompts:
            serve(cache, model, prompt)
        go_on.set()
        assert cache.flush(60)
        serve(cache, model, [*prompts[2], *REPLY])
    ranges = sorted((file.head.start, file.head.end) for file in scan(tmp_path) if file.head.kind == "block")
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == len(prompts[2]) + 2 * len(REPLY)


@pytest.mark.parametrize(("kind", "marked"), [("llama", False), ("llama_sliding", True), ("lfm2", False)])
def test_a_system_prompt_is_not_written_for_each_conversation_behind_it(
    opened: Open, tmp_path: Path, kind: str, marked: bool
) -> None:
    model = tiny_model(kind)
    system = tokens(1, 300)
    prompts = [[*system, *tokens(seed, 40)] for seed in range(2, 7)]
    with opened() as store, PrefixCache(model, store=store) as cache:
        for prompt in prompts:
            serve(cache, model, prompt, marks=[len(system)] if marked else [])
        assert cache.flush(60)
    written = sum(file.head.end - file.head.start for file in scan(tmp_path) if file.head.kind == "block")
    # Without a mark it is only known to be shared once the second one has come; then a checkpoint there needs a block.
    once = len(system) + len(prompts) * (40 + len(REPLY))
    assert written == once + (0 if marked or kind == "llama" else len(system))
    with opened() as store, PrefixCache(model, store=store) as cache:
        assert serve(cache, model, [*system, *tokens(9, 40)])[0] == len(system)


@pytest.mark.parametrize(("kv_bits", "is_flushed"), [(None, False), pytest.param(8, True, marks=pytest.mark.slow)])
def test_what_parts_inside_of_a_block_is_written_once_and_goes_on_from_there(
    opened: Open, tmp_path: Path, kv_bits: int | None, is_flushed: bool
) -> None:
    model, more = tiny_model("llama"), quantized(kv_bits)
    first = tokens(1, 600)
    second = [*first[:400], *tokens(2, 300, first=first[400] + 1)]
    third = [*second[:500], *tokens(3, 60, first=second[500] + 1)]
    early = [*first[:200], *tokens(4, 60, first=first[200] + 1)]  # in the first half: reading that block costs too much
    prompts = [first, second, third, early]
    with opened() as store, PrefixCache(model, store=store, **more) as cache:
        for prompt in prompts:
            serve(cache, model, prompt)
            if is_flushed:
                assert cache.flush(60)
    heads = [file.head for file in scan(tmp_path)]
    assert sorted((head.start, head.end, head.cut) for head in heads if head.cut) == [(400, 512, 400), (500, 512, 100)]
    distinct = len({tuple(each[: end + 1]) for each in map(_answered, prompts) for end in range(len(each))})
    assert sum(len(head.tokens) for head in heads) == distinct + 200
    again = tiny_model("llama")
    for prompt in prompts:
        with opened() as store, PrefixCache(again, store=store, **more) as cache:
            turn = [*_answered(prompt), 9]
            found, logits = serve(cache, again, turn)
            assert found == len(turn) - 1
            assert is_close(logits, cold(model, turn, kv_bits), kv_bits)
            assert set(cache.stats.store_decisions) == {"brought"}


def _answered(prompt: list[int]) -> list[int]:
    return [*prompt, *REPLY]


def test_what_is_used_once_is_not_written_on_second_use(opened: Open, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second, *_ = conversation()
    with opened(write_on="second_use") as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, first)
        serve(cache, model, tokens(9, 300, first=first[0] + 1))
        assert cache.stats.kept_blocks == 0
        serve(cache, model, second)
        with cache.begin_many([second], capacity=2048) as group:
            group.prefill(model, group.rows[0])
    assert max(file.head.end for file in scan(tmp_path)) == len(second) - 1
    with opened() as store, PrefixCache(model, store=store) as cache:
        assert serve(cache, model, second)[0] == len(second) - 1


@EITHER
def test_what_is_there_at_the_end_is_written_on_eviction_but_not_what_was_cleared(opened: Open, llama: Any) -> None:
    gone, kept = tokens(1, 90, first=1), [tokens(2, 600, first=2), tokens(3, 600, first=3)]
    # A queue that takes a single block: the last ones wait for it.
    with opened(write_on="eviction", queue_bytes=1) as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, gone)
        cache.clear()
        for prompt in kept:
            serve(cache, llama, prompt)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        assert [serve(cache, llama, prompt)[0] for prompt in (gone, *kept)] == [0, 599, 599]


def test_a_flush_of_all_state_writes_what_memory_holds_and_the_cache_goes_on(opened: Open) -> None:
    model = tiny_model("falcon_h1")
    with opened(write_on="eviction") as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, tokens(1, 300))
        assert cache.flush()
        assert store.stats.written_files == 0
        assert cache.flush(write_all=True)
        assert serve(cache, model, [*tokens(1, 300), 5])[0] == 300 - 16
        assert cache.stats.brought_tokens == 0
        with opened() as other_store, PrefixCache(model, store=other_store) as other:
            assert serve(other, model, [*tokens(1, 300), 5])[0] == 300 - 16
    assert PrefixCache(model).flush(write_all=True)


def test_more_than_the_budget_has_room_for_is_not_brought(opened: Open, llama: Any) -> None:
    prompt = tokens(1, 1200)
    with opened() as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, prompt)
        budget_bytes = cache.stats.live_bytes // 2
    with opened() as store, PrefixCache(llama, store=store, budget_bytes=budget_bytes) as cache:
        assert cache.fetch(prompt)[0]
        assert 0 < cache.stats.brought_tokens < 1200
        assert cache.stats.live_bytes + cache.stats.paged_bytes <= budget_bytes
        cache.check()
    with opened() as store, PrefixCache(llama, store=store, budget_bytes=1000) as cache:
        cache.fetch(prompt)
        assert cache.stats.store_decisions == {"no room": 1}
    with opened(budget_bytes=1000) as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, tokens(2, 600))  # what the store cannot take is not copied out
        assert (cache.stats.kept_blocks, cache.stats.paged_out_bytes) == (0, 0)


def test_reading_that_is_slower_than_prefill_is_left_alone(
    opened: Open, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, tokens(1, 90))
    with opened() as store, PrefixCache(llama, store=store) as cache:
        assert "stored on disk up to 89: begin() reads the missing tokens" in str(cache.explain(tokens(1, 90)))
        monkeypatch.setattr(StoreRates, "is_worth_reading", lambda *_: False)
        explained = cache.explain(tokens(1, 90))
        assert (explained.disk_tokens, explained.is_read) == (89, False)
        assert "stored on disk up to 89: slower to read than to prefill" in str(explained)
        assert cache.explain(tokens(2, 90)).disk_tokens == 0
        assert serve(cache, llama, tokens(1, 90))[0] == 0
        assert cache.stats.store_decisions == {"slower than prefill": 1}
        assert store.stats.read_files == 0
