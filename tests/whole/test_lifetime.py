"""A cache's end: close() gives everything back; what stands for state is shown in a line and copied by nobody."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from radixcache import (
    CacheClosedError,
    Ledger,
    PrefixCache,
    SessionClosedError,
    TraceWriter,
    stream_generate,
)
from runner.models.tiny import tiny_model

PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("nemotron_h")


def serve(cache: PrefixCache, model: Any, prompt: list[int]) -> None:
    with cache.begin(prompt) as session:
        session.prefill(model, step_size=16)
        mx.eval(session.step(model, prompt[-1:]))


def test_close_gives_all_memory_and_the_budget_back(model: Any) -> None:
    ledger = Ledger(1 << 24)
    held = []
    for _ in range(3):  # the first passes also leave what the model itself keeps
        with PrefixCache(model, budget_bytes=ledger, live_slots=2) as cache:
            serve(cache, model, PROMPT)
            serve(cache, model, PROMPT[:20] + [9] * 20)
            cache.pin(PROMPT)
            assert ledger.total_bytes > 0
        assert ledger.total_bytes == 0
        ledger.check()
        held.append(mx.get_active_memory())
    assert held[1] == held[2]


def test_after_close_every_call_says_so_and_closing_again_is_fine(model: Any) -> None:
    cache = PrefixCache(model)
    cache.close()
    cache.close()
    calls: list[Callable[[], object]] = [
        lambda: cache.begin(PROMPT),
        lambda: cache.begin_many([PROMPT], capacity=64),
        lambda: cache.fetch(PROMPT),
        lambda: cache.explain(PROMPT),
        lambda: cache.stats,
        lambda: cache.reclaim(0),
        lambda: cache.clear(),
        lambda: cache.check(),
        lambda: cache.render(),
        lambda: cache.snapshot_stats(),
    ]
    for call in calls:
        with pytest.raises(CacheClosedError, match="the cache is closed; make another"):
            call()
    assert repr(cache) == "<PrefixCache closed>"


def test_sessions_and_groups_that_are_open_lose_their_state_and_say_so(model: Any) -> None:
    ledger = Ledger(1 << 24)
    cache = PrefixCache(model, budget_bytes=ledger)
    session = cache.begin(PROMPT)
    session.prefill(model)
    group = cache.begin_many([PROMPT[:8]], capacity=64)
    (row,) = group.rows
    group.prefill(model, row)
    cache.close()
    assert ledger.total_bytes == 0
    for call in (
        lambda: session.step(model, PROMPT[-1:]),
        lambda: session.prefill(model),
        lambda: session.extend([1]),
        lambda: group.step(model, [row], [1]),
        lambda: group.admit(PROMPT),
    ):
        with pytest.raises(SessionClosedError):
            call()
    assert "closed" in repr(session)
    session.close()
    row.close()
    group.close()
    assert ledger.total_bytes == 0


def test_a_cache_that_is_closed_during_a_forward_pass_takes_nothing_more(model: Any) -> None:
    ledger = Ledger(1 << 24)
    cache = PrefixCache(model, budget_bytes=ledger)
    session = cache.begin(PROMPT)

    def closing(tokens: Any, cache: Any = None) -> Any:
        logits = model(tokens, cache=cache)
        closing.cache.close()  # type: ignore[attr-defined]
        return logits

    closing.cache = cache  # type: ignore[attr-defined]
    with pytest.raises(SessionClosedError, match="closed during the forward pass"), session:
        session.prefill(closing)
    assert ledger.total_bytes == 0


def test_a_trace_given_as_a_path_is_closed_with_the_cache_and_another_s_stays_open(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with PrefixCache(model, trace=path) as cache:
        serve(cache, model, PROMPT)
        with pytest.raises(ValueError, match="another writer"):
            TraceWriter(path)
    with TraceWriter(path) as writer:
        with PrefixCache(model, trace=writer) as cache:
            serve(cache, model, PROMPT)
        writer.append([1, 2, 3], time=99)
    assert path.read_bytes().count(b'"request"') == 3


def test_the_trace_of_a_cache_that_was_let_go_of_can_be_continued(model: Any, tmp_path: Path) -> None:
    cache = PrefixCache(model, trace=tmp_path / "trace.jsonl")
    serve(cache, model, PROMPT)
    del cache
    TraceWriter(tmp_path / "trace.jsonl").close()


def test_a_trace_is_not_written_behind_something_else(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("\\documentclass{book}\n")
    with pytest.raises(ValueError, match="is not a trace; name another file"):
        PrefixCache(model, trace=path)
    assert path.read_text() == "\\documentclass{book}\n"
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"format":"radix')
    PrefixCache(model, trace=torn).close()


def test_what_stands_for_state_is_shown_in_a_line(model: Any) -> None:
    cache = PrefixCache(model, budget_bytes=1 << 24, live_slots=3)
    with cache.begin(PROMPT) as session, cache.begin_many([PROMPT[:8]], capacity=64) as group:
        (row,) = group.rows
        assert repr(cache).startswith("<PrefixCache lru: 0 nodes, ")
        assert repr(cache).endswith("of 16.0 MiB, 1 of 3 live slots taken>")
        assert repr(session) == "<Session open: prompt of 40 tokens, 0 cached, at 0>"
        assert repr(group) == "<Group open: 1 rows, 0 of 64 tokens>"
        assert repr(row) == f"<Row {row.id} at 0: prompt of 8 tokens, 0 cached>"
    assert repr(session).startswith("<Session closed: ")
    assert repr(group).startswith("<Group closed: ")
    assert repr(row).startswith(f"<Row {row.id} closed: ")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_stands_for_state_is_not_copied(model: Any, way: Callable[[Any], Any], tmp_path: Path) -> None:
    cache = PrefixCache(model)
    writer = TraceWriter(tmp_path / "trace.jsonl")
    with cache.begin(PROMPT) as session, cache.begin_many([PROMPT[:8]], capacity=64) as group, writer:
        for each in (cache, session, group, group.rows[0], writer):
            with pytest.raises(TypeError, match=f"a {type(each).__name__} cannot be copied or pickled"):
                way(each)
        session.prefill(model)
    serve(cache, model, PROMPT)
    cache.check()


def test_another_model_than_the_cache_was_made_for_is_refused_by_name(model: Any) -> None:
    cache = PrefixCache(model)
    other = tiny_model("mamba")
    with cache.begin(PROMPT) as session, cache.begin_many([PROMPT[:8]], capacity=64) as group:
        (row,) = group.rows
        for call in (
            lambda: session.prefill(other),
            lambda: session.step(other, PROMPT[:1]),
            lambda: group.prefill(other, row),
            lambda: group.step(other, [row], PROMPT[:1]),
        ):
            with pytest.raises(ValueError, match=r"the model is a mamba model; the cache was made for a \w+ model"):
                call()
        with pytest.raises(ValueError, match="model is 'x'; wanted the mlx-lm model"):
            session.prefill("x")
    with pytest.raises(ValueError, match="the model is a mamba model"):
        cache.warm(other, PROMPT)
    # One that is loaded anew is the same, and so is a function around it.
    again = tiny_model({"llama": "llama"}.get(model.args.model_type, "nemotron_h"))
    with cache.begin(PROMPT) as session:
        session.prefill(again)
    with cache.begin([*PROMPT, 1, 2]) as session:
        session.prefill(lambda tokens, cache: model(tokens, cache=cache))


def test_generating_takes_a_cache(model: Any) -> None:
    with pytest.raises(ValueError, match="cache is None; wanted a PrefixCache"):
        stream_generate(model, None, PROMPT, cache=None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_cache_that_was_used_is_refused_in_a_forked_process_by_name_and_goes_on_in_its_own(llama: Any) -> None:
    unused, cache, third = (PrefixCache(llama) for _ in range(3))
    session, group = cache.begin([1, 2, 3, 4]), third.begin_many([[1, 2]], capacity=10)
    session.prefill(llama)
    calls = [
        lambda: cache.begin([1]),
        lambda: cache.stats,
        cache.check,
        cache.dump,
        lambda: cache.fetch([1]),
        cache.clear,
    ]
    steps = [lambda: session.step(llama, [4]), lambda: session.rewind(0), lambda: group.admit([[1]])]
    child = os.fork()
    if child == 0:
        try:
            for call in (*calls, *steps):
                with pytest.raises((CacheClosedError, SessionClosedError), match="forked after the cache was used"):
                    call()
            assert (repr(cache), unused.stats.requests) == ("<PrefixCache closed>", 0)
            for each in (session, group, cache):
                each.close()
        except BaseException:
            os._exit(1)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    session.step(llama, [4])
    for each in (session, group):
        each.close()
    cache.check()
