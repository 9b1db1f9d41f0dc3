"""Made-up traffic has the properties its parameters name."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace import Trace
from tests.traces.rows import assert_invariants

SMALL = Synth(requests=2000)


def conversations(trace: Trace) -> dict[str, list]:
    found: dict[str, list] = {}
    for request in trace.requests:
        found.setdefault(request.session, []).append(request)
    return found


def test_blocks_and_times_are_those_of_a_trace() -> None:
    trace = synthesize(SMALL)
    assert len(trace.requests) == 2000
    assert trace.is_timing_synthetic
    assert_invariants(trace)


def test_prompts_grow_by_reply_and_message_where_nothing_branches() -> None:
    for requests in conversations(synthesize(replace(SMALL, branching=0.0))).values():
        for earlier, later in pairwise(requests):
            assert later.tokens > earlier.tokens + earlier.output_tokens
            assert later.turn == earlier.turn + 1


def test_turn_carries_on_the_latest_one_before_it_also_after_going_back() -> None:
    trace = synthesize(replace(SMALL, branching=0.5, turns=8.0, agent_share=0.5))
    shrunk = 0
    for requests in conversations(trace).values():
        latest = {}
        shrunk += sum(later.tokens < earlier.tokens for earlier, later in pairwise(requests))
        for request in requests:
            if request.turn > 1:
                earlier = latest[request.turn - 1]
                full = earlier.tokens // trace.block_tokens
                assert np.array_equal(earlier.keys[:full], request.keys[:full])
            latest[request.turn] = request
    assert shrunk > 50


def test_only_agents_have_more_requests_than_turns() -> None:
    chats = synthesize(replace(SMALL, agent_share=0.0))
    agents = synthesize(replace(SMALL, agent_share=1.0))
    assert {request.kind for request in chats.requests} == {"chat"}
    assert {request.kind for request in agents.requests} == {"agent"}
    lengths = [np.mean([len(each) for each in conversations(trace).values()]) for trace in (chats, agents)]
    assert lengths[0] < 4 < lengths[1]


def test_users_and_tools_take_the_time_that_is_asked_for() -> None:
    pace = {"think_s": 20.0, "tool_s": 2.0, "output_tokens_per_s": 1e6}
    for agent_share, turns, gap_s in ((0.0, 10.0, 20.0), (1.0, 1.0, 2.0)):
        trace = synthesize(replace(SMALL, agent_share=agent_share, turns=turns, tool_calls=10.0, **pace))
        gaps = [b.time_ms - a.time_ms for requests in conversations(trace).values() for a, b in pairwise(requests)]
        assert np.mean(gaps) / 1e3 == pytest.approx(gap_s, rel=0.2)


def test_no_prompt_is_longer_than_the_context() -> None:
    trace = synthesize(replace(SMALL, context_tokens=3000))
    assert max(request.tokens for request in trace.requests) <= 3000
    with pytest.raises(ValueError, match="none of 1000 conversations fit into 1 tokens"):
        synthesize(replace(SMALL, context_tokens=1, system_tokens=1e9))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"requests": 0}, {"turns": 0.5}, {"agent_share": 1.1}, {"branching": -0.1}, {"zipf": float("nan")}),
        *({"user_tokens": 0}, {"user_tokens": float("inf")}, {"reply_tokens": float("nan")}, {"think_s": 0}),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; wanted"):
        replace(SMALL, **wrong)
