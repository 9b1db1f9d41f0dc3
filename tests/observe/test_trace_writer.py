"""The recorded trace: what a reader and the simulator get back, what is not in it, and what a killed writer leaves."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import PrefixCache
from radixcache.observe.trace import TraceWriter
from runner.files import InputError
from runner.simulate.simulator import simulate
from runner.traces.trace import Trace
from runner.traces.trace_reader import read_trace
from tests.prompts import tokens as drawn

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.sampled_from(["", "tenant"])),
    min_size=1,
    max_size=15,
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_prefixes(trace: Trace, prompts: list[tuple[str, list[int]]]) -> bool:
    """Whether two blocks have the same key exactly where namespaces and beginnings are the same."""
    meaning: dict[int, tuple] = {}
    for request, (namespace, tokens) in zip(trace.requests, prompts, strict=True):
        for index, key in enumerate(request.keys.tolist()):
            beginning = (namespace, tuple(tokens[: (index + 1) * trace.block_tokens]))
            if meaning.setdefault(key, beginning) != beginning:
                return False
    return len(set(meaning.values())) == len(meaning)


def test_a_trace_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        TraceWriter(tmp_path / "t.jsonl").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t.jsonl").stat().st_mode) == 0o600


@settings(max_examples=25)
@given(PROMPTS, st.booleans(), st.sampled_from([0, 3, 1 << 18]))
def test_what_is_written_is_read_back(tmp_path_factory, prompts, plain: bool, known_blocks: int) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with TraceWriter(path, block_tokens=3, plain=plain, known_blocks=known_blocks, clock="ms") as writer:
        for at, (tokens, namespace) in enumerate(prompts):
            writer.append(tokens, time=5 * at, output_tokens=at, namespace=namespace, turn=at + 1, kind="chat")
    trace = read_trace(path)
    assert (trace.block_tokens, trace.is_timing_synthetic, trace.skipped) == (3, False, ())
    assert [(r.tokens, r.time_ms, r.output_tokens, r.turn, r.kind) for r in trace.requests] == [
        (len(tokens), 5 * at, at, at + 1, "chat") for at, (tokens, _) in enumerate(prompts)
    ]
    assert same_prefixes(trace, [(namespace, tokens) for tokens, namespace in prompts])


def test_no_token_text_namespace_or_salt_is_in_the_file(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    salt = b"pepper-and-salt!"
    with TraceWriter(path, salt=salt) as writer:
        writer.append([123456789] * 100, time=1, namespace="tenant-seven")
    content = path.read_bytes()
    for secret in (b"123456789", b"tenant-seven", salt, salt.hex().encode()):
        assert secret not in content
    assert set(lines(path)[1]) == {"request", "time", "tokens", "output", "blocks", "namespace"}


def test_reopened_trace_goes_on_behind_a_torn_line(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, salt=b"s", clock="ms") as writer:
        writer.append(range(100), time=100)
        writer.append(range(130), time=200)
    path.write_bytes(path.read_bytes()[:-9])
    with TraceWriter(path, salt=b"s", clock="ms") as writer:
        writer.append(range(100), time=7)
        writer.append(range(130), time=9)
    trace = read_trace(path)
    assert [request.time_ms for request in trace.requests] == [0, 0, 2]
    assert trace.requests[0].keys.tolist() == trace.requests[1].keys.tolist()
    (skipped,) = trace.skipped
    assert skipped.startswith(f"{path}:3: an incomplete line")


def test_only_parts_of_one_salt_share_blocks(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    for salts, shared in (((b"x", b"x"), 2), ((b"x", b"y"), 0), ((None, None), 0)):
        path.unlink(missing_ok=True)
        for salt in salts:
            with TraceWriter(path, salt=salt) as writer:
                writer.append(range(100), time=1)
        first, second = read_trace(path).requests
        assert len(set(first.keys.tolist()) & set(second.keys.tolist())) == shared
    # Equal digests under another salt are no equal prefixes.
    header, request = lines(path)[:2]
    path.write_text(
        "".join(json.dumps(each) + "\n" for each in (header, request, {**header, "salt_id": "0" * 16}, request))
    )
    first, second = read_trace(path).requests
    assert not set(first.keys.tolist()) & set(second.keys.tolist())


def test_failed_write_costs_its_line_and_no_other(tmp_path, monkeypatch) -> None:
    path = tmp_path / "t.jsonl"
    real_write = os.write
    with TraceWriter(path, salt=b"s") as writer:
        writer.append(range(100), time=1)

        def fail_half_way(handle: int, content: bytes) -> int:
            real_write(handle, content[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", fail_half_way)
        with pytest.raises(OSError, match="No space left"):
            writer.append(range(164), time=2)
        monkeypatch.setattr(os, "write", real_write)
        writer.append(range(228), time=3)
    trace = read_trace(path)
    assert [len(request.keys) for request in trace.requests] == [2, 4]
    assert trace.requests[0].keys[0] == trace.requests[1].keys[0]
    assert len(trace.skipped) == 1


def test_a_header_that_could_not_be_written_and_short_writes_leave_a_file_that_can_be_used(
    tmp_path, monkeypatch
) -> None:
    def fail(handle: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    path, real_write = tmp_path / "t.jsonl", os.write
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        TraceWriter(path)
    monkeypatch.setattr(os, "write", lambda handle, content: real_write(handle, content[:7]))
    with TraceWriter(path) as writer:
        writer.append(range(100), time=1)
        with pytest.raises(ValueError, match="another writer has this trace open"):
            TraceWriter(path)
    monkeypatch.undo()
    assert len(read_trace(path).requests) == 1


def test_wrong_arguments_are_refused_and_write_nothing(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    for wrong in ({"block_tokens": 0}, {"salt": b"x" * 65}, {"clock": "days"}):
        with pytest.raises(ValueError, match="wanted"):
            TraceWriter(path, **wrong)
    assert not path.exists()
    with TraceWriter(path) as writer:
        length = path.stat().st_size
        for keys, wrong in (([], {"time": 1}), ([1], {"time": -1}), ([1], {"time": 1, "output_tokens": -1})):
            with pytest.raises(ValueError, match="wanted"):
                writer.append(keys, **wrong)
        with pytest.raises(ValueError, match="1 digests for 100 tokens; wanted 2 of 8 bytes"):
            writer.append_blocks([b"12345678"], tokens=100, time=1)
        assert path.stat().st_size == length
    with pytest.raises(ValueError, match="closed"):
        writer.append([1], time=1)


def test_requests_behind_a_header_that_is_no_use_are_not_taken_for_the_part_before(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    for start in (0, 1000):
        with TraceWriter(path, salt=b"s") as writer:
            writer.append(range(start, start + 128), time=1)
            writer.append(range(start, start + 192), time=2)
    first, second = lines(path)[:3], lines(path)[3:]
    assert second[2]["after"] == [0, 2]
    broken = [{**second[0], "version": 2}, *second[1:]]
    # Without a header the numbers begin again.
    for part, skipped in ((broken, 3), (second[1:], 2)):
        path.write_text("".join(json.dumps(each) + "\n" for each in (*first, *part)))
        trace = read_trace(path, skip_bad=True)
        assert [len(request.keys) for request in trace.requests] == [2, 3]
        assert len(trace.skipped) == skipped
        with pytest.raises(InputError, match=r"t\.jsonl:4: (version is int 2|request 0 is there twice)"):
            read_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": "AAA"}, "wanted base64"),
        ({"blocks": "AAAA"}, "blocks has 3 bytes; wanted a multiple of 8."),
        ({"tokens": 500}, "3 blocks; 500 tokens need 8 blocks of 64 tokens."),
        ({"after": [5, 1]}, "after names 1 blocks of request 5, which has 0 here"),
        ({"after": [0, 3]}, "after names 3 blocks of request 0, which has 2 here"),
        ({"after": 7}, "after is int 7; wanted [request, blocks]."),
        ({"kind": 3}, "kind is int 3; wanted text."),
        ({"time": "now"}, "time is str 'now'; wanted a whole number"),
        ({"version": 2}, "version is int 2; wanted 1."),
        ({"clock": "days"}, "clock is str 'days'; wanted one of requests, ms, synthetic_ms."),
        ({"block_tokens": 0}, "block_tokens is int 0"),
    ],
)
def test_bad_line_is_named(tmp_path, change: dict, message: str) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.append(range(100), time=1)
        writer.append([*range(64), *range(80)], time=2)
    header, first, second = lines(path)
    assert second["after"] == [0, 1]
    parts, bad = [header, first, second, {**first, "request": 2}], 0 if change.keys() <= header.keys() else 2
    parts[bad] |= change
    path.write_text("".join(json.dumps(each) + "\n" for each in parts))
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:{bad + 1}: ")
    assert message in str(raised.value)
    assert not bad or len(read_trace(path, skip_bad=True).requests) == 2


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
    shared = drawn(0, 64)
    matched = [serve(cache, llama, [*shared, *drawn(seed, 24)], turn=1, kind="chat") for seed in (1, 2, 3, 1)]
    trace = read_trace(file)
    assert [(r.tokens, r.output_tokens, r.turn, r.kind) for r in trace.requests] == [(88, 1, 1, "chat")] * 4
    row = simulate(trace, "lru", 1_000)
    assert row.block_hits == sum(each // BLOCK_TOKENS for each in matched) == 8 + 8 + 11


def test_a_trace_that_cannot_be_written_does_not_stop_the_request(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    cache = PrefixCache(llama, trace=writer)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "append", full)
    with pytest.warns(RuntimeWarning, match=r"trace\.jsonl: a request could not be recorded: .*No space left"):
        serve(cache, llama, drawn(1, 30))
    cache.check()
    assert cache.stats.tokens == 31
