"""The built-in conversations: large enough to show something, small enough for two cores, branching at every depth."""

from collections import Counter
from itertools import combinations, pairwise, takewhile
from typing import Any

from runner.script.conversation import Conversation
from runner.script.conversation_reader import builtin_conversations
from runner.script.schedule import schedule

# Measured once with the tokenizer and template of SmolLM2-135M-Instruct, as 11,382 tokens.
CHARACTERS_PER_TOKEN = 3.97


def rendered_chars(messages: tuple[dict[str, Any], ...]) -> int:
    """Length of a ChatML prompt, with its control tokens counted as text of a token's length."""
    return sum(len(message["content"]) + len(message["role"]) + 4 * 4 for message in messages) + 3 * 4


def shared_messages(one: Conversation, other: Conversation) -> int:
    pairs = zip(one.messages, other.messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_default_schedule_has_about_24_requests_and_12000_prompt_tokens() -> None:
    requests = schedule(builtin_conversations())
    assert len(requests) == 24
    tokens = sum(rendered_chars(request.messages) for request in requests) / CHARACTERS_PER_TOKEN
    assert 11_000 <= tokens <= 12_500


def test_in_the_short_replay_users_with_one_system_prompt_take_turns_edit_and_branch() -> None:
    chosen = builtin_conversations("builtin_short.jsonl")
    requests = schedule(chosen)
    assert len(requests) == 8
    # Four caches prefill 3,839 tokens: without a cache all of them, with radix a third.
    assert 1_400 <= sum(rendered_chars(request.messages) / CHARACTERS_PER_TOKEN for request in requests) <= 1_650
    assert len({each.messages[0]["content"] for each in chosen}) == 1
    users = [request.conversation.user for request in requests]
    assert len(set(users)) == 4
    assert all(one != other for one, other in pairwise(users))
    edited = [each for each in chosen if each.asked_messages > 1]
    assert [shared_messages(*pair) for pair in combinations(chosen, 2) if pair[1] in edited] == [1, 3]
    (ours,) = [each for each in chosen if each.user == "dora"]
    (theirs,) = [each for each in chosen if each.user == "cleo"]
    ours_text, theirs_text = (each.messages[1]["content"].partition("\n\n")[0] for each in (ours, theirs))
    assert ours_text == theirs_text
    assert len(ours_text) > 350


def test_several_applications_have_several_users_who_branch_at_every_depth() -> None:
    conversations = builtin_conversations()
    prompts = {conversation.messages[0]["content"] for conversation in conversations}
    users = Counter(user.partition("/")[0] for user in {conversation.user for conversation in conversations})
    assert all(conversation.messages[0]["role"] == "system" for conversation in conversations)
    assert len(prompts) == len(users) >= 4
    assert all(count >= 2 for count in users.values())
    # The system prompt alone, a first question or reply, something in the middle.
    shared = {shared_messages(one, other) for one, other in combinations(conversations, 2)}
    assert shared >= {0, 1, 2, 3, 5}
