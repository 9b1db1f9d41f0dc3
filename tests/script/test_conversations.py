"""Readers: every known format, and one clear line for everything that is none."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import files
from runner.files import InputError
from runner.script import conversation_reader
from runner.script.conversation import Conversation
from runner.script.conversation_reader import ReadResult, read_conversations

Reader = Callable[..., ReadResult]
BRIEF = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
REPLY = {"role": "assistant", "content": "Hi there"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"day": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": "42"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def write(path: Path, *values: Any) -> Path:
    """Write a JSONL file; text goes in as it is."""
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return path


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_conversations(path, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(path.parent) + os.sep, "")


def test_jsonl_holds_a_conversation_per_line_with_id_user_tools_and_first_turn(tmp_path: Path) -> None:
    path = write(
        tmp_path / "chat.jsonl",
        {"id": "a", "user": "ann", "tools": [TOOL], "messages": [HELLO, CALLING, RESULT, REPLY]},
        "",
        {"id": 7, "messages": [HELLO, REPLY, HELLO], "first_turn": 1},
        [HELLO, REPLY],
    )
    first, second, third = read_conversations(path).conversations
    calling = {"role": "assistant", "tool_calls": [CALL]}
    assert first == Conversation("a", "ann", (HELLO, calling, RESULT, REPLY), (TOOL,), 0, "chat.jsonl:1")
    assert second == Conversation("7", "7", (HELLO, REPLY, HELLO), None, 2, "chat.jsonl:3")
    assert third == Conversation("chat#2", "chat#2", (HELLO, REPLY), None, 0, "chat.jsonl:4")


@pytest.mark.parametrize("indent", [None, 2], ids=["compact", "indented"])
def test_json_holds_one_conversation_or_a_list_of_them(indent: int | None, tmp_path: Path) -> None:
    path, talk = tmp_path / "chat.json", {"messages": [HELLO, REPLY]}
    for value, count in ((talk, 1), ([talk, talk], 2), ([[HELLO, REPLY], [HELLO]], 2), ([HELLO, REPLY], 1)):
        path.write_text(json.dumps(value, indent=indent))
        first, *others = read_conversations(path).conversations
        assert (first.messages, len(others)) == ((HELLO, REPLY), count - 1)


def test_sharegpt_speakers_become_roles(read: Reader) -> None:
    call = '{"name": "look_up", "arguments": {"day": 1}}'
    said = [("system", "Be brief."), ("human", "Hello"), ("function_call", call), ("observation", "42"), ("gpt", "Hi")]
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    (found,) = read({"id": "s1", "conversations": turns, "tools": json.dumps([TOOL])}).conversations
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"day": 1}}
    assert (found.tools, found.conversation_id, found.user) == ((TOOL,), "s1", "s1")


@pytest.mark.parametrize("folder", [".", "trajectories"])
def test_tau_bench_tools_lie_beside_the_trajectories_or_one_folder_up(folder: str, tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "cancel_order", "parameters": {}}}
    (tmp_path / "airline_tools.json").write_text(json.dumps([TOOL]))
    (tmp_path / "retail_tools.json").write_text(json.dumps([other]))
    (tmp_path / folder).mkdir(exist_ok=True)
    record = {"task_id": 3, "trial": 1, "info": {"task": {"user_id": "ann_1"}}, "traj": [HELLO, CALLING, RESULT]}
    by_name, by_calls = (write(tmp_path / folder / name, [record]) for name in ("model-retail.json", "model.json"))
    assert read_conversations(by_name).conversations[0].tools == (other,)
    (conversation,) = read_conversations(by_calls).conversations
    assert conversation.tools == (TOOL,)
    assert (conversation.conversation_id, conversation.user) == ("model/3.1", "ann_1")


def test_broken_tool_list_beside_trajectories_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model-airline.json", [{"traj": [HELLO]}])
    (tmp_path / "airline_tools.json").write_text('[{"type": "function"}]')
    assert error_of(path).startswith("airline_tools.json:1: tool 0 is dict {'type': 'function'}; wanted a function")


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"system": "Be brief.", "conversations": [{"from": "human", "value": "Hello"}]}, (BRIEF, HELLO)),
        ([{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}], (HELLO,)),
        ([{**HELLO, "refusal": None, "audio": 1}], (HELLO,)),
        ([HELLO, {"role": "assistant", "content": None, "refusal": "Hi there"}], (HELLO, REPLY)),
        ({"question_id": 81, "category": "writing", "turns": ["Hello", "Hello"]}, (HELLO, HELLO)),
    ],
    ids=["system field", "text parts", "unknown keys", "refusal", "mt-bench"],
)
def test_records_become_messages(record: Any, messages: tuple[Any, ...], read: Reader) -> None:
    (found,) = read(record).conversations
    assert found.messages == messages
    assert (found.replies_recorded, found.conversation_id == "81") == ("turns" not in record, "turns" in record)


def test_files_are_read_in_order_and_those_of_one_name_in_two_folders_together(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "chat.jsonl", [HELLO])
    last = write(tmp_path / "last.jsonl", {"id": "b", "messages": [HELLO]}, [HELLO])
    result = read_conversations(tmp_path / "one" / "chat.jsonl", tmp_path / "two" / "chat.jsonl", str(last))
    names = [each.conversation_id for each in result.conversations]
    assert (len(set(names)), names[2:]) == (4, ["b", "last#1"])


def test_byte_order_mark_and_line_separators_inside_text_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    message = '[{"role": "user", "content": "a\u2028b"}]'
    path.write_bytes(b"\xef\xbb\xbf" + f"{message}\r\n{message}\r\n".encode())
    assert [each.source for each in read_conversations(path).conversations] == ["c.jsonl:1", "c.jsonl:2"]


USER, PARTED = {"role": "user"}, [{"role": "user", "content": [{"content_type": "text", "text": "a"}]}]
BAD_RECORDS = [
    ('{"messages": [{"role": "user", "content": "a"}', "not JSON (Expecting ',' delimiter at column 47)."),
    ("hello", "not JSON (Expecting value at column 1)."),
    ("[" * 100_000, "nested too deeply; wanted fewer levels."),
    ('{"n": ' + "1" * 5000 + "}", "not usable JSON (Exceeds the limit"),
    ("[] []", "text after the end of the JSON value (column 3); wanted one per line."),
    ("42", "found int 42; wanted a conversation: a list of messages or an object of a known form. Known forms and "),
    ({"text": "a"}, "no known form of conversation (keys: text). Known forms and their keys: Gemini CLI"),
    ([], "the conversation is empty; wanted at least one message of role user."),
    ({"turns": []}, "the conversation is empty; wanted at least one message of role user."),
    ({"turns": [1]}, "message 0 is int 1; wanted an object with speaker and utterance."),
    ({"turns": [{"speaker": "BOT", "utterance": "?"}]}, "message 0 has speaker str 'BOT'; wanted one of user, system."),
    ({"messages": "a"}, "messages is str 'a'; wanted a list of messages."),
    ({"history": "none"}, "history is str 'none'; wanted a list of messages."),
    ({"conversations": {}}, "conversations is dict {}; wanted a list of messages."),
    ({"conversations": [{"from": "cat", "value": ""}]}, "message 0 has from str 'cat'; wanted one of system, "),
    ({"conversations": [{"value": ""}]}, "message 0 has no role (keys: value); wanted one of "),
    ({"conversations": [{"from": "human", "value": 1}]}, "message 0 has value int 1; wanted text."),
    ({"conversations": [USER | {"value": "a"}], "system": "\ud800"}, "system holds the lone surrogate U+D800 at"),
    ({"turn_history": {"actions": 3}}, "turn_history is dict {'actions': 3}; wanted lists of actions and"),
    ({"system": "", "messages": PARTED}, "messages.0.user.content.0.foreign.type: Field required."),
    ({"model": "m", "input": PARTED}, "input.0.message.content.0: Unable to extract tag using discriminator 'type'"),
    *(([HELLO, message], f"message 1 {wanted}") for message, wanted in (
        ({"role": "bot", "content": "a"}, "has role str 'bot'; wanted one of system, "),
        ({"content": "a"}, "has no role (keys: content); wanted one of "),
        ("a", "is str 'a'; wanted an object with role and content."),
        (USER, "(role user) has no content; wanted text."),
        ({"role": "assistant"}, "(role assistant) has no content; wanted text."),
        (USER | {"content": 3}, "has content int 3; wanted text."),
        (CALLING | {"tool_calls": {}}, "has tool_calls dict {}; wanted a list of calls."),
    )),
    *(([HELLO, message], f"message 1{wanted}") for message, wanted in (
        (USER | {"content": [{"type": "text"}]}, ": content part 0 is dict {'type': 'text'}; w"),
        (CALLING | {"tool_calls": [{}]}, ": tool call 0 is dict {}; wanted a function with a name"),
        (CALLING | {"tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, ": tool call 0 is dict {"),
    )),
    *(({"messages": [HELLO], **more}, wanted) for more, wanted in (
        ({"messages": [REPLY]}, "no user turn among 1 messages (roles: assistant)."),
        ({"tools": "[]x"}, "tools is str '[]x'; wanted a list of function definitions."),
        ({"tools": {}}, "tools is dict {}; wanted a list of function definitions."),
        ({"tools": [{}]}, "tool 0 is dict {}; wanted a function with a name."),
        ({"tools": [{"name": "f", "n": float("inf")}]}, "tool 0 holds inf; wanted a number that JSON has."),
        ({"tools": '[{"name": "f", "n": NaN}]'}, "tool 0 holds nan; wanted a number that JSON has."),
        ({"user": []}, "user is list []; wanted text that is not empty."),
        ({"id": ""}, "id is str ''; wanted text that is not empty."),
        ({"first_turn": 1}, "first_turn is 1; wanted 0 to 0 (there are 1 user turns)."),
        ({"first_turn": -1}, "first_turn is -1; wanted 0 to 0 (there are 1 user turns)."),
        ({"first_turn": "0"}, "first_turn is str '0'; wanted a whole number."),
        ({"chat_template_kwargs": {"tools": [], "day": 1}}, "chat_template_kwargs has list ['tools']; wanted other"),
    )),
    ('[{"role": "user", "content": NaN}]', "message 0 has content float nan; wanted text."),
    ('[{"role": "user", "content": "\\ud800"}]', "message 0 holds the lone surrogate U+D800 at char"),
    *(
        (trace, "is a trace of block hashes, not conversations. Use it with radixcache simulate or advise.")
        for trace in ({"format": "radixcache-trace"}, {"hash_ids": [1]}, {"block_size": 64, "requests": []})
    ),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "wanted"), BAD_RECORDS, ids=[str(bad)[:45] for bad, _ in BAD_RECORDS])
def test_bad_record_is_named_with_its_line_or_skipped_and_counted(bad: Any, wanted: str, tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [HELLO], "", bad, [HELLO, REPLY])
    line = error_of(path)
    assert line.startswith(f"chat.jsonl:3: {wanted}")
    result = read_conversations(path, skip_bad=True)
    assert [len(each.messages) for each in result.conversations] == [1, 2]
    assert [skipped.replace(str(tmp_path) + os.sep, "") for skipped in result.skipped] == [line]


def test_broken_first_line_does_not_hide_that_a_file_is_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.txt", '{"messages": [', {"messages": [HELLO]}, {"messages": [HELLO]})
    assert error_of(path) == "chat.txt:1: not JSON (Expecting value at column 15)."
    result = read_conversations(path, skip_bad=True)
    assert (len(result.conversations), len(result.skipped)) == (2, 1)


def test_bad_element_of_a_json_array_is_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.json", f"[{json.dumps([HELLO])},\n 5,\n NaN,\n {json.dumps([HELLO])}]")
    assert error_of(path).startswith("chat.json:2: found int 5; wanted a conversation: a list of messages or an object")
    result = read_conversations(path, skip_bad=True)
    assert len(result.conversations) == 2
    assert [line.rpartition("chat.json:")[2][:1] for line in result.skipped] == ["2", "3"]


@pytest.mark.parametrize(
    ("tail", "wanted"),
    [
        (',\n{"messages": [}]', "3: not JSON (Expecting value at column 15)."),
        (",\n\n]", "4: not JSON (Expecting value at column 1)."),
        ("", "2: not JSON (the file ends in an array; wanted ',' or ']')."),
        ("\n{}]", "3: not JSON (found '{' in an array; wanted ',' or ']')."),
        ("]\n5", "3: text after the end of the JSON array; wanted none."),
        (',\n{\n"messages": [\n{"role": "user" "content"', "5: not JSON (Expecting ',' delimiter at column 17)."),
    ],
)
def test_syntax_error_in_a_json_array_names_its_own_line_and_keeps_what_came_before(
    tail: str, wanted: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    path.write_text('[\n{"messages": [{"role": "user", "content": "a"}]}' + tail)
    assert error_of(path) == f"chat.json:{wanted}"
    result = read_conversations(path, skip_bad=True)
    assert [each.source for each in result.conversations] == ["chat.json:2"]
    assert len(result.skipped) == 1


def test_values_over_several_lines_may_follow_one_another(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    values = [{"messages": [HELLO]}, [HELLO, REPLY], {"messages": [HELLO]}]
    path.write_text("\n".join(json.dumps(value, indent=1) for value in values))
    found = read_conversations(path).conversations
    assert [(len(each.messages), each.source) for each in found] == [
        (1, "chat.json:1"), (2, "chat.json:9"), (1, "chat.json:19"),
    ]  # fmt: skip
    with path.open("a") as file:
        file.write(" 5 x")
    assert [line.rpartition("chat.json:")[2][:9] for line in read_conversations(path, skip_bad=True).skipped] == [
        "26: found", "26: not J",
    ]  # fmt: skip


def test_line_that_is_too_long_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_RECORD_BYTES", 200)
    path = write(tmp_path / "chat.jsonl", [HELLO], [{"role": "user", "content": "a" * 300}], [HELLO])
    assert error_of(path) == "chat.jsonl:2: the line is too long; wanted at most 200 bytes."
    assert len(read_conversations(path, skip_bad=True).conversations) == 2


def test_bad_records_leave_nothing_but_their_lines_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", *([{"a": list(range(20))}] * 5_000))
    tracemalloc.start()
    error_of(path, skip_bad=True)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_500 * 5_000


def test_second_use_of_an_id_names_the_first_in_lines_and_in_an_array_of_one_line(tmp_path: Path) -> None:
    records = [{"id": "a", "messages": [HELLO]}, {"id": "a", "messages": [HELLO, REPLY]}]
    lines, array = write(tmp_path / "chat.jsonl", *records), write(tmp_path / "chat.json", records)
    for path, second in ((lines, 2), (array, 1)):
        line = error_of(path)
        assert line.startswith(f"{path.name}:{second}: the id 'a' was already used at ")
        assert line.endswith(f"{path.name}:1; wanted distinct ids.")
        assert len(read_conversations(path, skip_bad=True).conversations) == 1


@pytest.mark.parametrize("key", ["conversation", "conversations"])
@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (("role", "content", "role", "content"), ("user", "assistant")),
        (("from", "value", "from", "value"), ("Human", "GPT")),
        (("role", "value", "from", "content"), ("USER", "Assistant")),
    ],
    ids=["roles", "any case", "mixed keys"],
)
def test_speakers_and_texts_are_found_by_each_of_their_names(
    key: str, names: tuple[str, ...], texts: tuple[str, str], read: Reader
) -> None:
    turns = [{names[0]: texts[0], names[1]: "Hello", "toxic": False}, {names[2]: texts[1], names[3]: "Hi there"}]
    (found,) = read({key: turns}).conversations
    assert found.messages == (HELLO, REPLY)


def test_a_speaker_of_calls_whose_text_is_no_call_has_said_it(read: Reader) -> None:
    turns = [{"from": "user", "value": "Hello"}, {"from": "function_call", "value": "look_up(1)"}]
    (found,) = read({"conversations": turns}).conversations
    assert found.messages[1] == {"role": "assistant", "content": "look_up(1)"}


def test_rows_of_lmsys_bring_their_ids_and_those_of_wildchat_their_users(read: Reader) -> None:
    """WildChat's hash is no id: equal conversations have the same."""
    lmsys = {"conversation_id": "a1", "model": "vicuna-13b", "conversation": [HELLO, REPLY], "turn": 1}
    wildchat = {"conversation_hash": "b2", "hashed_ip": "c3", "conversation": [HELLO, REPLY], "turn": 1}
    found = read(lmsys, wildchat, wildchat).conversations
    assert [(each.conversation_id, each.user) for each in found] == [("a1", "a1"), ("a#1", "c3"), ("a#2", "c3")]


