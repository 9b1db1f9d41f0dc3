"""What a request costs is bounded before it is done: JSON values, bytes, characters, prompts made at a time."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.types import Message, Receive, Scope, Send

from benchmarks import bench_hostile
from radixcache.chat_template import ChatTemplate
from runner.models.tiny import SPECIAL_TOKENS, tiny_tokenizer
from runner.serve import prompts, service
from runner.serve.middleware import MAX_BODIES, BodyLimit
from runner.serve.prompts import RenderedPrompt, prompt_of
from runner.serve.request import MAX_TOOLS, ApiError, ModelNames, Request
from runner.serve.service import CONTAINER_COST, LARGE_BYTES, FairThreads, require_few_values
from tests.chat.templates import CHATML
from tests.chat.tokenizers import make_tokenizer
from tests.serve.jobs import GUARD_S, Waiting, application, local_client, running

SOON_S = 10
WORDS = TokenizerWrapper(make_tokenizer(CHATML))
#: Texts with what JSON is made of.
SIGNS = st.text(st.sampled_from('a,:[]{}"\\é'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | SIGNS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SIGNS, inner, max_size=4),
    max_leaves=20,
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# JSON values


def cost(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    fields = CONTAINER_COST * len(inner) if isinstance(value, dict) else 0
    return CONTAINER_COST + fields + max(0, len(inner) - 1) + sum(map(cost, inner))


@given(JSON, st.booleans())
def test_the_values_of_a_body_are_counted_exactly_and_what_is_in_its_texts_is_not(value: Any, is_ascii: bool) -> None:
    raw, limit = json.dumps(value, ensure_ascii=is_ascii).encode(), service.MAX_COST
    try:
        service.MAX_COST = cost(value)
        require_few_values(raw)
        service.MAX_COST = cost(value) - 1
        if cost(value):
            with pytest.raises(ApiError, match="JSON values"):
                require_few_values(raw)
    finally:
        service.MAX_COST = limit


def test_the_body_of_an_agent_with_many_tools_and_a_long_session_has_few_values() -> None:
    parameters = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "d"} for n in range(20)}}
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": parameters}} for n in range(500)]
    messages = [user([{"type": "text", "text": json.dumps(parameters) * 10}]) for _ in range(500)]
    require_few_values(json.dumps({"messages": messages, "tools": tools}).encode())
    require_few_values(b'{"prompt": [' + b"1000, " * 900_000 + b"1]}")


MANY = b"[" + b"[]," * 200_000 + b"0]"
FLOODS = {"a field": b'{"x": %b, "model": "tiny", "messages": [{"role": "user", "content": "?"}]}' % MANY, "all": MANY}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_no_route_reads_a_body_with_too_many_values(flood: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with application() as (app, _):
        client = local_client(app)
        for path, methods in app.openapi()["paths"].items():
            if "post" in methods and path not in ("/cache/check",):
                answer = client.post(path, content=flood, headers={"Content-Type": "application/json"})
                assert answer.status_code == 400, path
                error = answer.json()["error"]
                assert "JSON values" in (error if path.startswith("/api/") else error["message"]), path


def test_a_wrong_item_of_a_long_list_is_reported_once() -> None:
    with application() as (app, _):
        client = local_client(app)
        wrong = [1] * 300_000
        for path, body in {
            "/v1/chat/completions": {"messages": wrong},
            "/v1/messages": {"model": "m", "max_tokens": 1, "messages": [user(wrong)]},
            "/v1/responses": {"input": [user(wrong)]},
            "/cache/explain": {"tokens": ["x"] * 300_000},
        }.items():
            began_s = time.process_time()
            answer = client.post(path, json=body)
            assert answer.status_code == 400, answer.text[:200]
            assert ".0" in answer.json()["error"]["message"]
            assert time.process_time() - began_s < 1, path


def test_a_request_has_some_thousand_tools_at_most() -> None:
    with application() as (app, _):
        client = local_client(app)
        tool = {"type": "function", "function": {"name": "f"}}
        for count, field in ((MAX_TOOLS, None), (MAX_TOOLS + 1, "tools")):
            body = {"messages": [user("?")], "tools": [tool] * count, "max_tokens": 1}
            error = client.post("/v1/chat/completions", json=body).json()["error"]
            assert (error["param"] == field) == (field is not None), "the context is too short for the first"


def test_a_long_body_is_read_beside_the_event_loop_and_makes_the_same_request() -> None:
    with application() as (app, _):
        client = local_client(app)
        answers = []
        for more in ({}, {"unknown": "x" * LARGE_BYTES}):
            body = {"messages": [user("What is two and two?")], "max_tokens": 4, **more}
            answers.append(client.post("/v1/chat/completions", json=body).json()["choices"])
        assert answers[0] == answers[1]


# Bytes


MIB = 1 << 20
GONE: Message = {"type": "http.disconnect"}


class Sending:
    """A request that comes in these messages, and what the route behind the limit makes of it."""

    def __init__(self, *messages: Message, length: int | None = None) -> None:
        self.unread = list(messages)
        self.received: list[Message] = []
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        self.scope: Scope = {"type": "http", "headers": headers}

    def send(self, *, max_mib: float = 1) -> None:
        asyncio.run(BodyLimit(self.route, max_mib=max_mib)(self.scope, self.receive, self.answer))

    async def receive(self) -> Message:
        return self.unread.pop(0)

    async def answer(self, _: Message) -> None:
        raise AssertionError("the limit answers nothing itself")

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received += [await receive(), await receive()]


def part(size: int, *, is_last: bool = False) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": not is_last}


def test_bodies_together_are_limited_until_their_requests_are_over() -> None:
    async def send() -> None:
        is_done = asyncio.Event()

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            await is_done.wait()

        limit = BodyLimit(route, max_mib=1)

        async def ask() -> None:
            request = Sending(part(MIB, is_last=True))
            await limit(request.scope, request.receive, request.answer)

        asked = [asyncio.ensure_future(ask()) for _ in range(MAX_BODIES)]
        await asyncio.sleep(0)  # they all begin
        with pytest.raises(ApiError, match="try again later") as refused:
            await ask()
        assert (refused.value.status, refused.value.retry_after_s) == (429, 5)
        is_done.set()
        await asyncio.gather(*asked)
        await ask()

    asyncio.run(send())


def test_what_a_request_goes_on_with_counts_like_its_body_until_it_is_over() -> None:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["hold"](MIB - 1)
        with pytest.raises(ApiError, match="larger than 1 MiB"):
            scope["state"]["hold"](1)

    limit = BodyLimit(route, max_mib=1)
    for _ in range(MAX_BODIES + 1):
        request = Sending(part(1, is_last=True))
        asyncio.run(limit(request.scope, request.receive, request.answer))


def test_nothing_is_done_for_a_client_that_leaves_before_its_body_is_whole() -> None:
    request = Sending(part(3), GONE, length=5)
    request.send()
    assert request.received == []


# Characters


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "x" * 5000},
        {"messages": [user("x" * 2500), user("x" * 2500)]},
        {"messages": [user([{"type": "text", "text": "x" * 2500}] * 2)]},
    ],
    ids=["a text", "messages", "parts"],
)
def test_a_prompt_with_more_characters_than_the_context_can_have_is_refused_before_it_is_made(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    longest = max(map(len, SPECIAL_TOKENS))
    assert prompts._longest_token(tokenizer) == longest
    monkeypatch.setattr(ChatTemplate, "render", None)
    monkeypatch.setattr(type(tokenizer), "encode", None, raising=False)
    most_tokens, least = 4999 // longest, -(-5000 // longest)
    with pytest.raises(ApiError) as refused:
        prompt_of(Request(ModelNames(), 1, **asked), tokenizer, {}, most_tokens=most_tokens)
    error = refused.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert f"maximum context length is {most_tokens} tokens. However, your messages" in str(error)
    assert error.anthropic_message == f"prompt is too long: at least {least} tokens > {most_tokens} maximum"


def test_token_ids_beyond_the_context_are_refused_before_their_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(type(tokenizer), "decode", None, raising=False)
    with pytest.raises(ApiError, match="resulted in 101 tokens"):
        prompt_of(Request(ModelNames(), 1, prompt=[5] * 101, echo=True), tokenizer, {}, most_tokens=100)


def test_a_long_name_of_a_role_counts_as_often_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TokenizerWrapper(make_tokenizer(CHATML))
    tokenizer.has_chat_template = False
    monkeypatch.setattr(type(tokenizer._tokenizer), "_encode_plus", None)
    request = Request(ModelNames(), 1, messages=[user("a")] * 1000, role_mapping={"user": "x" * 1000})
    with pytest.raises(ApiError, match="maximum context length is 2000 tokens"):
        prompt_of(request, tokenizer, {}, most_tokens=2000)


def test_no_more_tokens_are_warmed_than_a_prompt_may_have() -> None:
    with application() as (app, _):
        answer = local_client(app).post("/cache/warm", json={"tokens": [5] * 32769})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tokens")
        assert "wanted at most 32768 tokens, the context; found 32769" in error["message"]


def test_names_are_no_longer_than_paths_in_any_api() -> None:
    name, chat = "m" * 4097, {"messages": [user("?")], "max_tokens": 1}
    with application() as (app, _):
        client = local_client(app)
        for path, body in {
            "/v1/chat/completions": {**chat, "model": name},
            "/v1/completions": {"prompt": "?", "adapters": name},
            "/v1/responses": {"input": "?", "model": name},
            "/v1/messages": {**chat, "model": name},
            "/api/chat": {**chat, "model": name},
            "/cache/warm": {"tokens": [1], "name": name},
            "/cache/explain": {"prompt": "?", "namespace": name},
            "/cache/reclaim": {"target_bytes": 0, "namespace": name},
        }.items():
            answer = client.post(path, json=body)
            assert (answer.status_code, "at most 4096 characters" in answer.text) == (400, True), (path, answer.text)


@pytest.mark.parametrize("hidden", ["tools", "reasoning", "arguments"])
def test_what_a_template_may_leave_out_is_bounded_more_loosely(hidden: str) -> None:
    def asked(length: int) -> Request:
        text = "word " * (length // 5)
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": text})}}
        more = {"reasoning": {"reasoning_content": text}, "arguments": {"tool_calls": [call]}}.get(hidden, {})
        tools = [{"type": "function", "function": {"name": "f", "description": text}}] if hidden == "tools" else None
        talk = [user("?"), {"role": "assistant", "content": "So", **more}, user("!")]
        return Request(ModelNames(), 1, messages=talk, tools=tools)

    found = prompt_of(asked(6000), WORDS, {}, most_tokens=100)  # CHATML shows none of them
    assert len(found.tokens) < 100
    with pytest.raises(ApiError, match="maximum context length is 100 tokens"):
        prompt_of(asked(8000), WORDS, {}, most_tokens=100)


def test_a_long_text_is_tokenized_up_to_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    tokenizer = make_tokenizer(CHATML)
    encode = type(tokenizer)._encode_plus

    def counting(self: Any, text: Any, **arguments: Any) -> Any:
        lengths.extend(map(len, [text] if isinstance(text, str) else text))
        return encode(self, text, **arguments)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", counting)
    monkeypatch.setattr(prompts, "PIECE_CHARACTERS", 1000)
    longest = prompts._longest_token(tokenizer)
    most_tokens = 2000
    text = "zq" * (most_tokens * (longest - 1) // 2)  # as long as the context could have
    assert len(text) > prompts.WHOLE_CHARACTERS * most_tokens
    with pytest.raises(ApiError, match="at least 2") as refused:
        prompt_of(Request(ModelNames(), 1, messages=[user(text)]), TokenizerWrapper(tokenizer), {}, most_tokens=2000)
    assert refused.value.code == "context_length_exceeded"
    assert max(lengths) <= 1000
    assert sum(lengths) < 5 * most_tokens < len(text)


def test_a_text_of_few_tokens_for_its_length_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "PIECE_CHARACTERS", 1000)
    text = "You are a helpful assistant. " * 100
    whole = prompt_of(Request(ModelNames(), 1, messages=[user(text)]), WORDS, {})
    monkeypatch.setattr(prompts, "WHOLE_CHARACTERS", 1)
    bounded = prompt_of(Request(ModelNames(), 1, messages=[user(text)]), WORDS, {}, most_tokens=len(whole.tokens))
    assert bounded.tokens == whole.tokens


def test_tokens_beyond_the_context_are_counted_as_far_as_that_is_bounded() -> None:
    with application() as (app, _):
        client = local_client(app)

        def counted(length: int) -> Any:
            body = {"model": "tiny", "messages": [user("x" * length)]}
            return client.post("/v1/messages/count_tokens", json=body).json()

        assert counted(40_000)["input_tokens"] > 40_000
        assert re.fullmatch(TOO_LONG.format(4 * 32768), counted(1_200_000)["error"]["message"])


TOO_LONG = r"prompt is too long: at least \d+ tokens > {} maximum"


def test_a_prompt_beyond_the_context_is_refused_in_the_form_of_each_api_and_warms_nothing() -> None:
    text = "x" * 300_000
    with application() as (app, _):
        client = local_client(app)
        for path, body in {
            "/v1/chat/completions": {"messages": [user(text)]},
            "/v1/completions": {"prompt": text},
            "/v1/responses": {"input": text},
            "/v1/messages": {"model": "m", "max_tokens": 1, "messages": [user(text)]},
            "/cache/warm": {"messages": [user(text)]},
            "/api/chat": {"model": "m", "messages": [user(text)]},
        }.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 400, path
            error = answer.json()["error"]
            if path == "/api/chat":
                assert "maximum context length is 32768 tokens" in error
            elif path == "/v1/messages":
                assert re.fullmatch(TOO_LONG.format(32768), error["message"])
            else:
                assert re.search(r"maximum context length is 32768 tokens.* at least \d+ tokens", error["message"])
                assert error["code"] == "context_length_exceeded"


# Turns of clients


def test_clients_take_turns_and_one_has_some_of_the_threads_at_most() -> None:
    threads, held, order = FairThreads(3, 2, "fair"), threading.Event(), []
    begun = {client: threading.Semaphore(0) for client in "ab"}

    def work(client: str, number: int) -> str:
        begun[client].release()
        assert held.wait(SOON_S)
        order.append((client, number))
        return f"{client}{number}"

    greedy = [threads.submit("a", work, "a", number) for number in range(6)]
    assert begun["a"].acquire(timeout=GUARD_S)
    assert begun["a"].acquire(timeout=GUARD_S)
    modest = [threads.submit("b", work, "b", number) for number in range(2)]
    assert begun["b"].acquire(timeout=SOON_S), "a third thread is free, though a client waits that has two"
    assert not begun["a"].acquire(blocking=False)
    greedy[3].cancel()
    held.set()
    assert [each.result(GUARD_S) for each in modest] == ["b0", "b1"]
    assert [each.result(GUARD_S) for each in greedy if not each.cancelled()] == ["a0", "a1", "a2", "a4", "a5"]
    assert order.index(("b", 1)) < order.index(("a", 4)), "its turn comes before most of what waited earlier"
    assert not threads._work
    assert not threads._running
    threads.close()


def test_a_prompt_that_takes_long_to_make_holds_up_its_own_client_alone(slow: threading.Event) -> None:
    with running() as thread:
        first = Waiting(thread, prompt="slow", max_tokens=2, client="a")
        second = Waiting(thread, prompt="the same client", max_tokens=2, client="a")
        others = [Waiting(thread, prompt="another client", max_tokens=2, client="b") for _ in range(4)]
        assert [each.record.outcome for each in others] == ["length"] * 4
        assert not first.answers
        assert not second.answers
        slow.set()
        assert [each.record.outcome for each in (first, second)] == ["length"] * 2


def test_a_client_is_known_by_its_key_or_its_address(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = []
    monkeypatch.setattr(
        "runner.serve.served_model.prompt_of",
        lambda request, *_, **__: clients.append(request.client) or RenderedPrompt([1], (), "normal"),
    )
    keys = tmp_path / "keys"
    keys.write_text("ann secret\n")
    keys.chmod(0o600)
    for more, headers in (({}, {}), ({"api_keys": keys}, {"x-api-key": "secret"})):
        with application(**more) as (app, _):
            body = {"prompt": "?", "max_tokens": 1}
            assert local_client(app).post("/v1/completions", json=body, headers=headers).status_code == 200
    assert [each for each in clients if each] == ["127.0.0.1", "ann"]  # each start asks for nobody


# All of it, on a real server


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["message", "eight"])
def test_others_wait_half_a_second_at_most_beside_a_hostile_request_of_full_size(name: str) -> None:
    rows = []
    while len(rows) < 3:  # other work of the machine may hold up one
        rows += bench_hostile.measure(1, [name])
        assert rows[-1]["peak by body"] <= bench_hostile.MOST_BY_BODY, rows
        assert rows[-1]["status"] == "400", rows
        if max(rows[-1]["health s max"], rows[-1]["gap s max"]) <= bench_hostile.MOST_WAIT_S:
            return
    raise AssertionError(rows)
