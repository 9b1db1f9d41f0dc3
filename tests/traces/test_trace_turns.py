"""Turns told from prompts: conversations are numbered, shared beginnings are not taken for conversations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.traces.trace import MOST_BRANCHES, Trace, TraceRequest, infer_turns

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


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param(
            ["aaaabb", "ccccdddd", "aaaabbbbcc", "aaaabbbbccccdd", "ccccddddeeee"], [1, 1, 2, 3, 2], id="extends"
        ),
        pytest.param(["aaaab", "aaaacccc"], [1, 2], id="partly filled blocks differ"),
        pytest.param(["aaaabbbb", "aaaacccc"], [1, 1], id="full blocks differ"),
        pytest.param(["aaaab", "aaaabb", "aaaabbb"], [1, 2, 3], id="grows by less than a block"),
        pytest.param(["aa", "aaa", "aa"], [1, 1, 1], id="no full block"),
        # The second ends on the first one's first block, without carrying it on; the third extends that block.
        pytest.param(["ssssaaaa", "ssss", "ssssbbbb", "ssssaaaacccc"], [1, 1, 1, 2], id="block of somebody else"),
    ],
)
def test_a_prompt_that_extends_an_earlier_one_is_its_next_turn(prompts: list[str], expected: list[int]) -> None:
    assert turns(*prompts) == expected


def test_shared_beginning_is_no_conversation_after_enough_branches() -> None:
    # A bare system prompt, then many conversations that begin with it.
    prompts = ["ssss"] + [f"ssss{letter * 4}" for letter in "abcdefgh"]
    assert turns(*prompts) == [1] + [2] * MOST_BRANCHES + [1] * (8 - MOST_BRANCHES)


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
