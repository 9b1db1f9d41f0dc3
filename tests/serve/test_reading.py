"""Replies of any tokens are told apart into text, reasoning and tool calls as mlx_lm.server's own handler does it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.engine.token import LikelyToken, Token
from runner.serve.mlx_lm_border import TextStateMachine
from runner.serve.reply_reader import ReplyReader
from runner.serve.request import OpenRequest, PrefillProgress
from tests.serve.scripted import CACHED_TOKENS, PROMPT_TOKENS, ScriptedRuns, record
from tests.serve.scripted_app import CHAT, TEXT, USER, scripted_client
from tests.serve.stock_server import stock_answer

#: As mlx_lm.generate.make_text_state_machine makes it for a model that thinks, calls tools and has channels.
TRANSITIONS = {
    "normal": [("<think>", "reasoning"), ("<call>", "tool"), ("<other>", "other")],
    "reasoning": [("</think>", "normal"), ("<call>", "tool")],
    "tool": [("</call>", "normal")],
    "other": [("</other>", "normal"), ("<call>", "tool")],
}
PIECES = ("<think>", "</think>", "<call>", "</call>", "<other>", "</other>", "<", "<c", "a", "b c", "é", "")


def parse_tool_call(text: str, _tools: Any) -> Any:
    """Two calls of a text with a semicolon in it, one of any other."""
    calls = [{"id": f"call {part}", "name": part.strip(), "arguments": {"é": part}} for part in text.split(";")]
    return calls if len(calls) > 1 else calls[0]


class SpokenRuns(ScriptedRuns):
    def __init__(self, steps=(), initial_state="normal", parser=parse_tool_call) -> None:
        super().__init__()
        self.tokens, self.initial_state, self.parser = steps, initial_state, parser

    def ask(self, opened: OpenRequest) -> None:
        reader = ReplyReader(TextStateMachine(TRANSITIONS), self.initial_state, self.parser, {})
        opened.put(PrefillProgress(0, PROMPT_TOKENS, reader))
        for step in self.tokens:
            opened.put(step)
        outcome = self.tokens[-1].finish_reason or "cancelled"
        opened.put(record(opened, completion_tokens=len(self.tokens), done_reason=outcome))


def steps_of(texts: Sequence[str], finish: str | None) -> list[Token]:
    steps = [Token(text, at, -at / 8, (LikelyToken(at, b"x", -at / 8),), None) for at, text in enumerate(texts)]
    last: Any = finish
    return [*steps, Token("" if finish == "stop" else "<", 7, -0.5, (LikelyToken(7, b"y", -0.5),), last)]


def contents(answer: str, *, is_stream: bool) -> list[Any]:
    """The bodies of an answer, less what is new in every answer, and what mlx_lm.server lacks of log-probabilities."""
    bodies = [line.removeprefix("data: ") for line in answer.split("\n\n") if line] if is_stream else [answer]

    def compared(fields: dict[str, Any]) -> dict[str, Any]:
        delta = fields.get("delta", {})
        delta.pop("role", None)  # in every chunk of the one, in the first of the other
        for said in (delta, fields.get("message", {})):
            if not said.get("content"):  # null of the one, "" or nothing of the other
                said.pop("content", None)
        if "logprob" in fields:
            return {"id": fields["id"], "logprob": fields["logprob"]}
        left_out = {"id", "created", "system_fingerprint", "timings", "reasoning_content"}
        left_out |= {"logprobs"} if is_stream else set()
        left_out |= {"object"} if fields.get("choices") == [] else set()
        return {name: value for name, value in fields.items() if name not in left_out}

    return [body if body == "[DONE]" else json.loads(body, object_hook=compared) for body in bodies]


@pytest.fixture(scope="module")
def runs() -> SpokenRuns:
    return SpokenRuns()


@pytest.fixture(scope="module")
def client(runs: SpokenRuns) -> Any:
    with scripted_client(runs) as client:
        yield client


ROUTES = {CHAT: {"messages": [USER]}, TEXT: {"prompt": "?"}}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=3).map("".join), max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    finish=st.sampled_from(["stop", "length"]),
    initial_state=st.sampled_from(["normal", "reasoning"]),
    path=st.sampled_from(sorted(ROUTES)),
    more=st.fixed_dictionaries(
        {"stream": st.booleans()},
        optional={
            "logprobs": st.booleans(),
            "top_logprobs": st.sampled_from([-1, 0, 2]),
            "stream_options": st.just({"include_usage": True}),
            "model": st.just("some/model"),
        },
    ),
)
def test_bodies_and_chunks_are_those_of_mlx_lm_server_whatever_the_tokens(
    runs: SpokenRuns, client: TestClient, texts, cuts, finish, initial_state, path, more
):
    # At a stop token, mlx_lm.server drops text that may be the beginning of a control sequence: here there is none.
    whole = "".join(texts) + "." * (finish == "stop")
    ends = sorted({0, *(min(cut, len(whole)) for cut in cuts), len(whole)})
    pieces = [whole[start:end] for start, end in itertools.pairwise(ends)] or [""]
    runs.tokens, runs.initial_state = steps_of(pieces, finish), initial_state
    body = {**ROUTES[path], **more}
    answer = client.post(path, json=body)
    status, wanted = stock_answer(
        path, body, runs.tokens, machine=TextStateMachine(TRANSITIONS), initial_state=initial_state,
        tool_parser=parse_tool_call, prompt_tokens=PROMPT_TOKENS, cached_tokens=CACHED_TOKENS,
    )  # fmt: skip
    assert answer.status_code == status == 200
    assert contents(answer.text, is_stream=more["stream"]) == contents(wanted, is_stream=more["stream"])


def reading(parser: Any = parse_tool_call) -> ReplyReader:
    return ReplyReader(TextStateMachine(TRANSITIONS), "normal", parser, {}, call_marks=("<call>", "</call>"))


@pytest.mark.parametrize("parsed", [ValueError("x"), KeyError("x"), 5, {"name": "f"}, {"arguments": {}}, ["x"]])
def test_a_tool_call_that_cannot_be_read_is_text_and_others_are_calls(parsed, caplog):
    def parse(text: str, tools: Any) -> Any:
        if text == "good":
            return parse_tool_call(text, tools)
        if isinstance(parsed, Exception):
            raise parsed
        return parsed

    delta = reading(parse).add(Token("a<call>bad</call><call>good</call>b", 1, 0.0, (), None))
    assert delta.text == "a<call>bad</call>b"
    assert [call["function"]["name"] for call in delta.tool_calls] == ["good"]
    assert "a tool call cannot be read, and is text of the reply" in caplog.text


def test_a_reply_that_is_ended_from_outside_keeps_what_could_have_become_a_control_sequence():
    read = reading()
    assert read.add(Token("a <th", 1, 0.0, (), None)).text == "a "
    assert read.add(Token("i")).text + read.finish().text == "<thi"


CUT = '{"name": "write", "arguments": {"path": "a.txt", "text": "Once up'


@pytest.mark.parametrize("finish", ["length", None], ids=["max_tokens", "cancelled"])
def test_a_tool_call_that_is_cut_off_is_given_as_far_as_it_came(finish):
    read = reading(lambda text, _: json.loads(text))
    assert read.add(Token(f"So: <call>{CUT}", 1, 0.0, (), finish)).tool_calls == ()
    (call,) = read.finish().tool_calls
    assert call["function"] == {"name": "write", "arguments": '{"path": "a.txt", "text": "Once up'}


def test_whole_arguments_of_a_call_that_is_cut_off_end_where_their_json_ends():
    read = reading(lambda text, _: json.loads(text))
    read.add(Token('<call>{"name": "write", "arguments": {"path": "}"}}\n</ca', 1, 0.0, (), "length"))
    (call,) = read.finish().tool_calls
    assert call["function"] == {"name": "write", "arguments": '{"path": "}"}'}


@pytest.mark.parametrize("text", ["<function=write>\n<parameter=pa", '{"name": "wri', '{"arguments": {}, "name": "f"'])
def test_a_cut_call_without_a_name_and_arguments_in_json_is_text(text):
    read = reading(lambda text, _: json.loads(text))
    read.add(Token(f"<call>{text}", 1, 0.0, (), "length"))
    delta = read.finish()
    assert (delta.text, delta.tool_calls) == (f"<call>{text}", ())


def test_a_broken_call_of_a_reply_that_ended_by_itself_is_text():
    read = reading(lambda text, _: json.loads(text))
    read.add(Token(f"<call>{CUT}", 1, 0.0, (), None))
    read.add(Token("", 2, 0.0, (), "stop"))
    assert read.finish() == Token(f"<call>{CUT}")


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_reply_that_is_over_keeps_what_could_have_become_a_control_sequence(reason):
    read = reading()
    assert read.add(Token("a <th", 1, 0.0, (), None)).text == "a "
    assert read.add(Token("i", 2, 0.0, (), reason)).text == "<thi"
