"""Turns: every text of a conversation reaches the prompt, in place, whatever roles the template takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from radixcache.chat import HEADER_TOKENS, render_chat
from radixcache.turns import MAX_UNKNOWN_ROLES, Turns
from runner.serve.prompts import prompt_of
from runner.serve.request import ModelNames, Request
from tests.chat.conversations import (
    require_reuse,
    resumed_tokens,
    turn,
    two_conversations_that_share_a_beginning,
)
from tests.chat.templates import GEMMA, HERMES, QWEN3, ROLE_TEMPLATES, ROLES_ONLY, STRICT, TOOL
from tests.chat.tokenizers import make_tokenizer

CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}


def prompt(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    """The prompt of the server, as text."""
    tokenizer = TokenizerWrapper(make_tokenizer(template))
    found = prompt_of(Request(ModelNames(), 5, messages=messages, **more), tokenizer, {}, with_marks=True)
    text: str = tokenizer.decode(found.tokens)
    return text


# Of every kind: what Claude Code, Codex and simpler clients send.
TALKS = [
    "system user",
    "system developer user",
    "developer user assistant user",
    "system user assistant system user",
    "system user system assistant user",
    "system user assistant user system",
    "system user call tool system assistant user",
    "system user call tool user",
    "system user call tool tool user system assistant developer user",
    "user user assistant assistant user",
    "user developer assistant user",
    "user critic assistant user function assistant user",
]


@pytest.mark.parametrize("with_tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", ROLE_TEMPLATES)
def test_every_text_is_in_the_prompt_once_and_in_order(name: str, talk: str, with_tools: bool) -> None:
    messages, contents = [], []
    for index, role in enumerate(talk.split()):
        contents.append(f"the {'abcdefghijkl'[index]} text.")
        calls = {"role": "assistant", "tool_calls": [CALL]} if role == "call" else {}
        messages.append({**turn(role, contents[-1]), **calls})
    text = prompt(ROLE_TEMPLATES[name], messages, tools=[TOOL] if with_tools else None)
    assert [text.count(content) for content in contents] == [1] * len(contents)
    assert sorted(contents, key=text.index) == contents


@pytest.mark.parametrize("name", ROLE_TEMPLATES)
def test_turns_that_are_appended_extend_the_prompt(name: str) -> None:
    roles = ("system", "developer", "user", "assistant", "system", "user", "assistant", "developer", "user")
    talk = [turn(role, f"the {letter} text.") for role, letter in zip(roles, itertools.count(1), strict=False)]
    prompts = [prompt(ROLE_TEMPLATES[name], talk[:count]) for count in (3, 6, 9)]
    for shorter, longer in itertools.pairwise(prompts):
        ends = "text." if name in ("strict", "gemma") else "<|im_end|>"  # behind it the next reply is opened
        assert longer.startswith(shorter[: shorter.rindex(ends)])


def test_a_later_system_turn_of_a_strict_template_stands_in_place_as_the_users() -> None:
    talk = [turn("system", "Be brief."), turn("user", "Hi"), turn("system", "It is late."), turn("assistant", "Ho")]
    assert prompt(STRICT, [*talk, turn("user", "Bye")]) == (
        "<s>[SYS]Be brief.[/SYS][INST] Hi\n\nIt is late. [/INST] Ho</s>[INST] Bye [/INST]"
    )
    assert "<|im_start|>user\nIt is late.<|im_end|>\n" in prompt(QWEN3, [*talk, turn("user", "Bye")])


def test_a_developer_is_the_system_where_the_template_has_no_developers() -> None:
    talk = [turn("developer", "Be brief."), turn("user", "Hi"), turn("developer", "It is late.")]
    assert prompt(ROLES_ONLY, talk) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>system\nIt is late.<|im_end|>\n<|im_start|>assistant\n"
    )
    shown = ROLES_ONLY.replace("'system', ", "'system', 'developer', ")
    assert prompt(shown, talk).count("<|im_start|>developer\n") == 2, "and stays one where it has them"


def test_without_a_system_role_the_system_text_is_in_front_of_the_first_question() -> None:
    talk = [turn("system", "Be brief."), turn("developer", "In verse."), turn("user", "Hi")]
    assert prompt(GEMMA, talk) == ("<s><|im_start|>user\nBe brief.\n\nIn verse.\n\nHi<|im_end|>\n<|im_start|>model\n")


def test_a_template_that_moves_later_system_texts_to_the_front_does_not_take_them() -> None:
    moved = (
        "{% for m in messages if m.role == 'system' %}<s>{{ m.content }}</s>{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    talk = [turn("system", "Be brief."), turn("user", "Hi"), turn("assistant", "Ho"), turn("system", "It is late.")]
    assert prompt(moved, [*talk, turn("user", "Bye")]).startswith("<s>Be brief.</s><|im_start|>user\nHi")


def test_two_replies_that_become_one_keep_their_calls_and_lists_of_parts_are_joined() -> None:
    strict_calls = GEMMA.replace("{{ m.content | trim }}", "{{ m.content }}{{ m.tool_calls or '' }}")
    both = [turn("assistant", "One", tool_calls=[CALL]), turn("assistant", "Two", tool_calls=[CALL])]
    parts = [{"role": "user", "content": [{"type": "text", "text": each}]} for each in ("Hi", "there")]
    text = prompt(strict_calls, [*parts, *both, turn("user", "Bye")])
    assert "user\nHi\n\nthere<|im_end|>" in text
    assert "One\n\nTwo[{" in text
    assert text.count("Ulm") == 2


def test_a_template_that_shows_no_texts_is_left_alone() -> None:
    assert prompt("{{ messages | length }}", [turn("system", "a"), turn("developer", "b"), turn("user", "c")]) == "3"


def test_a_template_is_asked_once_however_many_conversations_there_are() -> None:
    tokenizer = make_tokenizer(STRICT)
    talk = [turn("system", "Be brief."), turn("user", "Hi"), turn("system", "It is late."), turn("critic", "So?")]
    rendered: list[int] = []
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **kwargs: rendered.append(1) or render(*args, **kwargs)
    counts = []
    for _ in range(3):
        rendered.clear()
        render_chat(tokenizer, talk[:3])
        counts.append(len(rendered))
    assert counts[0] > counts[1] == counts[2] < 12
    render_chat(tokenizer, talk)


@pytest.mark.parametrize("name", ROLE_TEMPLATES)
@settings(max_examples=10, deadline=None)
@given(pair=two_conversations_that_share_a_beginning(), tool_count=st.integers(0, 3))
def test_another_conversation_resumes_at_a_mark_with_any_number_of_tools(name: str, pair: Any, tool_count: int) -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "name": f"tool{index}"}} for index in range(tool_count)]
    require_reuse(make_tokenizer(ROLE_TEMPLATES[name]), pair, tools)


def numbered_tools(*words: str) -> list[dict[str, Any]]:
    texts = {word: f"Tells the {word} of a place. " * 3 for word in words}
    return [{**TOOL, "function": {**TOOL["function"], "name": word, "description": texts[word]}} for word in words]


@pytest.mark.parametrize("name", ROLE_TEMPLATES)
def test_each_request_of_an_agent_and_each_branch_of_its_session_resumes_at_a_mark(name: str) -> None:
    tokenizer, tools = make_tokenizer(ROLE_TEMPLATES[name]), numbered_tools("weather", "time", "height")
    talk, known = [turn("system", "You are brief.")], "Ulm, then." if "tool_calls" in ROLE_TEMPLATES[name] else "It is"
    earlier: list[Any] = []

    def require_mark(rendered: list[Any], tokens: Any) -> None:
        found = [resumed_tokens(*each, tokens) for each in rendered]
        resumed, shared = (max(each) for each in zip(*found, strict=True))
        assert shared - resumed <= HEADER_TOKENS, tokenizer.decode(tokens[resumed:shared])

    for word in ("weather", "time", "height", "weather"):
        call = {**CALL, "function": {"name": word, "arguments": {"city": f"a city with much {word}"}}}
        # The result has the name of a tool and the text of the reasoning, which the template may have left out.
        asked, called = turn("user", word), turn("assistant", "", reasoning_content="Ulm, then.", tool_calls=[call])
        told = [turn("tool", f"{known} {word}", tool_call_id="a"), turn("assistant", "So it is.")]
        for more in ([asked], [called, told[0]]):
            talk += more
            tokens, marks = render_chat(tokenizer, talk, tools)
            if earlier:
                require_mark(earlier, tokens)
            earlier.append((tokens, marks))
        talk.append(told[1])
    for index in (index for index, each in enumerate(talk) if each["role"] == "user"):
        require_mark(earlier[-1:], render_chat(tokenizer, [*talk[:index], turn("user", "So?")], tools)[0])


def test_other_tools_resume_behind_the_system_prompt_and_another_date_behind_the_tools() -> None:
    tokenizer = make_tokenizer(HERMES)

    def rendered(*words: str, date: str) -> Any:
        talk = [turn("system", "You are brief. " * 9), turn("system", f"{date} it is."), turn("user", "Hi")]
        return render_chat(tokenizer, talk, numbered_tools(*words))

    tokens, marks = rendered("weather", "time", date="Monday")
    tools, date = rendered("height", date="Monday")[0], rendered("weather", "time", date="Friday")[0]
    for other, seen, count in ((tools, "brief.", 9), (date, "Tells the time", 3)):
        resumed, _ = resumed_tokens(tokens, marks, other)
        assert tokenizer.decode(tokens[:resumed]).count(seen) == count


@pytest.mark.parametrize("mapping", [None, {"system": "RULE: ", "developer": "DEV: "}])
def test_without_a_template_a_developer_has_the_prefix_of_the_system(mapping: dict[str, str] | None) -> None:
    tokenizer = TokenizerWrapper(make_tokenizer(None))
    request = Request(ModelNames(), 5, messages=[turn("developer", "Be brief.")], role_mapping=mapping)
    text = tokenizer.decode(prompt_of(request, tokenizer, {}).tokens)
    assert text.startswith("DEV: Be brief." if mapping else "ASSISTANT's RULE: Be brief.")


def test_roles_that_clients_make_up_cost_a_bounded_number_of_renderings() -> None:
    rendered = []

    def render(messages: Any, tools: Any) -> str:
        rendered.append(messages)
        return "".join(message["content"] for message in messages)

    made_up = [[f"role {index}" for index in range(1000)], ["role"] * 1000]
    for roles in made_up:
        fitted = Turns(render, {}).fit([{"role": role, "content": "x"} for role in roles])
        assert [each["role"] for each in fitted][:MAX_UNKNOWN_ROLES] == roles[:MAX_UNKNOWN_ROLES]
    assert len(rendered) < 1000
