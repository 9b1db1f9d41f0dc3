"""Several users at a time are given the replies that they get one after the other, from prompts that are the same."""

import pytest

from runner.replay.replayer import AnswerDifference, Replay, replay
from runner.replay.report import TIE, Report
from runner.replay.servers import ReplayOptions
from runner.script.conversation import Conversation
from runner.script.schedule import schedule
from runner.script.script import Script
from tests.engine.test_parallel_generate import load
from tests.replay.test_replay import CONVERSATIONS, Silence

BUDGET_BYTES = 64 << 20
# Replies that are not recorded: what a user asks next follows on what was generated.
UNRECORDED = [
    Conversation(
        name,
        name,
        tuple({"role": "user", "content": text} for text in (f"I am {name}.", "Go on.", "Why?")),
        replies_recorded=False,
    )
    for name in ("ann", "bob", "eve")
]


def new_script(loaded, conversations, seed, max_tokens=6):
    return Script(loaded, schedule(conversations, seed=seed), max_tokens=max_tokens)


def options(**more):
    return ReplayOptions(**{"budget_bytes": BUDGET_BYTES, "max_tokens": 6, "step_size": 64, **more})


def together(kind, users, *, conversations=CONVERSATIONS):
    loaded = load(kind)
    run = Replay(loaded, new_script(loaded, conversations, 1), ["radix"], options(), Silence(), users)
    run.run()
    assert not [each for each in run.differences() if each.gap >= TIE]
    (found,) = run.result()
    return found


@pytest.fixture(scope="module")
def watched():
    """A finished run of two users at a time, and who watched it."""
    loaded, observer = load("llama"), Silence()
    run = Replay(loaded, new_script(loaded, CONVERSATIONS, 1), ["radix"], options(), observer, 2)
    run.run()
    assert not run.differences()
    return run, observer


def alone(kind, *, conversations=CONVERSATIONS):
    loaded = load(kind)
    (run,) = replay(loaded, new_script(loaded, conversations, 1), ["radix"], options(), Silence())
    return run


@pytest.mark.parametrize(("users", "kind"), [(2, "llama_sliding"), (3, "jamba")])
def test_replies_and_prompts_are_those_of_one_request_at_a_time(kind, users):
    expected = alone(kind)
    found = together(kind, users)
    for name in ("user", "conversation_id", "turn", "prompt_tokens", "output_hash", "output_tokens", "done_reason"):
        assert [getattr(row, name) for row in found.rows] == [getattr(row, name) for row in expected.rows], name
    assert found.users_at_a_time == min(users, 2)  # Ann and Bob
    # Ann and Bob have a system prompt in common, and each the turns before.
    assert sum(row.cached_tokens for row in found.rows) >= 0.5 * sum(row.cached_tokens for row in expected.rows)


def test_replies_that_are_generated_are_in_the_next_prompts():
    expected = alone("llama", conversations=UNRECORDED)
    found = together("llama", 3, conversations=UNRECORDED)
    assert len(found.rows) == 9
    assert [row.output_hash for row in found.rows] == [row.output_hash for row in expected.rows]
    assert [row.prompt_tokens for row in found.rows] == [row.prompt_tokens for row in expected.rows]


def test_no_more_tokens_are_asked_for_than_all_users_together_can_fill():
    few, many = (together("llama", users, conversations=UNRECORDED) for users in (2, 10**9))
    assert (many.users_at_a_time, many.capacity_tokens) == (3, few.capacity_tokens // 2 * 3)
    assert [row.output_hash for row in many.rows] == [row.output_hash for row in few.rows]


def test_the_observer_hears_of_every_request_and_peaks_are_within_bounds(watched):
    run, observer = watched
    (found,) = run.result()
    assert observer.runs == [("radix together", 7), ("radix", 7), ("none", 7)]
    assert sorted(tokens for run, tokens in observer.done if run == "radix together") == sorted(
        row.prompt_tokens for row in found.rows
    )
    assert 0 < found.peak_tokens <= found.capacity_tokens
    assert 0 < max(row.peak_bytes for row in found.rows) <= BUDGET_BYTES
    assert all(row.ttft_ms > row.waited_ms >= 0 for row in found.rows)
    assert found.wall_s * 1e3 >= max(row.ttft_ms for row in found.rows)


@pytest.mark.parametrize("kind", ["llama"])
def test_mlx_lms_batches_serve_the_same_requests_and_find_less_of_them(kind):
    loaded = load(kind)
    run = Replay(loaded, new_script(loaded, CONVERSATIONS, 1), ["radix", "mlx-lm"], options(), Silence(), 2)
    run.run()
    ours, theirs = run.result()
    assert (ours.cache, theirs.cache) == ("radix", "mlx-lm")
    assert [row.prompt_tokens for row in ours.rows] == [row.prompt_tokens for row in theirs.rows]
    assert 0 < sum(row.cached_tokens for row in theirs.rows) <= sum(row.cached_tokens for row in ours.rows)
    assert theirs.rows[0].peak_bytes > 0
    assert not [each for each in run.differences() if each.gap >= TIE]
    report = Report(run.result(), is_parallel=True, alone=run.alone(), partings=run.differences())
    assert "In mlx-lm's batches they took" in report.sentence()
    assert [each["cache"] for each in report.document()["runs"]] == ["radix", "mlx-lm", "radix", "none"]


def test_an_answer_that_parts_is_said_by_how_near_the_two_tokens_were(watched, monkeypatch):
    run, _ = watched
    kept = run.result()
    replies = run._together[0].replies
    first, second, third, *rest = replies[3]
    monkeypatch.setitem(replies, 3, [first, second, third + 1, *rest])
    (found,) = run.differences()
    assert (found.cache, found.index) == ("radix", 3)
    assert found.gap > TIE
    report = Report(kept, is_parallel=True, alone=run.alone(), partings=[found, AnswerDifference("radix", 4, TIE / 2)])
    assert [(cache, index) for cache, index, _ in report.differences()] == [("radix", 3)]
    assert "1 answer parted where two tokens were as good as one another. 1 answer differ" in report.sentence()
