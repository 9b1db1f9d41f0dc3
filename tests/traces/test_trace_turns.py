"""Turns told from prompts: conversations are numbered, shared beginnings are not taken for conversations."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runner.traces.trace import MOST_BRANCHES, Trace, TraceRequest, TurnInference, infer_turns
from runner.traces.trace_reader import read_trace

BLOCK_TOKENS = 4
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30)


def trace_of(*prompts: str) -> Trace:
    """Each letter is a token."""
    numbers: dict[str, int] = {}
    requests = []
    for time_ms, prompt in enumerate(prompts):
        ends = range(BLOCK_TOKENS, len(prompt) + BLOCK_TOKENS, BLOCK_TOKENS)
        keys = [numbers.setdefault(prompt[:end], len(numbers)) for end in ends]
        requests.append(TraceRequest(np.array(keys, np.int64), len(prompt), 1, time_ms))
    return Trace("t", BLOCK_TOKENS, requests, False, "t")


def turns(*prompts: str) -> list[int | None]:
    return [request.turn for request in infer_turns(trace_of(*prompts)).requests]


def test_prompt_that_extends_an_earlier_one_is_its_next_turn() -> None:
    assert turns("aaaabb", "ccccdddd", "aaaabbbbcc", "aaaabbbbccccdd", "ccccddddeeee") == [1, 1, 2, 3, 2]


def test_partly_filled_blocks_do_not_have_to_agree() -> None:
    assert turns("aaaab", "aaaacccc") == [1, 2]
    assert turns("aaaabbbb", "aaaacccc") == [1, 1]


def test_repeated_prompt_that_grew_by_less_than_a_block_is_a_further_turn() -> None:
    assert turns("aaaab", "aaaabb", "aaaabbb") == [1, 2, 3]


def test_prompts_without_a_full_block_are_first_turns() -> None:
    assert turns("aa", "aaa", "aa") == [1, 1, 1]


def test_shared_beginning_is_no_conversation_after_enough_branches() -> None:
    # A bare system prompt, then many conversations that begin with it.
    prompts = ["ssss"] + [f"ssss{letter * 4}" for letter in "abcdefgh"]
    assert turns(*prompts) == [1] + [2] * MOST_BRANCHES + [1] * (8 - MOST_BRANCHES)


def test_block_that_somebody_else_brought_in_does_not_make_a_conversation() -> None:
    # The second request ends on the first one's first block, without carrying it on; the third extends that block.
    assert turns("ssssaaaa", "ssss", "ssssbbbb", "ssssaaaacccc") == [1, 1, 1, 2]


@given(PATHS)
def test_what_comes_later_changes_no_turn(paths: list[list[int]]) -> None:
    prompts = ["".join(str(token) * 3 for token in path) for path in paths]
    whole = turns(*prompts)
    for end in range(len(prompts)):
        assert turns(*prompts[:end]) == whole[:end]


def test_turns_that_the_trace_knows_are_kept() -> None:
    trace = trace_of("aaaa", "aaaabbbb")
    known = replace(trace, requests=[replace(each, turn=7) for each in trace.requests])
    assert [request.turn for request in infer_turns(known).requests] == [7, 7]


def test_inference_can_run_along_with_the_requests() -> None:
    inference = TurnInference(BLOCK_TOKENS)
    assert [inference.place(request)[1] for request in trace_of("aaaa", "aaaabbbb").requests] == [1, 2]


def test_first_turns_of_real_sessions_are_found(shared_data) -> None:
    trace = read_trace(shared_data / "claude-code-traces" / "traces")
    blank = replace(trace, requests=[replace(each, turn=None) for each in trace.requests])
    inferred = infer_turns(blank)
    agreeing = sum((a.turn == 1) == (b.turn == 1) for a, b in zip(trace.requests, inferred.requests, strict=True))
    assert agreeing / len(trace.requests) > 0.97
