"""Readers of traces: what each format becomes, and the one line for whatever is wrong with it."""

import gzip
import json
import os
import re
import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixcache.observe.trace import FORMAT
from runner.files import MOST_RECORD_BYTES, InputError
from runner.script.conversation_reader import read_conversations
from runner.traces.trace import Pace, Trace, infer_turns, join_traces
from runner.traces.trace_formats import compact_bytes, mooncake_bytes
from runner.traces.trace_reader import read_trace
from tests.script.logs import ClaudeLog, written
from tests.simulate.made import made, words
from tests.traces.rows import ask, assert_invariants, chat, line, session, write

# Mooncake ------------------------------------------------------------------------------------------------------------


def test_mooncake_lines_become_requests_in_their_order(tmp_path) -> None:
    trace = read_trace(write(tmp_path / "m.jsonl", line(0, 1000, [7, 9]), line(0, 513, [7, 8]), line(3000, 20, [5])))
    assert (trace.name, trace.block_tokens, trace.is_timing_synthetic) == ("m", 512, False)
    found = [(r.tokens, r.output_tokens, r.time_ms) for r in trace.requests]
    assert found == [(1000, 5, 0), (513, 5, 0), (20, 5, 3000)]
    first, second, third = (r.keys.tolist() for r in trace.requests)
    assert first[0] == second[0]
    assert len({*first, *second, *third}) == 4
    assert_invariants(trace)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            line(tokens=6758, ids=list(range(12))),
            "input_length 6758 needs 13 full blocks of 512 tokens. Are the blocks",
        ),
        (line(ids=[0, "1"]), "hash_ids is list [0, '1']; wanted a list of whole numbers, or of texts."),
        (line(ids=[0, True]), "wanted a list of whole numbers, or of texts."),
        (line(tokens=-3, ids=[]), "input_length is int -3; wanted a whole number, 1 or more."),
        (line(timestamp=-1), "timestamp is int -1; wanted milliseconds, 0 to 10,000,000,000,000."),
        (line(5, ids=[1, 0]), "hash id 1 (index 0) follows another prefix"),
        (line(5, ids=[8, 8]), "hash id 8 (index 1) follows another prefix"),
        ({"timestamp": 5}, "input_length is missing"),
        (line(1 << 54), "timestamp is int 18014398509481984; wanted milliseconds"),
        (line(5, output_length=1.5), "output_length is float 1.5; wanted a whole number, 0 or more."),
        (line(5, output_length=1 << 54), "is int 18014398509481984; wanted at most 9,007,199,254,740,992."),
        (line(float("nan")), "timestamp is float nan; wanted milliseconds"),
        (line(5, session_id=[1]), "session_id is list [1]; wanted a whole number or text."),
        (line(5, turn=0), "turn is int 0; wanted a whole number, 1 or more."),
        ('{"timestamp": 5', "not JSON ("),
        ("[1]", "found list [1]; wanted an object."),
    ],
)
def test_bad_line_is_named_with_file_and_line(tmp_path, bad: Any, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", line(5), bad, line(5, ids=[0, 2]))
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_skipped_lines_are_counted_and_leave_no_trace(tmp_path) -> None:
    good = [line(5), line(6, ids=[0, 2]), line(7, 2000, [0, 1, 3, 4])]
    # The first bad line would give id 3 another place, were it taken in part.
    bad = line(5, 1600, [3, 4])
    trace = read_trace(write(tmp_path / "t.jsonl", good[0], bad, good[1], "{", good[2]), skip_bad=True)
    assert [message.split(" ")[0].rpartition(":")[0].rpartition(":")[2] for message in trace.skipped] == ["2", "4"]
    assert [request.time_ms for request in trace.requests] == [5, 6, 7]
    assert_invariants(trace)
    with pytest.raises(InputError, match="no request found; the first of 1 skipped"):
        read_trace(write(tmp_path / "t.jsonl", line(tokens=9999)), skip_bad=True)


def test_a_long_row_with_an_id_twice_is_refused_in_no_time(tmp_path) -> None:
    ids = [*range(100_000), 99_999]
    with pytest.raises(InputError, match=r"m\.jsonl:1: hash id 99999 \(index 100000\) follows another prefix"):
        read_trace(write(tmp_path / "m.jsonl", line(0, 512 * len(ids), ids)))


# Other rows, with sessions -------------------------------------------------------------------------------------------


def test_bailians_rows_have_seconds_sessions_turns_and_kinds(tmp_path) -> None:
    first, second = chat(1, -1, 1.5, [7, 8]), chat(2, 1, 61.114, [7, 8, 9], turn=2, type="search")
    path = write(tmp_path / "b.jsonl", first, second, chat(5, 2, 62, [7, 8, 9, 4], turn=3), chat(6, -1, 62, [7]))
    trace = read_trace(path)
    assert (trace.block_tokens, trace.is_timing_synthetic) == (16, False)
    found = [(r.time_ms, r.turn, r.kind) for r in trace.requests]
    assert found == [(1500, 1, "text"), (61_114, 2, "search"), (62_000, 3, "text"), (62_000, 1, "text")]
    sessions = [request.session for request in trace.requests]
    assert sessions[0] == sessions[1] == sessions[2] != sessions[3]
    assert trace.notes == (
        f"{path}: times are taken as seconds; if they are not, give --time-unit.",
        f"{path}: equal hash_ids mean equal prefixes.",
    )
    assert_invariants(trace)


def test_links_of_sessions_may_be_texts_or_numbers_of_a_table(tmp_path) -> None:
    nothing = (None, -1, "-1", -1.0, "", float("nan"))
    first = [chat(at, parent, at, [at]) for at, parent in enumerate(nothing, 1)]
    rows = [*first, chat(20, "1", 20, [1, 20]), chat(21.0, 2.0, 21, [2, 21]), chat("22", 21, 22, [2, 21, 22])]
    sessions = [request.session.split("/")[-1] for request in read_trace(write(tmp_path / "b.jsonl", *rows)).requests]
    assert sessions == ["1", "2", "3", "4", "5", "6", "1", "2", "2"]
    with pytest.raises(InputError, match="parent_chat_id is float"):
        read_trace(write(tmp_path / "c.jsonl", chat(1, 1.5, 0, [1])))


def test_sessions_do_not_depend_on_the_order_of_rows_and_circles_end(tmp_path) -> None:
    rows = [chat(at, at - 1 or -1, at, [at]) for at in range(1, 6)]
    for at, order in enumerate(permutations(rows)):
        requests = read_trace(write(tmp_path / f"{at}.jsonl", *order)).requests
        assert {request.session.split("/")[-1] for request in requests} == {"1"}
    circle = read_trace(write(tmp_path / "c.jsonl", *(chat(at, (at + 1) % 3, at, [at]) for at in range(3))))
    assert len({request.session for request in circle.requests}) == 1


def test_ids_of_blocks_alone_are_found_out_and_become_keys_of_prefixes(tmp_path) -> None:
    path = write(tmp_path / "b.jsonl", chat(1, -1, 0, [7, 8]), chat(2, -1, 1, [9, 8]), chat(3, -1, 2, [9, 8, 8]))
    trace = read_trace(path)
    first, second, third = (request.keys.tolist() for request in trace.requests)
    assert not set(first) & set(second)
    assert third[:2] == second
    _, note = trace.notes
    assert note.startswith(f"{path}: equal hash_ids follow different prefixes;")
    assert_invariants(trace)


def test_a_row_without_a_timestamp_arrives_its_delay_after_the_reply_before_it(tmp_path) -> None:
    def row(session_id: str, ids: list[int], **more: Any) -> dict[str, Any]:
        return {"session_id": session_id, "input_length": 512 * len(ids), "hash_ids": ids, **more}

    rows = [
        row("a", [1], output_length=80),
        row("a", [1, 2], delay=500.0, output_length=40),
        row("a", [1, 2, 3], delay_ms=250),
        row("b", [4], timestamp=600),
        {"input_tokens": 512, "output_tokens": 1, "hash_ids": [5], "created_time": 700, "session_id": None},
    ]
    path = write(tmp_path / "s.jsonl", *rows)
    trace = read_trace(path, pace=Pace(output_tokens_per_s=40.0, sessions_per_hour=60.0))
    assert (trace.is_timing_synthetic, trace.sessions_per_hour) == (True, 60.0)
    found = [(r.time_ms, r.turn, r.output_tokens, r.session[-2:]) for r in trace.requests]
    assert found == [(0, 1, 80, "/a"), (600, 1, 0, "/b"), (700, None, 1, ""), (2500, 2, 40, "/a"), (3750, 3, 0, "/a")]
    assert trace.notes == (
        f"{path}: rows are not in the order of their timestamps; sorted.",
        f"{path}: times are taken as milliseconds; if they are not, give --time-unit.",
        f"{path}: 2 rows without output_length; taken as 0 tokens.",
    )
    assert_invariants(trace)
    without_delay = write(tmp_path / "d.jsonl", row("a", [1]), row("a", [1]), row("b", [1]))
    first, *later = (request.time_ms for request in read_trace(without_delay).requests)
    assert first == 0 < min(later)


@pytest.mark.parametrize("unit", [None, "seconds", "milliseconds"])
def test_the_unit_of_times_is_said_by_the_user_or_by_a_note(tmp_path, unit: str | None) -> None:
    rows = [line(2, session_id="a"), {**line(ids=[0, 2]), "timestamp": None, "session_id": "a", "delay": 3}]
    rows.append({**rows[1], "delay": None, "delay_ms": 3000})
    bailian = [chat(1, -1, 2, [7]), chat(2, -1, 5, [8])]
    for number, each, usual in ((0, rows, 1), (1, bailian, 1000)):
        trace = read_trace(write(tmp_path / f"{number}.jsonl", *each), time_unit=unit)
        unit_ms = {None: usual, "seconds": 1000, "milliseconds": 1}[unit]
        first, second, *later = (request.time_ms for request in trace.requests)
        reply_ms = 0 if number else 125  # 5 tokens of 40 a second
        assert (first, second - first) == (2 * unit_ms, 3 * unit_ms + reply_ms)
        assert [at - second for at in later] == [3000 + reply_ms] * (1 - number)
        taken = any("times are taken as " in note for note in trace.notes)
        assert taken == (unit is None)
    with pytest.raises(ValueError, match="the time unit is 'hours'; wanted one of seconds, milliseconds"):
        read_trace(tmp_path / "0.jsonl", time_unit="hours")


def test_a_unit_of_times_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(compact_bytes(made([[1, 2], [1, 3]], 4)))
    assert len(read_trace(file).requests) == 2
    with pytest.raises(InputError, match=r"own\.jsonl: the times of a .* trace have a unit\. Leave --time-unit out\."):
        read_trace(file, time_unit="seconds")


def test_decimal_numbers_large_ids_and_full_blocks_alone_are_read(tmp_path) -> None:
    big = 1 << 70
    rows = [line(0.0, 1000.0, [big]), line(2.6, 1000, [big]), line(27482.0, 1024.0, [big, big + 1])]
    trace = read_trace(write(tmp_path / "m.jsonl", *rows))
    assert [(r.time_ms, r.tokens) for r in trace.requests] == [(0, 1000), (3, 1000), (27482, 1024)]
    first, second, third = (request.keys.tolist() for request in trace.requests)
    assert first[0] == second[0] == third[0]
    assert len({first[1], second[1], third[1]}) == 3
    assert_invariants(trace)
    for ids in ([["a", "b"], ["a", "c"]], [[7.0, 9.0], [7, 8]]):
        found = read_trace(write(tmp_path / "m.jsonl", *(line(ids=each) for each in ids))).requests
        assert [request.keys.tolist() for request in found] == [[0, 1], [0, 2]]
    for bad in (7.5, float(1 << 60), float("inf"), float("nan")):
        with pytest.raises(InputError, match="hash_ids is list"):
            read_trace(write(tmp_path / "m.jsonl", line(ids=[bad, 9.0])))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,1,2,3,API log\n", "BurstGPT"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.97,4808,10\r\n", "Azure"),
        ('{"timestamp": 0.5, "input_length": 10, "output_length": 5}\n', "GuideLLM and AIPerf"),
    ],
)
def test_a_form_without_ids_is_refused_by_its_name(tmp_path, text: str, name: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    for read, lacks in ((read_trace, "lengths and arrivals, but no hash_ids"), (read_conversations, "without text;")):
        with pytest.raises(InputError, match=rf"^[^\n]*table\.csv:1: is [^\n]*{name}[^\n]*{lacks}[^\n]*$"):
            read(path)


def test_rows_may_be_an_array_on_one_line_or_many(tmp_path) -> None:
    rows = [line(0, 1000, [7, 9]), line(5, 513, [7, 8])]
    for number, indent in enumerate((None, 1)):
        path = tmp_path / f"{number}.json"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=indent).encode())
        assert [request.keys.tolist() for request in read_trace(path).requests] == [[0, 1], [0, 2]]
    path.write_text(json.dumps([rows[0], 7], indent=1))
    with pytest.raises(InputError, match=r"1\.json:11: found int 7; wanted an object"):
        read_trace(path)