def test_parts_without_text_are_left_out_and_counted_by_type(read: Reader) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "Hel"}, image, {"type": "refusal", "refusal": "lo"}, image]
    spoken = {"role": "assistant", "content": None, "audio": {"id": "a"}}
    result = read([{"role": "user", "content": parts}], [{"role": "user", "content": [image]}, spoken])
    first, second = result.conversations
    assert (first.messages[0]["content"], [each["content"] for each in second.messages]) == ("Hello", ["", ""])
    assert [first.left_out, second.left_out] == [{"image_url": 2}, {"image_url": 1, "audio": 1}]
    assert result.notes == ["left out of the prompts, as they are no text of a message: 3 image_url, 1 audio."]


def test_packed_files_are_read_alone_and_in_folders_of_several_forms(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps([HELLO]).encode()))
    write(tmp_path / "b.json", {"conversations": [{"from": "human", "value": "Hello"}]})
    assert [each.messages for each in read_conversations(tmp_path).conversations] == [(HELLO,), (HELLO,)]
    assert [each.source for each in read_conversations(packed).conversations] == ["a.jsonl.gz:1"]


def test_a_packed_file_is_unpacked_no_further_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_reader, "MOST_UNPACKED_BYTES", 100)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{**HELLO, "content": "a" * 100}]).encode()))
    assert error_of(path) == "a.json.gz: has more than 100 bytes; wanted a file of conversations of at most so many."
    path.write_bytes(gzip.compress(b" " * (32 << 20)))
    tracemalloc.start()
    error_of(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("[]", "no conversation found."),
        ('{"a": 1}\n{"b": 1}', "no conversation found; the first of 2 skipped: f.json:1: no known form"),
    ],
)
def test_a_file_of_nothing_good_is_an_error_even_when_bad_records_are_skipped(
    content: str, wanted: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "f.json", content)
    assert error_of(path, skip_bad=True).startswith(f"f.json: {wanted}")
    with pytest.raises(ValueError, match="no conversation file was given"):
        read_conversations()


