"""The part of a chat that keeps a prompt from an earlier prefix is the part that was edited, wherever it is written."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from radixcache import Chat, PrefixCache, render_chat, stream_generate
from radixcache.chat_parts import TRIED_CHANGES, ChatLog, first_change
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import tiny_tokenizer
from tests.chat.part_templates import TEMPLATES
from tests.engine.generators import load

# These write nothing at the end, so a conversation that goes on has the whole prompt as its prefix.
STABLE = ("before the system text, first of all", "inside the system turn, behind the tools")
WORDS = [
    "library", "book", "reader", "shelf", "card", "window", "garden", "river",
    "bridge", "music", "winter", "north", "paper", "stone", "light",
]  # fmt: skip


class Editor:
    """Random chats, and random edits of them with the name of the edited part."""

    def __init__(self, seed: int) -> None:
        self.random, self.count = random.Random(seed), 0

    def text(self) -> str:
        self.count += 1
        return " ".join([*self.random.choices(WORDS, k=self.random.randint(3, 12)), f"n{self.count}"])

    def tool(self) -> dict[str, Any]:
        properties = {name: {"type": "string", "description": self.text()} for name in self.random.sample(WORDS, 2)}
        parameters = {"type": "object", "properties": properties}
        self.count += 1
        function = {"name": f"tool_{self.count}", "description": self.text(), "parameters": parameters}
        return {"type": "function", "function": function}

    def chat(self) -> Chat:
        messages = [{"role": "system", "content": self.text()}] if self.random.random() < 0.8 else []
        for _ in range(self.random.randint(0, 3)):
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": self.text()}}}
            calls = [{"tool_calls": [call]}, {}][self.random.randrange(2)]
            messages.append({"role": "user", "content": self.text()})
            messages.append({"role": "assistant", "content": self.text(), **calls})
        messages.append({"role": "user", "content": self.text()})
        arguments = {"date_string": self.text(), "enable_thinking": True, "documents": [{"text": self.text()}]}
        kept = {name: each for name, each in arguments.items() if self.random.random() < 0.7}
        return Chat(messages, [self.tool() for _ in range(self.random.randint(1, 5))], kept)

    def edited(self, stored: Chat) -> tuple[Chat, str]:
        """A chat that differs in one part, and the name of the part."""
        messages, tools, arguments = deepcopy(([*stored.messages], [*(stored.tools or ())], {**stored.arguments}))
        edits: list[Callable[..., str]] = [
            self.new_text, self.new_call, self.new_turn, self.turn_removed,
            self.new_order, self.description, self.parameters, self.new_tool, self.tool_removed, self.argument,
        ]  # fmt: skip
        while True:
            edit = self.random.choice(edits)
            if part := edit(messages=messages, tools=tools, arguments=arguments):
                return Chat(messages, tools or None, arguments), part

    def new_text(self, messages: list[Any], **_: Any) -> str:
        index = self.random.randrange(len(messages))
        message = messages[index]
        words = message["content"].split()
        words[self.random.randrange(len(words))] = self.text()
        message["content"] = " ".join(words)
        return f"{message['role']} message {index}"

    def new_call(self, messages: list[Any], **_: Any) -> str:
        calling = [index for index, each in enumerate(messages) if each.get("tool_calls")]
        if not calling:
            return ""
        index = self.random.choice(calling)
        messages[index]["tool_calls"][0]["function"]["arguments"]["at"] = self.text()
        return f"assistant message {index}, its tool calls"

    def new_turn(self, messages: list[Any], **_: Any) -> str:
        index = self.random.choice([at for at, each in enumerate(messages) if each["role"] == "user"])
        contents = {"user": self.text(), "assistant": self.text()}
        messages[index:index] = [{"role": role, "content": content} for role, content in contents.items()]
        return f"user message {index}"

    def turn_removed(self, messages: list[Any], **_: Any) -> str:
        if len(messages) < 3:
            return ""
        index = self.random.choice([at for at, each in enumerate(messages[:-1]) if each["role"] == "user"])
        del messages[index : index + 2]
        return f"user message {index}"

    def new_order(self, tools: list[Any], **_: Any) -> str:
        before = [*tools]
        self.random.shuffle(tools)
        return "the list of tools" if tools != before else ""

    def description(self, tools: list[Any], **_: Any) -> str:
        function = self.random.choice(tools)["function"]
        function["description"] += f" {self.text()}"
        return f"tool `{function['name']}`, its description"

    def parameters(self, tools: list[Any], **_: Any) -> str:
        function = self.random.choice(tools)["function"]
        self.random.choice([*function["parameters"]["properties"].values()])["description"] = self.text()
        return f"tool `{function['name']}`, its parameters"

    def new_tool(self, tools: list[Any], **_: Any) -> str:
        tools.insert(self.random.randint(0, len(tools)), self.tool())
        return "the list of tools"

    def tool_removed(self, tools: list[Any], **_: Any) -> str:
        del tools[self.random.randrange(len(tools))]
        return "the list of tools"

    def argument(self, arguments: dict[str, Any], **_: Any) -> str:
        name = self.random.choice(["date_string", "enable_thinking", "documents"])
        if name in arguments and self.random.random() < 0.3:
            del arguments[name]
        elif name == "enable_thinking":
            arguments[name] = not arguments.get(name)
        else:
            arguments[name] = self.text() if name == "date_string" else [{"text": self.text()}]
        return f"template argument `{name}`"


def tokenizer_of(name: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(1000, 1350), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_part_that_is_named_is_the_part_that_was_edited(name: str, seeds: Sequence[int]) -> None:
    tokenizer = tokenizer_of(name)
    for seed in seeds:
        editor = Editor(seed)
        stored = editor.chat()
        asked, part = editor.edited(stored)
        if seed % 3 == 0 and name in STABLE:  # the conversation has gone on as well
            more = [{"role": "assistant", "content": editor.text()}, {"role": "user", "content": editor.text()}]
            asked = asked._replace(messages=[*asked.messages, *more])
        change = first_change(tokenizer, stored, asked)
        if shared(tokenizer, stored, asked) == len(str(stored.rendering(tokenizer))):
            assert change is None, "the whole earlier prompt is a prefix"
            continue
        assert change is not None, (name, seed, part)
        assert change.part == part, (name, seed)
        assert change.hint


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_two_edits_the_one_is_named_that_the_template_writes_first(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for seed in range(8):
        editor = Editor(seed)
        stored = editor.chat()
        arguments = {**stored.arguments, "date_string": editor.text()}
        tools = [editor.tool(), *(stored.tools or ())]
        both = Chat(stored.messages, tools, arguments)
        alone = {
            "the list of tools": stored._replace(tools=tools),
            "template argument `date_string`": stored._replace(arguments=arguments),
        }
        forks = {part: shared(tokenizer, stored, chat) for part, chat in alone.items()}
        change = first_change(tokenizer, stored, both)
        assert change is not None
        assert forks[change.part] == min(forks.values()), (seed, forks)


def shared(tokenizer: Any, left: Chat, right: Chat) -> int:
    texts = [str(each.rendering(tokenizer)) for each in (left, right)]
    return next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))


def test_a_chat_that_grew_and_a_part_that_the_template_leaves_out_are_no_change() -> None:
    tokenizer, editor = tokenizer_of("inside the system turn, behind the tools"), Editor(0)
    stored = editor.chat()
    more = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "Why?"}]
    assert first_change(tokenizer, stored, stored._replace(messages=[*stored.messages, *more])) is None
    assert first_change(tokenizer, stored, stored._replace(arguments={**stored.arguments, "unknown": 1})) is None


def test_a_template_that_writes_the_date_by_itself_is_named() -> None:
    tokenizer, editor = tokenizer_of("inside the system turn, behind the tools"), Editor(4)
    cache = sized_cache(SizedLayout(1), budget_bytes=1 << 30, tokenizer=tokenizer)
    written, chat = tokenizer.chat_template, editor.chat()
    more = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "Why?"}]
    for day, name in (("Monday", None), ("Tuesday", "the chat template")):
        tokenizer.chat_template = f"It is {day}. {written}"
        later = chat._replace(messages=[*chat.messages, *more])
        change = cache.explain(render_chat(tokenizer, *later[:2], **later.arguments)[0], chat=later).change
        assert (change and change.part) == name
        store(cache, tokenizer, chat)


def test_of_thousands_of_changes_a_bounded_number_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, rendered = tokenizer_of("in the last turn, before"), list[Chat]()
    named = [{"type": "function", "function": {"name": f"t{index % 50}"}} for index in range(3000)]
    edited = [{"type": "function", "function": {**tool["function"], "description": "x"}} for tool in named]
    messages = [{"role": "user", "content": "Which?"}]
    rendering = Chat.rendering

    def counting(chat: Chat, tokenizer: Any) -> Any:
        rendered.append(chat)
        return rendering(chat, tokenizer) if len(rendered) < 3 else f"{len(rendered)}"

    monkeypatch.setattr(Chat, "rendering", counting)
    log = ChatLog()
    for _ in range(2):
        log.add(np.arange(3), Chat(messages, named))
    found = log.first_change(tokenizer, np.arange(4), Chat(messages, edited), 3)
    assert found is not None
    assert len(rendered) == 2 + TRIED_CHANGES


def test_words_say_how_the_tools_differ_and_no_name_spoils_the_line() -> None:
    tokenizer, editor = tokenizer_of("before the system text, first of all"), Editor(1)
    stored = editor.chat()
    tools = [editor.tool() for _ in range(3)]
    names = [f"`{tool['function']['name']}`" for tool in tools]

    def words(before: list[Any], now: list[Any]) -> str:
        return str(first_change(tokenizer, stored._replace(tools=before), stored._replace(tools=now)))

    assert words(tools, tools[::-1]) == "the list of tools: the same tools in another order"
    assert words(tools, tools[1:]) == f"the list of tools: {names[0]} removed"
    assert words(tools[:1], [*tools[1:], tools[0]]) == f"the list of tools: {names[1]}, {names[2]} added"
    reordered = {"type": "function", "function": dict(reversed(tools[0]["function"].items()))}
    name = tools[0]["function"]["name"]
    assert words(tools, [reordered, *tools[1:]]) == f"tool `{name}`: the same in another order"
    new = editor.tool()
    added = f"`{new['function']['name']}` added"
    assert words(tools, [*tools[::-1], new]) == f"the list of tools: the same tools in another order, {added}"
    for beside, its in (({"cache_control": {"type": "ephemeral"}}, "cache control"), ({"strict": True}, "strict")):
        assert words(tools, [{**tools[0], **beside}, *tools[1:]]) == f"tool `{name}`, its {its}"
    talk = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    question = {"role": "user", "content": "Well?"}
    swapped = first_change(tokenizer, Chat([*talk, question]), Chat([*talk[2:], *talk[:2], question]))
    assert str(swapped) == "user message 0: the same messages in another order"
    strange = [{"type": "function", "function": {"name": "a\nb" + "c" * 100, "description": text}} for text in "xy"]
    assert words(strange[:1], strange[1:]) == "tool `a\\nb" + "c" * 58 + "...`, its description"


def test_an_explanation_names_the_part_of_its_own_namespace_until_the_cache_is_cleared() -> None:
    tokenizer, editor = tokenizer_of("inside the system turn, behind the tools"), Editor(2)
    cache = sized_cache(SizedLayout(1), budget_bytes=1 << 30, tokenizer=tokenizer)
    stored = editor.chat()
    store(cache, tokenizer, stored)
    stored.tools[0]["function"]["description"] += " Changed in place."  # type: ignore[index]
    tokens = render_chat(tokenizer, stored.messages, stored.tools, **stored.arguments)[0]
    found = cache.explain(tokens, chat=stored)
    name = stored.tools[0]["function"]["name"]  # type: ignore[index]
    assert str(found.change) == f"tool `{name}`, its description"
    assert f"changed: tool `{name}`, its description. Keep the definitions" in str(found)
    assert cache.explain(tokens).change is None
    assert cache.explain(tokens, "other", chat=stored).change is None
    cache.clear()
    assert cache.explain(tokens, chat=stored).change is None
    with pytest.raises(ValueError, match="no tokenizer"):
        sized_cache(SizedLayout(1), budget_bytes=1 << 30).explain(tokens, chat=stored)


def admitted(cache: PrefixCache, loaded: Any, tokens: Any, chat: Chat) -> None:
    with cache.begin_many(capacity=1000) as group:
        group.prefill(loaded.model, group.admit(tokens, chat=chat))


def generated(cache: PrefixCache, loaded: Any, tokens: Any, chat: Chat) -> None:
    list(stream_generate(loaded.model, loaded.tokenizer, tokens, max_tokens=1, cache=cache, chat=chat))


@pytest.mark.parametrize("serve", [admitted, generated])
def test_rows_and_replies_keep_the_chats_that_a_later_explanation_compares(serve: Callable[..., None]) -> None:
    loaded = load("llama")
    tools = [{"type": "function", "function": {"name": name, "description": "Find."}} for name in ("find", "lend")]
    cache = PrefixCache(loaded.model, tokenizer=loaded.tokenizer)
    stored, asked = (Chat([{"role": "user", "content": "Emma?"}], each) for each in (tools, tools[::-1]))
    serve(cache, loaded, render_chat(loaded.tokenizer, *stored[:2])[0], stored)
    found = cache.explain(render_chat(loaded.tokenizer, *asked[:2])[0], chat=asked)
    assert str(found.change) == "the list of tools: the same tools in another order"


def store(cache: PrefixCache, tokenizer: Any, chat: Chat) -> None:
    tokens, marks = render_chat(tokenizer, chat.messages, chat.tools, **chat.arguments)
    with cache.begin(tokens, marks=marks, chat=chat) as session:
        session.prefill(SizedModel())
        session.step(SizedModel(), tokens[-1:])


def test_of_equally_near_chats_the_one_with_the_fewest_differences_is_compared() -> None:
    tokenizer, editor, log = tokenizer_of("before the system text, first of all"), Editor(3), ChatLog()
    asked = editor.chat()._replace(arguments={})
    tools = [editor.tool(), *(asked.tools or ())]
    near, far = asked._replace(tools=tools), asked._replace(tools=tools, arguments={"documents": [{"text": "x"}]})
    keys = np.arange(5)
    for chat in (near, far):
        log.add(np.arange(3), chat)
    found = log.first_change(tokenizer, keys, asked, 3)
    assert found is not None
    assert found[0].part == "the list of tools"
    assert log.first_change(tokenizer, keys, asked, 4) is None, "something nearer was stored"
    assert log.first_change(tokenizer, keys, asked, 2) is None, "state of what they share more was dropped"


def test_tools_that_the_template_writes_in_front_of_the_last_message_are_named_in_each_turn() -> None:
    tokenizer = tokenizer_of("in the last turn, before")
    turns = [{"role": role, "content": f"message {role}"} for role in ("system", "user", "assistant", "user")]
    first, second = Chat(turns[:2], [Editor(1).tool()]), Chat(turns, [Editor(1).tool()])
    change = first_change(tokenizer, first, second)
    assert change is not None
    assert (change.part, change.message) == ("the list of tools", None)
    assert "so it moves in every turn" in change.detail
    assert first_change(tokenizer, Chat(turns[:2]), Chat(turns)) is None


def test_a_log_drops_as_many_old_chats_as_a_long_one_needs_and_keeps_none_that_is_too_long_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixcache.chat_parts.KEPT_KEYS", 10)
    log, chat = ChatLog(100), Chat([{"role": "user", "content": "Go"}])
    for length, kept in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (11, [1, 2, 3]), (7, [3, 7]), (10, [10]), (12, [10])):
        log.add(np.arange(length), chat)
        assert [len(keys) for keys in log.prompts()] == kept, length


def test_a_log_may_be_cleared_by_another_thread_while_a_chat_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clearing(list[int]):
        """Keys of a chat; when the log asks how many there are, another thread clears the log."""

        def __len__(self) -> int:
            thread = threading.Thread(target=log.clear)
            thread.start()
            thread.join(0.05)
            return 6

    monkeypatch.setattr("radixcache.chat_parts.KEPT_KEYS", 10)
    log = ChatLog()
    for keys in (np.arange(6), Clearing()):
        log.add(keys, Chat([{"role": "user", "content": "Go"}]))  # type: ignore[arg-type]
