"""A live cache records what it was asked for, and the simulator finds in the record what the cache found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixcache import PrefixCache
from radixcache.observe.trace import TraceWriter
from runner.simulate.simulator import simulate
from runner.traces.trace_reader import read_trace
from tests.prompts import tokens

BLOCK_TOKENS = 8


def serve(cache: PrefixCache, model: Any, prompt: list[int], **more: Any) -> int:
    with cache.begin(prompt, **more) as session:
        session.prefill(model)
        session.step(model, prompt[-1:])
        session.step(model, [7])
    return session.matched_tokens


def test_a_recorded_trace_gives_the_hits_of_the_cache_that_recorded_it(llama: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    cache = PrefixCache(llama, trace=TraceWriter(file, block_tokens=BLOCK_TOKENS))
    shared = tokens(0, 64)
    matched = [serve(cache, llama, [*shared, *tokens(seed, 24)], turn=1, kind="chat") for seed in (1, 2, 3, 1)]
    trace = read_trace(file)
    assert [(r.tokens, r.output_tokens, r.turn, r.kind) for r in trace.requests] == [(88, 1, 1, "chat")] * 4
    row = simulate(trace, "lru", 1_000)
    assert row.block_hits == sum(each // BLOCK_TOKENS for each in matched) == 8 + 8 + 11


def test_a_file_name_is_enough_and_no_token_or_namespace_gets_into_the_file(llama: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    cache = PrefixCache(llama, trace=file)
    prompt = [201] * 200
    serve(cache, llama, prompt, namespace="secret tenant")
    cache.fetch(prompt)
    text = file.read_text(encoding="utf-8")
    assert "secret" not in text
    assert "201" not in text.replace('"tokens": 201', "")
    assert [request.tokens for request in read_trace(file).requests] == [200, 200]
    # Another namespace is another prefix.
    assert not set(read_trace(file).requests[0].keys) & set(read_trace(file).requests[1].keys)


def test_a_trace_that_cannot_be_written_does_not_stop_the_request(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    cache = PrefixCache(llama, trace=writer)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "append", full)
    with pytest.warns(RuntimeWarning, match=r"trace\.jsonl: a request could not be recorded: .*No space left"):
        serve(cache, llama, tokens(1, 30))
    cache.check()
    assert cache.stats.tokens == 31