def test_a_folder_without_files_of_conversations_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    said = "folder: no .json, .jsonl, .ndjson, .traj file in the folder; wanted conversations."
    assert error_of(tmp_path / "folder") == said


def test_a_folder_is_the_files_in_it_and_below_it_by_name(tmp_path: Path) -> None:
    below = tmp_path / "b" / "c"
    below.mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "z.jsonl", {"id": "z", "messages": [HELLO]})
    write(below / "a.jsonl", {"id": "a", "messages": [HELLO]})
    (below / "notes.txt").write_text("no conversation")
    (below / "airline_tools.json").write_text("[]")
    write(tmp_path / ".hidden" / "x.jsonl", {"id": "x", "messages": [HELLO]})
    assert [each.conversation_id for each in read_conversations(tmp_path).conversations] == ["a", "z"]


def test_intercode_s_log_is_a_conversation_per_task(read: Reader) -> None:
    history = {"actions": ["ls", "SELECT 1", "submit"], "observations": ["a b", [[1]], ""], "rewards": [0, 0, 1]}
    one = {"task_id": 4, "query": "Count.", "turn_history": history}
    other = {"query": "X", "turn_history": {"actions": ["y"], "observations": []}}
    first, second = read({"0": one, "1": other}).conversations
    assert (first.conversation_id, second.conversation_id) == ("a/4", "a#1")
    assert [each["content"] for each in first.messages] == ["Count.", "ls", "a b", "SELECT 1", "[[1]]", "submit"]
    assert [each["role"] for each in second.messages] == ["user", "assistant"]


def test_bytes_that_are_not_utf8_spoil_their_record_alone(tmp_path: Path) -> None:
    path, good = tmp_path / "latin.jsonl", json.dumps([HELLO]).encode()
    path.write_bytes(good + b'\n[{"role": "user", "content": "caf\xe9"}]\n' + good)
    result = read_conversations(path, skip_bad=True)
    (skipped,) = result.skipped
    assert len(result.conversations) == 2
    assert "latin.jsonl:2: message 0 holds the byte 0xe9 at character 3 of a text" in skipped