# What is written, and anything else ----------------------------------------------------------------------------------


def bailian_bytes(trace: Trace, *, are_prefix_ids: bool) -> bytes:
    """Rows of single requests; ids of blocks alone are the places of siblings in the tree of keys."""
    places: dict[int, dict[int, int]] = {}
    rows = []
    for index, request in enumerate(trace.requests):
        ids = keys = request.keys.tolist()
        if not are_prefix_ids:
            alone = [places.setdefault(before, {}) for before in [-1, *keys[:-1]]]
            ids = [known.setdefault(key, len(known)) for known, key in zip(alone, keys, strict=True)]
        row = chat(index, -1, request.time_ms / 1e3, ids, input_length=request.tokens)
        rows.append({**row, "output_length": request.output_tokens})
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def session_bytes(trace: Trace) -> bytes:
    """A session of a coding agent."""
    rows = [ask(r.time_ms / 1e3, r.tokens, r.keys.tolist(), out=r.output_tokens) for r in trace.requests]
    return json.dumps({"id": "s", "block_size": trace.block_tokens, "requests": rows}).encode()


@given(words)
@settings(max_examples=30, deadline=None)
def test_what_is_written_in_each_form_is_read_back_the_same(tmp_path_factory, paths: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("round") / "t.jsonl"
    writers = {
        512: (mooncake_bytes, compact_bytes, session_bytes),
        16: (partial(bailian_bytes, are_prefix_ids=True), partial(bailian_bytes, are_prefix_ids=False)),
    }
    for block_tokens, each in writers.items():
        gaps_ms, lacks = [0] + [10] * len(paths), len(paths) % block_tokens
        trace = made(paths, block_tokens, gaps_ms=gaps_ms, outputs=range(len(paths)), lacks=lacks)
        for bytes_of in each:
            path.write_bytes(bytes_of(trace))
            again = read_trace(path)
            assert again.block_tokens == block_tokens
            for old, new in zip(trace.requests, again.requests, strict=True):
                assert np.array_equal(old.keys, new.keys)
                assert (old.tokens, old.output_tokens, old.time_ms) == (new.tokens, new.output_tokens, new.time_ms)


numbers = st.one_of(st.integers(-1, 2000), st.sampled_from([1 << 62, 10**30]), st.floats())
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    *("timestamp", "created_time", "delay", "input_length", "output_length", "hash_ids", "session_id", "chat_id"),
    *("parent_chat_id", "turn", "type", "block_size", "requests", "t", "in", "out", "id", "agent_id", "duration_ms"),
    *("format", "version", "clock", "block_tokens", "request", "time", "tokens", "output", "after", "blocks"),
]
likely = st.one_of(
    values, numbers, st.lists(st.integers(0, 2), max_size=3), st.sampled_from([FORMAT, "subagent", "ms"])
)
rows = st.dictionaries(st.sampled_from(KEYS), likely, max_size=12)
documents = st.recursive(
    rows, lambda inner: st.builds(lambda row, own: {**row, "requests": own}, rows, st.lists(inner))
)


