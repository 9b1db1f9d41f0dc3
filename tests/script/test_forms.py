"""Forms of conversations: one conversation in each form is read back the same, and any JSON is read or refused."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.files import InputError
from runner.script import conversation
from runner.script.conversation import Conversation
from runner.script.conversation_formats import FORMS
from runner.script.conversation_reader import ReadResult, read_conversations
from runner.script.schedule import requests_of
from tests.script.any_json import changed, read_or_refused, values

#: A turn: a role and a text; of the role "call", the name of a tool and the text of its argument.
Turns = list[tuple[str, str]]
Writer = Callable[[Turns, bool], Any]
Reader = Callable[..., ReadResult]

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
questions = texts.map(lambda text: [("user", text)])
calls = st.tuples(texts, texts, texts).map(lambda each: [("call", each[0]), ("tool", each[1]), ("assistant", each[2])])
replies = texts.map(lambda text: [("assistant", text)])


def talks(answers: st.SearchStrategy[Turns], system: bool) -> st.SearchStrategy[Turns]:
    """Conversations of questions and answers; some end with a question."""
    rounds = st.lists(st.tuples(questions, answers).map(lambda pair: [*pair[0], *pair[1]]), max_size=3)
    parts = st.tuples(texts.map(lambda text: [("system", text)] * system), rounds, questions)
    return parts.map(lambda each: [*each[0], *(turn for one in each[1] for turn in one), *each[2]])


def call_of(text: str) -> dict[str, Any]:
    return {"name": "look_up", "arguments": json.dumps({"input": text})}


def with_human(turns: Turns, _: bool) -> Any:
    names = {"user": "human", "assistant": "Assistant"}
    return {"messages": [{"role": names.get(role, role), "content": text} for role, text in turns]}


def in_chats(turns: Turns) -> list[dict[str, Any]]:
    def message(role: str, text: str) -> dict[str, Any]:
        if role == "call":
            call = {"id": "c1", "type": "function", "function": call_of(text)}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"role": role, "content": text, **({"tool_call_id": "c1"} if role == "tool" else {})}

    return [message(*turn) for turn in turns]


def with_functions(turns: Turns, _: bool) -> Any:
    def message(role: str, text: str) -> dict[str, Any]:
        if role == "call":
            return {"role": "assistant", "content": None, "function_call": call_of(text), "weight": 0}
        return {"role": "function" if role == "tool" else role, "content": text}

    return {"messages": [message(*turn) for turn in turns], "functions": [{"name": "look_up"}]}


def anthropic(turns: Turns, is_short: bool) -> Any:
    def turn(role: str, text: str) -> dict[str, Any]:
        if role == "call":
            block = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"input": text}}
        elif role == "tool":
            block = {"type": "tool_result", "tool_use_id": "c1", "content": text}
        elif is_short:
            return {"role": role, "content": text}
        else:
            block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        return {"role": "user" if role == "tool" else "assistant" if role == "call" else role, "content": [block]}

    (_, system), *rest = turns
    shown = system if is_short else [{"type": "text", "text": system}]
    return {"system": shown, "max_tokens": 9, "messages": [turn(*each) for each in rest]}


def responses(turns: Turns, is_short: bool) -> Any:
    def item(role: str, text: str) -> dict[str, Any]:
        if role == "call":
            return {"type": "function_call", "call_id": "c1", **call_of(text)}
        if role == "tool":
            return {"type": "function_call_output", "call_id": "c1", "output": text}
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": text if is_short else [{"type": kind, "text": text}]}

    (_, system), *rest = turns
    return {**({"model": "m"} if is_short else {}), "instructions": system, "input": [item(*each) for each in rest]}


def sharegpt(turns: Turns, is_short: bool) -> Any:
    names = {"user": "human", "assistant": "gpt", "call": "function_call", "tool": "observation"}
    speaker, said = "from", "value"
    if is_short:
        names = {"user": "User", "assistant": "Assistant", "system": "SYSTEM", "call": "tool_call", "tool": "tool"}
        speaker, said = "user", "text"
    values = [json.dumps(call_of(text)) if role == "call" else text for role, text in turns]
    shown = [{speaker: names.get(role, role), said: value} for (role, _), value in zip(turns, values, strict=True)]
    return {"system": "", "conversations": shown}


def preferred(turns: Turns, _: bool) -> Any:
    messages = in_chats(turns)
    has_reply = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    cut = len(messages) - has_reply
    return {"input": {"messages": messages[:cut]}, "preferred_output": messages[cut:]}


def openwebui(turns: Turns, is_short: bool) -> Any:
    nodes = {
        str(index): {"id": str(index), "parentId": str(index - 1) if index else None, "role": role, "content": text}
        for index, (role, text) in enumerate(turns)
    }
    history = {} if is_short else {"history": {"messages": nodes, "currentId": str(len(turns) - 1)}}
    return {"id": "a", "user_id": "u", "chat": {"messages": in_chats(turns), **history}}


def langfuse(turns: Turns, is_short: bool) -> Any:
    asked: Any = in_chats(turns)
    if not is_short:
        asked = {"messages": asked, "tools": [{"type": "function", "function": {"name": "look_up"}}]}
    generation = {"id": "a", "traceId": "t", "type": "GENERATION", "input": asked, "output": None}
    span = {"id": "b", "traceId": "t", "type": "SPAN", "input": {"args": []}}
    return {**generation, "input": json.dumps(asked)} if is_short else {"id": "t", "observations": [span, generation]}


def helicone(turns: Turns, is_short: bool) -> Any:
    return {"request_id": "a", "request_body": anthropic(turns, is_short), "response_body": {}, "request_user_id": "u"}


def lmsys(turns: Turns, is_short: bool) -> Any:
    key = "conversation_id" if is_short else "conversation_hash"
    return {key: "a", "model": "m", "conversation": [{"role": role, "content": text} for role, text in turns]}


def chatgpt(turns: Turns, is_short: bool) -> Any:
    mapping: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None}}
    for index, (role, text) in enumerate(turns):
        content = {"content_type": "text", "parts": [text]}
        if role == "call" or (role == "tool" and is_short):
            content = {"content_type": "code", "text": text}
        author = {"role": "assistant" if role == "call" else role}
        message = {"author": author, "content": content, "recipient": "look_up" if role == "call" else "all"}
        parent = str(index - 1) if index else "root"
        mapping[str(index)] = {"id": str(index), "message": message, "parent": parent, "children": []}
    return {"title": "t", "conversation_id": "a", "mapping": mapping, "current_node": str(len(turns) - 1)}


def oasst_rows(turns: Turns, is_short: bool) -> list[Any]:
    rows = []
    for index, (role, text) in enumerate(turns):
        row = {"message_id": str(index), "message_tree_id": "0", "text": text}
        parent = {"parent_id": str(index - 1)} if index else {"parent_id": None} if is_short else {}
        rows.append({**row, **parent, "role": "prompter" if role == "user" else role})
    return rows


def oasst_tree(turns: Turns, _: bool) -> Any:
    tree: list[Any] = []
    for row in reversed(oasst_rows(turns, True)):
        tree = [{**row, "replies": tree}]
    return {"message_tree_id": "0", "tree_state": "ready_for_export", "prompt": tree[0]}


def sgd(turns: Turns, _: bool) -> Any:
    speakers = {"user": "USER", "assistant": "SYSTEM"}
    return {"dialogue_id": "a", "turns": [{"speaker": speakers[role], "utterance": text} for role, text in turns]}


def intercode(turns: Turns, _: bool) -> Any:
    (_, query), *rest = turns
    history = {"actions": [text for _, text in rest[::2]], "observations": [text for _, text in rest[1::2]]}
    return {"query": query, "turn_history": history}


with_calls, with_system, plain = talks(calls | replies, True), talks(replies, True), talks(replies, False)
WRITERS: dict[str, list[tuple[Writer, st.SearchStrategy[Turns]]]] = {
    "Anthropic's Messages API": [(anthropic, with_calls)],
    "OpenAI's chat API": [
        (lambda turns, is_short: in_chats(turns) if is_short else {"messages": in_chats(turns)}, with_calls),
        (with_functions, with_calls),
        (with_human, with_system),
    ],
    "OpenAI's Responses API": [(responses, with_calls)],
    "batches of APIs, stored completions, logs of proxies": [
        (lambda turns, is_short: {"body": (anthropic if is_short else responses)(turns, is_short)}, with_calls),
        (lambda turns, is_short: {"custom_id": "a", "params": anthropic(turns, is_short)}, with_calls),
        (lambda turns, _: {"request": json.dumps({"messages": in_chats(turns)})}, with_calls),
    ],
    "Langfuse": [(langfuse, with_calls)],
    "Helicone": [(helicone, with_calls)],
    "OpenAI's preference files": [(preferred, with_calls)],
    "Open WebUI's export": [(openwebui, with_system)],
    "ShareGPT": [(sharegpt, with_calls)],
    "LMSYS-Chat-1M, WildChat": [(lmsys, with_system)],
    "ChatGPT's export": [(chatgpt, with_calls)],
    "OpenAssistant's trees": [(oasst_tree, plain)],
    "OpenAssistant's rows": [(oasst_rows, plain)],
    "tau-bench": [(lambda turns, _: {"task_id": 1, "traj": in_chats(turns)}, with_calls)],
    #: Of mt-bench, only the user's texts; tests/script/test_conversations.py has its test.
    "SGD, mt-bench": [(sgd, plain)],
    "SWE-agent": [(lambda turns, _: {"history": in_chats(turns), "trajectory": []}, with_system)],
    "InterCode": [(intercode, plain.map(lambda turns: [*turns, ("assistant", "end")]))],
}
#: tests/script/test_agent_sessions.py and test_chat_sessions.py have theirs.
OF_AGENTS = {"Claude Code", "Codex", "Codex of 2025", "Gemini CLI", "opencode", "pi", "qwen-code"}


def test_each_form_has_a_test() -> None:
    assert {form.name for form in FORMS} - OF_AGENTS == WRITERS.keys()


def turns_of(conversation: Conversation) -> Turns:
    """The turns of what was read. A reply may have reasoning, text and calls; here it has text or one call."""
    turns: Turns = []
    for message in conversation.messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            turns.append(("call", (json.loads(arguments) if isinstance(arguments, str) else arguments)["input"]))
        if text := message.get("content"):
            turns.append((message["role"], text))
    return turns


def write(folder: str, value: Any, *, is_packed: bool, indent: int | None, is_array: bool) -> Path:
    """One record, in a line, over several lines or in an array."""
    records = value if isinstance(value, list) and "message_id" in value[0] else [value]
    lines = [json.dumps(records, indent=indent)] if is_array else [json.dumps(each, indent=indent) for each in records]
    path, content = Path(folder) / ("a.json" + ".gz" * is_packed), "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if is_packed else content)
    return path


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_conversation_in_each_form_is_read_back_the_same(name: str, data: st.DataObject) -> None:
    for writer, strategy in WRITERS[name]:
        turns = data.draw(strategy)
        value = writer(turns, data.draw(st.booleans()))
        is_array, indent = data.draw(st.booleans()), None
        if is_array or not isinstance(value, list):
            indent = data.draw(st.sampled_from([None, 1]))
        with TemporaryDirectory() as folder:
            path = write(folder, value, is_packed=data.draw(st.booleans()), indent=indent, is_array=is_array)
            (found,) = read_conversations(path).conversations
        assert turns_of(found) == turns
        assert found.left_out == {}
        if writer is with_functions:
            assert found.tools == ({"type": "function", "function": {"name": "look_up"}},)


def branches(*parents: int | None) -> list[dict[str, Any]]:
    """Rows of a tree; the depth of a row says who speaks."""
    depths: list[int] = []
    rows: list[dict[str, Any]] = []
    for index, parent in enumerate(parents):
        depths.append(0 if parent is None else depths[parent] + 1)
        about = {"text": str(index), "role": "assistant" if depths[-1] % 2 else "prompter"}
        tree = f"m{index}" if parent is None else rows[parent]["message_tree_id"]
        above = None if parent is None else f"m{parent}"
        rows.append({"message_id": f"m{index}", "message_tree_id": tree, "parent_id": above, **about})
    return rows


def prompts(result: ReadResult) -> list[list[str]]:
    requests = (request for each in result.conversations for request in requests_of(each))
    return [[message["content"] for message in request.messages] for request in requests]


def test_each_path_of_a_tree_asks_what_no_path_before_has_asked(read: Reader) -> None:
    #     m0 user - m1 - m2 user - m3          the first path
    #                  \ m4 user - m5          an edited question: it asks its second turn
    #             \ m6                         another reply: it asks the first turn again
    #     m7 user                              another tree
    result = read(*branches(None, 0, 1, 2, 1, 4, 0, None))
    found = [(each.conversation_id, each.user, each.asked_messages) for each in result.conversations]
    assert found == [("m0", "m0", 0), ("m0/1", "m0", 1), ("m0/2", "m0", 0), ("m7", "m7", 0)]
    assert prompts(result) == [["0"], ["0", "1", "2"], ["0", "1", "4"], ["0"], ["7"]]
    assert [each.source for each in result.conversations] == ["a.jsonl:1"] * 3 + ["a.jsonl:8"]


def chatgpt_export(*nodes: tuple[str, str | None, str, Any]) -> list[Any]:
    """An export with one conversation of nodes: name, parent, role, content (a text, or as it is)."""
    mapping = {}
    for name, parent, role, content in nodes:
        plain = {"content_type": "text", "parts": [content]} if isinstance(content, str) else content
        mapping[name] = {"parent": parent, "message": {"author": {"role": role}, "content": plain}}
    return [{"conversation_id": "a", "mapping": mapping}]


def test_a_path_that_parts_within_a_turn_asks_for_its_own_replies_alone(read: Reader) -> None:
    nodes = ("u", None, "user", "Q"), ("a", "u", "assistant", "call"), ("t", "a", "tool", "R")
    result = read(chatgpt_export(*nodes, ("b", "t", "assistant", "B"), ("c", "t", "assistant", "C")))
    assert prompts(result) == [["Q"], ["Q", "call", "R"], ["Q", "call", "R"]]


def test_what_a_user_has_set_in_chatgpt_and_empty_beginnings_are_no_turns(read: Reader) -> None:
    about = {"content_type": "user_editable_context", "user_profile": "p", "user_instructions": "i"}
    nodes = ("root", None, "system", ""), ("leaf", "root", "system", ""), ("set", "root", "user", about)
    asked = ("u", "set", "user", "hi"), ("a", "u", "assistant", "yo"), ("b", "a", "user", "so")
    assert prompts(read(chatgpt_export(*nodes, *asked))) == [["hi"], ["hi", "yo", "so"]]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([{**branches(None)[0], "parent_id": "gone"}], "the parent of m0 is str 'gone'; wanted a message of the tree."),
        ([{**branches(None)[0], "parent_id": "m0"}], "messages in circles are int 1; wanted none."),
        (branches(None, *range(10), *([10] * 10)), "the messages on all paths of the tree are int 48; wanted at most"),
    ],
    ids=["no parent", "circle", "too many paths"],
)
def test_a_tree_that_is_none_or_has_too_many_paths_is_refused(
    rows: list[Any], wanted: str, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MOST_REPEATS", 2)
    monkeypatch.setattr(conversation, "FEW_MESSAGES", 0)
    with pytest.raises(InputError, match=f"a.jsonl:1: {wanted}"):
        read(*rows)


def test_the_paths_of_a_tree_share_their_messages(tmp_path: Path) -> None:
    # A deep chain with a reply at every message: each of them ends a path.
    count, kinds = 300, ("prompter", "assistant")
    rows = [
        {"message_id": f"{kind}{at}", "parent_id": f"prompter{at - 1}" if at else None, "text": "a", "role": kind}
        for at in range(count)
        for kind in kinds[: 2 if at else 1]
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "message_tree_id": "t"}) + "\n" for row in rows))
    read_bytes = path.stat().st_size
    tracemalloc.start()
    found = read_conversations(path).conversations
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == count
    assert len({id(message) for each in found for message in each.messages}) == len(rows)
    # Each message on a path takes 8 bytes; all else grows with the file.
    assert peak_bytes < 30 * read_bytes + 8 * sum(len(each.messages) for each in found)


def test_files_of_openai_messages_are_no_rows_of_a_tree(read: Reader) -> None:
    assert len(read(branches(None, 0)).conversations) == 1
    assert prompts(read([{"role": "user", "content": "a", "message_id": "m"}])) == [["a"]]


def test_rows_of_trees_trees_and_chats_may_share_a_file(read: Reader) -> None:
    (first, second), chat = branches(None, 0), {"messages": [{"role": "user", "content": "C"}]}
    result = read(first, {"message_tree_id": "t", "prompt": {"role": "prompter", "text": "T"}}, chat, second)
    assert [each.source for each in result.conversations] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:1"]
    assert prompts(result) == [["T"], ["C"], ["0"]]


@pytest.mark.parametrize("foreign", [{"a": 1}, {"message_id": "m", "role": "prompter"}])
def test_a_record_that_is_no_row_of_a_tree_is_refused_or_skipped_by_its_line(foreign: Any, read: Reader) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl:3: no known form of conversation \(keys: "):
        read(*branches(None, 0), foreign)
    result = read(*branches(None, 0), foreign, skip_bad=True)
    assert (len(result.conversations), len(result.skipped)) == (1, 1)


@pytest.mark.parametrize("late", [branches(None)[0], {"type": "user", "sessionId": "s", "uuid": "u"}])
def test_a_row_far_behind_the_beginning_of_a_file_of_another_form_is_refused_by_its_line(
    late: Any, read: Reader
) -> None:
    chats = [{"messages": [{"role": "user", "content": "C"}]}] * 120
    with pytest.raises(
        InputError, match=r"a\.jsonl:121: is of .*, in a file of another form; wanted one form per file"
    ):
        read(*chats, late)
    assert len(read(*chats, late, skip_bad=True).conversations) == 120


def test_parts_of_chatgpt_s_export_without_text_are_named(read: Reader) -> None:
    image = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}
    look = {"content_type": "multimodal_text", "parts": [image, "Look"]}
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "s", "content": "Hm."}]}
    nodes = ("0", None, "system", ""), ("1", "0", "user", look), ("2", "1", "assistant", thoughts)
    result = read(chatgpt_export(*nodes, ("3", "2", "assistant", "A cat.")))
    assert [message["content"] for message in result.conversations[0].messages] == ["Look", "A cat."]
    said = "left out of the prompts, as they are no text of a message: 1 image_asset_pointer, 1 thoughts."
    assert result.notes == [said]


@settings(max_examples=150, deadline=None)
@given(values | st.lists(values, max_size=3), st.sampled_from([None, 1]), st.integers(0, 2))
def test_any_json_is_read_or_refused_in_one_line_with_its_file_and_line(
    value: Any, indent: int | None, cut: int
) -> None:
    text = json.dumps(value, indent=indent)
    read_or_refused(text[: len(text) - cut])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_conversation_with_one_wrong_place_is_read_or_refused(data: st.DataObject) -> None:
    writer, strategy = data.draw(st.sampled_from([each for writers in WRITERS.values() for each in writers]))
    value = writer(data.draw(strategy), data.draw(st.booleans()))
    read_or_refused(json.dumps(changed(value, data)))


@pytest.mark.parametrize(
    "opening", ['{"messages": [', '{"system": "", "messages": [{"role": "user", "content": [', '{"x":', "["]
)
def test_deep_json_is_refused_wherever_it_is(opening: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for depth in (150, 400, 900, 100_000):
        path.write_text(opening + '[{"content": ' * depth)
        with pytest.raises(InputError, match=r"a\.json:1: "):
            read_conversations(path)
        call = {"function": {"name": "f", "arguments": {}}}
        message = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
        path.write_text(message.replace('"arguments": {}', '"arguments": ' + '{"a": ' * depth + "1" + "}" * depth))
        with pytest.raises(InputError, match=r"a\.json:1: .*nested too deeply"):
            read_conversations(path)


def test_the_reply_that_is_not_preferred_and_what_is_no_generation_are_left_out(read: Reader) -> None:
    asked = {"input": {"messages": [{"role": "user", "content": "Go"}]}}
    replies = [[{"role": "assistant", "content": text}] for text in ("Yes.", "No.")]
    result = read({**asked, "preferred_output": replies[0], "non_preferred_output": replies[1]})
    (found,) = result.conversations
    assert (turns_of(found), found.left_out) == ([("user", "Go"), ("assistant", "Yes.")], {"further choice": 1})
    said = {"role": "assistant", "content": "Done."}
    generation = {"traceId": "t", "type": "GENERATION", "input": asked["input"]["messages"], "output": said}
    span = {"traceId": "t", "type": "SPAN", "input": {"args": []}, "output": {}}
    result = read(span, generation, {**generation, "output": "Done."})
    assert [*map(turns_of, result.conversations)] == [[("user", "Go"), ("assistant", "Done.")]] * 2
    with pytest.raises(InputError, match=r"an observation of Langfuse has input .*args.*; wanted messages"):
        read({**generation, "input": {"args": []}})
    with pytest.raises(InputError, match=r"Helicone has no request_body; wanted an export with --include-body"):
        read({"request_id": "a", "request_body": None, "request_path": "/v1"})


def test_reasoning_has_other_names_and_what_cannot_be_read_is_counted(read: Reader) -> None:
    question = {"role": "user", "content": "Hi", "images": ["a", "b"]}
    for reply in ({"reasoning": "Hm."}, {"thinking": "Hm.", "reasoning": [1]}, {"reasoning_content": "Hm."}):
        (found,) = read({"messages": [question, {"role": "assistant", "content": "Yes", **reply}]}).conversations
        assert found.messages[1] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
        assert found.left_out == {"image": 2} | ({"reasoning": 1} if "thinking" in reply else {})


def test_functions_may_be_json_text_and_nothing_else_than_a_list(read: Reader) -> None:
    body, function = {"messages": [{"role": "user", "content": "Hi"}]}, {"name": "f", "parameters": {}}
    for functions in ([function], json.dumps([function])):
        (found,) = read({**body, "functions": functions}).conversations
        assert found.tools == ({"type": "function", "function": function},)
    with pytest.raises(InputError, match=r"functions is .*; wanted a list of function definitions"):
        read({**body, "functions": {"f": 1}})


def test_documents_beside_messages_are_counted_as_left_out(read: Reader) -> None:
    documents = [{"text": "One."}, {"text": "Two."}]
    result = read({"messages": [{"role": "user", "content": "Hi"}], "documents": documents})
    assert result.conversations[0].left_out == {"document beside messages": 2}
    assert "2 document beside messages" in result.notes[0]
