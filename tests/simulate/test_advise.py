"""Advice says what the curve and the simulated rows say, and leaves out what is not known."""

from dataclasses import replace

import numpy as np
import pytest

from runner.simulate import advice
from runner.simulate.advice import (
    Advice,
    advice_document,
    best_policy,
    best_two,
    distinct,
    estimates_of,
    lru_report,
    parts_of,
    policy_text,
    samples_of,
)
from runner.simulate.curve import lru_curve
from runner.simulate.simulator import simulate
from runner.traces.trace import Trace, TraceRequest

GIB = 1 << 30


def circle(length: int = 10, rounds: int = 20) -> Trace:
    """Requests of one block of 64 tokens, round and round: LRU hits nothing below `length` blocks and then all."""
    requests = [TraceRequest(np.array([index % length], np.int64), 64, 1, index) for index in range(length * rounds)]
    return Trace("circle <1>", 64, requests, False, "circle.jsonl")


def advised(**more) -> Advice:
    trace = circle()
    return Advice(trace, lru_curve(trace), **more)


def test_budgets_are_where_the_curve_says() -> None:
    found = advised(token_bytes=1024, prefill_tokens_per_s=100.0, budget_bytes=9 * 64 * 1024)
    assert [budget.capacity_blocks for budget in found.budgets] == [10] * 4
    assert found.budgets[0].capacity_bytes == 10 * 64 * 1024
    # 190 of 200 requests hit; 12,800 tokens at 100 tokens/s.
    assert found.prefill_s == 128.0
    assert found.budgets[0].token_hit_ratio == pytest.approx(0.95)
    assert found.budgets[0].saved_s == pytest.approx(0.95 * 128.0)
    assert found.budgets[0].saved_s_per_gib == pytest.approx(0.95 * 128.0 / (10 * 64 * 1024 / GIB))
    assert found.own is not None
    assert (found.own.capacity_blocks, found.own.token_hit_ratio) == (9, 0.0)
    document = advice_document(found)
    assert document["savable_token_ratio"] == pytest.approx(0.95)
    assert document["budgets"][-1]["name"] == "your budget"
    assert document["budgets"][0]["saved_s_per_gib"] == found.budgets[0].saved_s_per_gib


def test_what_is_not_known_is_neither_counted_nor_printed() -> None:
    found = advised(budget_blocks=10)
    assert found.budgets[0].capacity_bytes is found.budgets[0].saved_s is found.budgets[0].saved_s_per_gib is None
    text, table, _ = lru_report(found)
    assert [column.header for column in table.columns] == ["LRU budget for", "blocks", "tokens", "prefill\nsaved"]
    assert "with --model-config or --bytes-per-token also in GiB" in policy_text(found)
    assert "can save at most 95.0% of prefill" in text
    assert "checkpoints of 5,000 bytes" in policy_text(advised(token_bytes=8, checkpoint_bytes=5000))
    assert "checkpoints" not in policy_text(advised(token_bytes=8))


def test_best_policy_is_online_and_ahead_of_lru() -> None:
    best = best_policy({"lru": 0.2, "turn": 0.25, "belady": 0.4, "random": 0.3}, 100)
    assert (best.policy, best.capacity_blocks, best.bound) == ("turn", 100, ("belady", 0.4))
    assert best.gain == pytest.approx(0.05)
    text = policy_text(advised(), best)
    assert "Best policy at 100 blocks: turn, 25.0% of prefill saved, 5.0 points more than lru" in text
    assert "belady, which knows the future, reaches 40.0%" in text
    close = best_policy({"turn": 0.2001, "lru": 0.2}, 100)
    assert (close.policy, close.gain, close.bound) == ("lru", 0.0, None)


# Samples


def sampled() -> Trace:
    """Conversations of growing prompts, interleaved, of which the trace does not say which is which."""
    requests = []
    for turn in range(1, 7):
        for talk in range(300):
            keys = [talk * 100 + block for block in range(turn * 3)]
            requests.append(TraceRequest(np.array(keys, np.int64), 64 * len(keys), 1, len(requests)))
    return Trace("talks", 64, requests, True, "made")


def test_a_sample_takes_conversations_whole_and_parts_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = sampled()
    first, second, third = samples_of(trace, 4)
    talks = [{int(request.keys[0]) // 100 for request in each.requests} for each in (first, second, third)]
    assert all(len(each.requests) == 6 * len(found) for each, found in zip((first, second, third), talks, strict=True))
    assert not talks[0] & talks[1] | talks[1] & talks[2] | talks[0] & talks[2]
    assert 0.15 < sum(map(len, talks)) / 3 / 300 < 0.35
    assert [request.time_ms for request in first.requests] == sorted(request.time_ms for request in first.requests)
    # Of one part alone samples are taken one behind the other.
    monkeypatch.setattr(advice, "SAMPLE_REFS", 3_000)
    windows = samples_of(trace, 1)
    assert len(windows) == 3
    assert all(2_900 < each.block_refs <= 3_020 for each in windows)
    assert windows[0].requests[-1].time_ms < windows[1].requests[0].time_ms
    # Parts are as many as leave room for some prompts: 10.5 blocks a prompt, 18,900 in all.
    monkeypatch.setattr(advice, "SAMPLE_REFS", 1_000)
    assert [parts_of(trace, blocks) for blocks in (10, 84, 168, 10_000)] == [1, 1, 2, 18]


def test_an_estimate_is_of_the_difference_to_lru_on_the_same_sample() -> None:
    row = simulate(circle(), "lru", 100)
    ratios = {"lru": (0.2, 0.6), "gdsf": (0.22, 0.64), "fifo": (0.2, 0.6), "arc": (0.3, 0.4)}
    rows = [
        replace(row, trace=f"{number}", policy=policy, token_hit_ratio=ratio)
        for policy, pair in ratios.items()
        for number, ratio in enumerate(pair)
    ]
    gdsf, lru, fifo, arc = estimates_of(rows)
    assert (gdsf.policy, lru.policy, fifo.policy, arc.policy) == ("gdsf", "lru", "fifo", "arc")
    assert (gdsf.gain, gdsf.error) == (pytest.approx(0.03), pytest.approx(0.01))
    assert (lru.gain, lru.error) == (0, 0)
    assert [each.policy for each in distinct([gdsf, lru, fifo, arc])] == ["gdsf", "lru", "arc"]
    assert [each.policy for each in best_two([gdsf, lru, fifo, arc])] == ["gdsf", "lru"]
    unsure = replace(gdsf, error=0.05)
    assert [each.policy for each in best_two([unsure, lru, fifo, arc])] == ["lru"]


def test_an_assumed_rate_of_arrivals_is_said_with_its_option() -> None:
    found = advised()
    assert "sessions per hour are assumed" not in lru_report(found)[0]
    guessed = replace(found, trace=replace(found.trace, sessions_per_hour=30.0))
    assert "30 sessions per hour are assumed" in lru_report(guessed)[0]
    assert "With another --sessions-per-hour" in lru_report(guessed)[0]
    assert advice_document(guessed)["sessions_per_hour"] == 30.0