@given(
    st.one_of(
        st.lists(st.one_of(documents, values).map(json.dumps), max_size=5).map("\n".join),
        st.lists(st.lists(st.one_of(st.text(max_size=8), numbers.map(str))).map(",".join)).map("\n".join),
        st.text(),
    ).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.binary(),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_file_is_read_or_refused_with_its_name_in_bounded_memory(
    tmp_path_factory, content: bytes, skip_bad
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    refusal = ""
    tracemalloc.start()
    try:
        assert_invariants(read_trace(path, skip_bad=skip_bad))
    except InputError as error:
        refusal = str(error)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Of a file that cannot be read or has nothing, there is no line to name.
    nothing = "the file is empty|is compressed|cannot be read|no request found"
    assert not refusal or re.match(rf"{re.escape(str(path))}:(\d+: | ({nothing}))", refusal), refusal
    assert peak_bytes < 4 << 20


def test_a_line_and_a_session_that_are_too_long_are_refused_before_they_are_in_memory(tmp_path) -> None:
    path = write(tmp_path / "m.jsonl", line(0), line(1, ids=[0, 2]))
    with path.open("ab") as file:
        file.truncate(MOST_RECORD_BYTES + (2 << 20))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"m\.jsonl:3: the line is too long; wanted at most 67,108,864 bytes"):
        read_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * MOST_RECORD_BYTES
    tracemalloc.stop()
    big = session(tmp_path / "s.json", ask(0, 64, [1]))
    os.truncate(big, MOST_RECORD_BYTES + 1)
    with pytest.raises(
        InputError, match=r"s\.json: has more than 67,108,864 bytes; wanted a session of at most so many"
    ):
        read_trace(big)


# Coding agents -------------------------------------------------------------------------------------------------------


def test_session_has_full_blocks_and_a_tail_of_its_own(tmp_path) -> None:
    path = session(tmp_path / "s.json", ask(0, 130, [1, 2]), ask(9.5, 130, [1, 2]), ask(20, 192, [1, 2, 3]))
    trace = read_trace(path)
    first, second, third = trace.requests
    assert trace.is_timing_synthetic
    assert first.keys[:2].tolist() == second.keys[:2].tolist() == third.keys[:2].tolist()
    assert first.keys[2] != second.keys[2]
    assert (first.turn, second.turn, third.turn, third.kind, third.session) == (1, 2, 3, "main", "s")
    assert [request.time_ms for request in trace.requests] == [0, 9500, 20000]
    assert_invariants(trace)


def test_subagent_starts_its_duration_before_it_reports(tmp_path) -> None:
    inner = [ask(0, 64, [10]), ask(4, 128, [10, 11])]
    agent = {"t": 30.0, "type": "subagent", "agent_id": "a1", "duration_ms": 20_000, "requests": inner}
    trace = read_trace(session(tmp_path / "s.json", ask(0, 64, [1]), agent, ask(31, 128, [1, 2])))
    found = [(r.time_ms // 1000, r.kind, r.session, r.turn) for r in trace.requests]
    own = [(10, "subagent", "s/a1", 1), (14, "subagent", "s/a1", 2)]
    assert found == [(0, "main", "s", 1), *own, (31, "main", "s", 2)]


def test_sessions_share_no_block_and_start_by_a_seeded_poisson_process(tmp_path) -> None:
    for name in "abc":
        session(tmp_path / f"{name}.json", ask(0, 64, [1]), ask(1, 128, [1, 2]))
    first, again = read_trace(tmp_path), read_trace(tmp_path)
    other = read_trace(tmp_path, seed=1)
    times = [[request.time_ms for request in trace.requests] for trace in (first, again, other)]
    assert times[0] == times[1] != times[2]
    assert first.name == tmp_path.name
    sessions = {
        r.session: {int(key) for each in first.requests if each.session == r.session for key in each.keys}
        for r in first.requests
    }
    assert sorted(sessions) == ["a", "b", "c"]
    assert len(set().union(*sessions.values())) == sum(map(len, sessions.values())) == 6
    rare = read_trace(tmp_path, pace=Pace(sessions_per_hour=1.0))
    assert rare.requests[-1].time_ms > first.requests[-1].time_ms
    assert_invariants(first)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(0, 200, [1]), "requests[0]: hash_ids has 1 ids; in 200 needs 3 full blocks of 64 tokens."),
        (ask(-1, 64, [1]), "requests[0]: t is int -1; wanted seconds, 0 to 10,000,000,000,000."),
        (ask(float("nan"), 64, [1]), "t is float nan; wanted seconds"),
        (7, "requests[0] is int 7; wanted an object."),
        ({"type": "subagent", "t": 1, "duration_ms": 10**400, "requests": []}, "duration_ms is int 1000"),
        ({"type": "subagent", "t": 1, "requests": None}, "requests[0]: requests is missing; wanted a list."),
        ({"type": "subagent", "t": 1, "requests": [ask(0, 64, [])]}, "requests[0]: requests[0]: hash_ids has 0 ids"),
    ],
)
def test_bad_request_of_a_session_is_named(tmp_path, request_: Any, message: str) -> None:
    path = session(tmp_path / "s.json", request_, ask(1, 64, [9]))
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:1: ")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    with pytest.raises(InputError) as raised:
        read_trace(path)
    # Behind the lines of `{`, `id`, `block_size` and `requests`.
    assert str(raised.value).startswith(f"{path}:5: ")
    assert message in str(raised.value)
    assert len(read_trace(path, skip_bad=True).requests) == 1


