"""The schedule: which requests a conversation makes, in which order users come, and what generated replies replace."""

import tracemalloc
from itertools import pairwise
from typing import Any

import pytest

from runner.script.conversation import Call, Conversation
from runner.script.schedule import GeneratedReplies, ScheduledRequest, schedule


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SYSTEM = said("system", "Be brief.")
CALLING = said("assistant", "Let me see.", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
TOOL = {"type": "function", "function": {"name": "f"}}


def turns(count: int, topic: str = "x") -> tuple[dict[str, Any], ...]:
    pairs = [(said("user", f"{topic} {turn}?"), said("assistant", f"{topic} {turn}.")) for turn in range(count)]
    return (SYSTEM, *(message for pair in pairs for message in pair))


def talk(name: str, user: str, count: int, **more: Any) -> Conversation:
    return Conversation(name, user, turns(count, name), **more)


def test_each_user_turn_is_a_request_with_the_conversation_up_to_it() -> None:
    conversation = talk("a", "ann", 2, tools=(TOOL,))
    first, second = schedule([conversation])
    shared = turns(2, "a")
    assert first == ScheduledRequest(0, conversation, 0, 2)
    assert second == ScheduledRequest(1, conversation, 1, 4)
    assert (first.messages, first.recorded_reply, first.reply_slots) == (shared[:2], said("assistant", "a 0."), ())
    assert (second.messages, second.recorded_reply, second.reply_slots) == (shared[:4], said("assistant", "a 1."), (2,))


def test_the_requests_of_a_long_conversation_share_its_messages() -> None:
    conversation = talk("a", "ann", 2_000)
    tracemalloc.start()
    requests = schedule([conversation])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(requests[-1].messages) == len(conversation.messages) - 1
    assert peak_bytes < 1_000 * len(requests)


def test_tool_result_makes_a_request_of_the_same_turn() -> None:
    messages = (SYSTEM, said("user", "q"), CALLING, said("tool", "1"), said("tool", "2"), said("assistant", "r"))
    first, second = schedule([Conversation("a", "ann", messages)])
    assert (first.turn, len(first.messages), first.recorded_reply) == (0, 2, CALLING)
    assert (second.turn, len(second.messages), second.recorded_reply) == (0, 5, messages[5])


def test_only_what_ends_with_the_user_or_comes_before_a_reply_is_asked() -> None:
    messages = (said("assistant", "Welcome"), said("user", "q"), said("assistant", "r"), said("assistant", "s"))
    (request,) = schedule([Conversation("a", "ann", messages)])
    assert request.messages == messages[:2]
    (request,) = schedule([Conversation("a", "ann", (said("user", "one"), said("user", "two")))])
    assert (request.turn, len(request.messages), request.recorded_reply) == (1, 2, None)
    requests = schedule([talk("a", "ann", 3), talk("b", "ann", 3, asked_messages=5)])
    turns = [(each.conversation.conversation_id, each.turn) for each in requests]
    assert turns == [("a", 0), ("a", 1), ("a", 2), ("b", 2)]


def test_users_are_interleaved_and_the_requests_of_each_stay_in_order() -> None:
    conversations = [talk(f"{user}{number}", user, 3) for number in (1, 2) for user in ("ann", "bob", "cyd")]
    requests = schedule(conversations, seed=3)
    assert [request.index for request in requests] == list(range(18))
    for user in ("ann", "bob", "cyd"):
        own = [(each.conversation.conversation_id, each.turn) for each in requests if each.conversation.user == user]
        assert own == [(f"{user}{number}", turn) for number in (1, 2) for turn in range(3)]
    switches = sum(before.conversation.user != after.conversation.user for before, after in pairwise(requests))
    assert switches > 5, "18 requests of three users in a random order"


def test_schedule_is_a_function_of_its_seed() -> None:
    conversations = [talk(user, user, 5) for user in ("ann", "bob", "cyd")]
    assert schedule(conversations, seed=1) == schedule(conversations, seed=1)
    orders = {tuple(request.conversation.user for request in schedule(conversations, seed=seed)) for seed in range(5)}
    assert len(orders) == 5


def test_requests_of_logs_come_by_time_with_and_without_fractions_of_a_second() -> None:
    times = ["2026-11-01T10:00:10Z", "2026-11-01T10:00:10.500Z", "2026-11-01T10:00:11Z"]
    logs = [talk(name, name, 1, calls=(Call("r", time, "m"),)) for name, time in zip("cab", times, strict=True)]
    assert [each.call.time for each in schedule(logs[::-1]) if each.call] == times


def test_users_takes_the_first_ones_and_max_requests_the_beginning() -> None:
    conversations = [talk(f"{user}{number}", user, 2) for number in (1, 2) for user in ("ann", "bob", "cyd")]
    assert {request.conversation.user for request in schedule(conversations, users=2)} == {"ann", "bob"}
    assert schedule(conversations, max_requests=5) == schedule(conversations)[:5]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"users": 0}, "users is 0; wanted 1 to 2, as the conversations have 2 users"),
        ({"users": 3}, "users is 3; wanted 1 to 2"),
        ({"max_requests": 0}, "max_requests is 0; wanted at least 1"),
        ({"conversations": []}, "no conversations to schedule"),
    ],
)
def test_wrong_counts_are_refused_with_one_line(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        schedule(**{"conversations": [talk("a", "ann", 1), talk("b", "bob", 1)], **options})


def test_questions_without_recorded_replies_are_each_asked() -> None:
    questions = (said("user", "one"), said("user", "two"), said("user", "three"))
    requests = schedule([Conversation("a", "ann", questions, replies_recorded=False)])
    assert [request.messages for request in requests] == [questions[:1], questions[:2], questions]
    assert [(request.recorded_reply, request.reply_slots) for request in requests] == [
        (None, ()), (None, (1,)), (None, (1, 2)),
    ]  # fmt: skip


# Generated replies


def test_generated_replies_take_the_place_of_recorded_ones() -> None:
    replies = GeneratedReplies()
    for request in schedule([talk("a", "ann", 3)]):
        replies.record(request, f"generated {request.turn}")
    messages = replies.messages(schedule([talk("a", "ann", 3)])[2])
    _, second = schedule([talk("b", "ann", 2)])
    assert replies.messages(second) == second.messages  # nothing was generated for it
    assert [message["content"] for message in messages] == [
        "Be brief.", "a 0?", "generated 0", "a 1?", "generated 1", "a 2?",
    ]  # fmt: skip


def test_generated_replies_stand_between_questions_that_have_no_recorded_ones() -> None:
    questions = (said("user", "one"), said("user", "two"))
    first, second = schedule([Conversation("a", "ann", questions, replies_recorded=False)])
    replies = GeneratedReplies()
    with pytest.raises(ValueError, match="conversation 'a': the reply before message 1 was neither recorded nor gen"):
        replies.messages(second)
    replies.record(first, "answer")
    assert replies.messages(second) == (questions[0], said("assistant", "answer"), questions[1])


def test_edited_conversation_shares_the_generated_replies_of_the_one_it_repeats() -> None:
    edited = Conversation("b", "ann", (*turns(2, "a")[:3], said("user", "edited?"), said("assistant", "ok")), None, 3)
    first, second, branch = schedule([talk("a", "ann", 2), edited])
    replies = GeneratedReplies()
    replies.record(first, "generated")
    assert replies.messages(second)[:3] == replies.messages(branch)[:3]
    assert replies.messages(branch)[2]["content"] == "generated"


def test_regenerated_reply_is_kept_apart_from_the_first_one() -> None:
    other = (*turns(1, "a")[:2], said("assistant", "another"), said("user", "and?"), said("assistant", "so"))
    first, again, after_again = schedule([talk("a", "ann", 1), Conversation("b", "ann", other)])
    assert first.messages == again.messages
    replies = GeneratedReplies()
    replies.record(first, "generated first")
    replies.record(again, "generated again")
    assert replies.messages(after_again)[2]["content"] == "generated again"


def test_reply_that_calls_tools_stays_as_recorded_since_its_results_follow() -> None:
    messages = (said("user", "q"), CALLING, said("tool", "1"), said("assistant", "r"))
    first, second = schedule([Conversation("a", "ann", messages)])
    replies = GeneratedReplies()
    replies.record(first, "I will not call")
    assert replies.messages(second) == messages[:3]