def test_a_session_with_the_id_of_another_is_refused(tmp_path) -> None:
    first, second = (session(tmp_path / f"{name}.json", ask(0, 64, [1]), id="same") for name in "ab")
    with pytest.raises(InputError) as raised:
        read_trace(tmp_path)
    assert str(raised.value) == f"{second}:1: the id 'same' was already used at {first}:1; wanted distinct ids."
    trace = read_trace(tmp_path, skip_bad=True)
    assert (len(trace.requests), len(trace.skipped)) == (1, 1)


def test_subagents_without_end_and_sessions_of_unlike_blocks_are_refused(tmp_path) -> None:
    inner: dict[str, Any] = ask(0, 64, [1])
    for _ in range(40):
        inner = {"t": 0, "type": "subagent", "requests": [inner]}
    deep, other = session(tmp_path / "a.json", inner), session(tmp_path / "b.json", ask(0, 32, [1]), block_size=32)
    with pytest.raises(InputError, match=r"requests\[0\] is a sub-agent, 16 sub-agents deep; wanted fewer"):
        read_trace(deep)
    with pytest.raises(InputError, match=r"b\.json:1: block_size is 32; wanted 64"):
        read_trace(session(deep, ask(0, 64, [1])), other)


@pytest.mark.slow
def test_real_sessions_are_read_whole(shared_data) -> None:
    trace = read_trace(shared_data / "claude-code-traces" / "traces")
    assert len(trace.requests) == 1327
    assert sum(request.kind == "subagent" for request in trace.requests) == 102
    assert trace.skipped == ()
    assert_invariants(trace)
    # First turns are found without what the sessions say of them.
    inferred = infer_turns(replace(trace, requests=[replace(each, turn=None) for each in trace.requests]))
    agreeing = sum((a.turn == 1) == (b.turn == 1) for a, b in zip(trace.requests, inferred.requests, strict=True))
    assert agreeing / len(trace.requests) > 0.97


# Conversations -------------------------------------------------------------------------------------------------------


def test_conversations_take_a_tokenizer_and_share_what_they_share(tmp_path) -> None:
    from runner.models.tiny import tiny_tokenizer

    said = ["What is a radix tree? " * 20, "A tree.", "And then?", "It is cut."]
    whole = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)]
    records = [{"id": "a", "messages": whole}, {"id": "b", "messages": [*whole[:2], {**whole[0], "content": "Why?"}]}]
    path = write(tmp_path / "talks.jsonl", *records)
    with pytest.raises(InputError, match=r"Give --model to cut them into blocks"):
        read_trace(path)
    trace = read_trace(path, tokenizer=tiny_tokenizer(), block_tokens=32)
    assert (trace.block_tokens, trace.is_timing_synthetic) == (32, True)
    requests = {(r.session, r.turn): r for r in trace.requests}
    assert sorted(requests) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    first, second = requests["a", 1], requests["a", 2]
    full = first.tokens // 32
    assert first.keys[:full].tolist() == second.keys[:full].tolist() == requests["b", 2].keys[:full].tolist()
    assert first.output_tokens == len("A tree.")
    assert second.time_ms > first.time_ms
    assert_invariants(trace)


def test_what_is_no_trace_beside_sessions_of_an_agent_is_skipped(tmp_path) -> None:
    from runner.models.tiny import tiny_tokenizer

    log = ClaudeLog()
    log.talk("Hello? " * 20, "Hello.")
    written(tmp_path, log.records)
    (tmp_path / "empty.jsonl").touch()
    trace = read_trace(tmp_path, tokenizer=tiny_tokenizer())
    (skipped,) = trace.skipped
    assert len(trace.requests) == 1
    assert skipped.endswith("empty.jsonl: the file is empty; wanted conversations as JSON or JSONL.")
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(InputError, match=r"empty\.jsonl: the file is empty"):
        read_trace(tmp_path, tokenizer=tiny_tokenizer())


def test_packed_conversations_make_a_trace_and_say_what_was_left_out(tmp_path) -> None:
    from runner.models.tiny import tiny_tokenizer

    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    talked = [{"role": "user", "content": [image, {"type": "text", "text": "What is it? " * 20}]}]
    (tmp_path / "talks.jsonl.gz").write_bytes(gzip.compress(json.dumps(talked).encode()))
    trace = read_trace(tmp_path, tokenizer=tiny_tokenizer())
    assert len(trace.requests) == 1
    assert trace.notes == ("left out of the prompts, as they are no text of a message: 1 image_url.",)


# Formats, files, joining ---------------------------------------------------------------------------------------------


def test_missing_empty_and_foreign_files_are_one_line(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder: no \.json, \.jsonl file in the folder; wanted a trace\.$"):
        read_trace(tmp_path / "folder")
    for name, content, message in (
        ("twice.gz", gzip.compress(gzip.compress(b"")), "is compressed; wanted gzip, or an unpacked file"),
        ("other.zip", b"PK\x03\x04", "is compressed; wanted gzip, or an unpacked file"),
        ("table.csv", b"a,b\n1,2\n", "1: not JSON; wanted a trace"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}: ?{message}"):
            read_trace(path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=r"pipe\.jsonl: is a pipe or a device; wanted a file"):
        read_trace(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="no trace was given"):
        read_trace()


def test_files_of_a_folder_that_are_no_traces_can_be_skipped(tmp_path) -> None:
    session(tmp_path / "a.json", ask(0, 64, [1]))
    (tmp_path / "b.json").write_text("")
    (tmp_path / "c.json").write_text("notes")
    with pytest.raises(InputError, match=r"b\.json: the file is empty"):
        read_trace(tmp_path)
    trace = read_trace(tmp_path, skip_bad=True)
    assert (len(trace.requests), len(trace.skipped)) == (1, 2)


def test_format_is_told_by_content_also_where_the_first_line_is_broken(tmp_path) -> None:
    mooncake = write(tmp_path / "m.json", "{broken", line(block_size=512), line())
    with pytest.raises(InputError, match=r"m\.json:1: not JSON"):
        read_trace(mooncake)
    assert len(read_trace(mooncake, skip_bad=True, block_tokens=512).requests) == 2
    compact = tmp_path / "c.txt"
    compact.write_bytes(compact_bytes(read_trace(write(tmp_path / "n.jsonl", line()))))
    assert read_trace(compact).block_tokens == 512
    agent = session(tmp_path / "a.jsonl", ask(0, 64, [1]))
    agent.write_text(json.dumps(json.loads(agent.read_text()), indent=1))
    assert read_trace(agent).block_tokens == 64


def test_joined_traces_share_no_key_and_come_by_time(tmp_path) -> None:
    (tmp_path / "x").mkdir()
    first = write(tmp_path / "m.jsonl", line(0), line(10, ids=[0, 2]))
    second = write(tmp_path / "x" / "m.jsonl", line(5), line(10, ids=[0, 2]))
    trace = read_trace(first, second)
    assert [request.time_ms for request in trace.requests] == [0, 5, 10, 10]
    assert len({int(key) for request in trace.requests for key in request.keys}) == 6
    assert trace.name == "m+m"
    assert_invariants(trace)
    small, large = (Trace(f"{n}", n, [], False, f"{n}.jsonl") for n in (64, 512))
    with pytest.raises(InputError, match=r"512\.jsonl: blocks of 512 tokens; wanted 64, as in 64\.jsonl"):
        join_traces([small, large])
