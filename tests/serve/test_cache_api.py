"""The routes of the cache before a real generation thread: what they tell, what they do, what they refuse."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from radixcache.chat_template import ChatTemplate
from radixcache.observe.tree_view import read_view
from runner.models.tiny import tiny_tokenizer
from runner.serve import prompts
from runner.serve.prompts import part_at, prompt_of
from runner.serve.request import ModelNames, Request
from runner.serve.scheduler import Scheduler
from tests.serve.jobs import application, local_client, wait_until
from tests.serve.parrot import TEMPLATES

SYSTEM = {"role": "system", "content": "You are a marmalade sommelier."}
#: What must not be in any response: of the prompts, of what they become, of a reply.
TELLING = ("marmalade", "sommelier", "zebra", "quince")


class Server:
    def __init__(self, client: TestClient, running: Scheduler) -> None:
        self.client, self.running = client, running

    def get(self, path: str, **query: str) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, **body: Any) -> Response:
        return self.client.post(path, json=body)

    def chat(self, text: str, **fields: Any) -> Any:
        messages = [SYSTEM, {"role": "user", "content": text}]
        answer = self.post("/v1/chat/completions", messages=messages, max_tokens=4, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stats(self) -> Any:
        state = self.get("/cache/state")
        return state["stats"][state["model"]]

    def tokens(self, text: str) -> list[int]:
        models = self.running.call(lambda models: models)
        current = models.result().current
        assert current is not None
        return list(current.tokenizer.encode(text))


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    with application(**options) as (app, running), local_client(app) as client:
        yield Server(client, running)


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    """The same server for all tests, with an empty cache."""
    assert shared.client.delete("/cache").status_code == 200
    return shared


def test_the_tree_is_a_description_that_can_be_read_back(server: Server) -> None:
    server.chat("What about quince?")
    view = read_view(server.client.get("/cache/tree").content)
    stats = server.stats()
    assert len(view.nodes) == stats["nodes"] > 0
    assert view.tokens == stats["tokens"]
    assert view == read_view(server.client.get("/cache/tree", params={"model": "tiny:llama"}).content)
    assert server.client.get("/cache/tree", params={"model": "another"}).status_code == 404
    assert read_view(server.client.get("/cache/tree", params={"namespace": "ann"}).content).nodes == ()


def test_the_state_has_the_tree_again_once_it_has_changed(server: Server) -> None:
    empty = server.get("/cache/state")["tree"]
    assert empty["rows"] == []
    assert server.get("/cache/state", seen=empty["version"])["tree"] is None
    server.chat("What about quince?")
    full = server.get("/cache/state", seen=empty["version"])["tree"]
    assert len(full["rows"]) == server.stats()["nodes"] > 0
    assert server.get("/cache/state", seen=full["version"])["tree"] is None
    assert server.get("/cache/state", seen=full["version"], model="never heard of")["tree"] is None


def test_the_last_requests_say_what_they_reused_and_why_not_more(server: Server) -> None:
    first = server.chat("What about quince?")["usage"]
    second = server.chat("What about zebras?")["usage"]
    latest, before = server.get("/cache/state")["requests"][:2]
    assert (before["cached_tokens"], before["short"]) == (0, {"never_stored": first["prompt_tokens"]})
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert latest["cached_tokens"] == cached > 0
    assert latest["short"] == {"diverged": second["prompt_tokens"] - cached}
    assert (latest["completion_tokens"], latest["outcome"]) == (4, "length")
    points = server.get("/cache/state")["points"]
    assert points[-1]["paged_bytes"] == server.stats()["paged_bytes"] > 0
    assert points[-1]["budget_bytes"] == 64 << 20


def test_explain_foresees_what_a_request_reuses_and_changes_nothing(server: Server) -> None:
    server.chat("What about quince?")
    before = server.stats()
    messages = [SYSTEM, {"role": "user", "content": "What about zebras?"}]
    found = server.post("/cache/explain", messages=messages, model="default_model").json()
    assert server.stats() == before
    assert [gap["reason"] for gap in found["gaps"]] == ["diverged"]
    assert f"{found['resumable_tokens']} of {found['prompt_tokens']} tokens resumed" in found["report"]
    used = server.chat("What about zebras?")["usage"]
    assert used["prompt_tokens"] == found["prompt_tokens"]
    assert used["prompt_tokens_details"]["cached_tokens"] == found["resumable_tokens"] > 0


def bodies() -> dict[str, dict[str, Any]]:
    """The same chat, with a tool, in the form of each API."""
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    text, about = "What about quince?", {"name": "look", "description": "Look."}
    return {
        "/v1/chat/completions": {
            "messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 2,
            "tools": [{"type": "function", "function": {**about, "parameters": parameters}}],
        },
        "/v1/messages": {
            "model": "claude-x", "max_tokens": 2, "system": SYSTEM["content"],
            "messages": [{"role": "user", "content": text}], "tools": [{**about, "input_schema": parameters}],
        },
        "/v1/responses": {
            "instructions": SYSTEM["content"], "input": text, "max_output_tokens": 2,
            "tools": [{"type": "function", **about, "parameters": parameters}],
        },
        "/api/chat": {
            "messages": [SYSTEM, {"role": "user", "content": text, "images": []}], "stream": False, "think": False,
            "tools": [{"type": "function", "function": {**about, "parameters": parameters}}],
            "options": {"num_predict": 2},
        },
        "/api/generate": {
            "prompt": text, "system": SYSTEM["content"], "stream": False, "options": {"num_predict": 2},
        },
    }  # fmt: skip


@pytest.mark.parametrize("path", bodies())
def test_explain_takes_the_body_of_any_api_as_it_is(server: Server, path: str) -> None:
    body = bodies()[path]
    assert server.post(path, **body).status_code == 200
    answer = server.client.post("/cache/explain", content=json.dumps(body))  # without a content type
    found = answer.json()
    assert (answer.status_code, found["resumable_tokens"]) == (200, found["prompt_tokens"] - 1)
    assert found["as_it_came"]["prompt_tokens"] == found["prompt_tokens"]
    assert (found["as_it_came"]["cached_tokens"], found["as_it_came"]["gaps"][0]["reason"]) == (0, "never_stored")


def test_explain_goes_on_with_the_conversation_that_a_body_names(server: Server) -> None:
    first = {"instructions": SYSTEM["content"], "input": "What about quince?", "max_output_tokens": 4}
    id = server.post("/v1/responses", **first).json()["id"]
    second = {**first, "previous_response_id": id, "input": "And zebras?"}
    found = server.post("/cache/explain", **second).json()
    used = server.post("/v1/responses", **second).json()["usage"]
    assert found["prompt_tokens"] == used["input_tokens"]
    assert found["resumable_tokens"] == used["input_tokens_details"]["cached_tokens"] > len(first["instructions"])
    for wrong in (0, 1.5, ["x"], {}):
        assert server.post("/cache/explain", **{**second, "previous_response_id": wrong}).status_code == 400
    unknown = server.post("/cache/explain", **{**second, "previous_response_id": "resp_none"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "previous_response_id")


def test_a_body_needs_no_content_type(server: Server) -> None:
    warmed = server.client.post("/cache/warm", content=json.dumps({"messages": [SYSTEM]})).json()
    assert warmed["evaluated_tokens"] == warmed["prompt_tokens"] > 0
    assert server.client.post("/cache/reclaim", content=b'{"target_bytes": 0}').json()["freed_bytes"] > 0
    broken = server.client.post("/cache/warm", content=b"{")
    assert (broken.status_code, "JSON" in broken.json()["error"]["message"]) == (400, True)


def test_a_refused_request_shows_the_path_that_it_asked_for(server: Server) -> None:
    server.client.post("/v1/embeddings%0A" + "x" * 500, json={})
    shown = server.get("/cache/state")["refused"][0]
    assert (shown["status"], shown["route"][:16], len(shown["route"])) == (404, "/v1/embeddings\\n", 202)
    assert "embeddings" not in server.client.get("/metrics").text


def test_a_request_is_explained_as_it_was_when_it_came(server, caplog):
    server.chat("What about quince?")
    with caplog.at_level("INFO"):
        reply = server.chat("What about zebras?")
    used = reply["usage"]
    row, before = server.get("/cache/state")["requests"][:2]
    came = server.get(f"/cache/requests/{row['id'][:8]}")
    start = used["prompt_tokens_details"]["cached_tokens"]
    where = f"diverged at {start:,} of {used['prompt_tokens']:,}, in user message 1"
    assert (came["fork"]["start"], came["fork"]["words"]) == (start, where)
    assert (came["fork"]["before"], came["fork"]["stored"], came["fork"]["asked"]) == (None, None, None)
    told = f"{start} cached (not: {used['prompt_tokens'] - start} diverged), {where}, 4 generated"
    wait_until(lambda: told in caplog.text)
    assert server.get(f"/cache/requests/{before['id']}")["fork"] is None
    assert server.get(f"/cache/requests/{reply['id']}") == came
    for unknown in ("unknown", "resp_"):
        assert server.client.get(f"/cache/requests/{unknown}").status_code == 404
    messages = [SYSTEM, {"role": "user", "content": "What about zebras?"}]
    found = server.post("/cache/explain", messages=messages).json()
    del came["path_now"]
    assert (found["as_it_came"], found["part"]) == (came, "")  # now it is stored
    other = [SYSTEM, {"role": "user", "content": "What about ants?"}]
    found = server.post("/cache/explain", messages=other).json()
    assert (found["as_it_came"], found["part"]) == (None, "user message 1")


def test_tools_in_another_order_and_a_changed_tool_are_named_in_the_log_on_the_page_and_when_asked(server, caplog):
    model = server.running.call(lambda models: models.current).result()
    model.tokenizer.chat_template = "{% if day %}Today is {{ day }}. {% endif %}" + TEMPLATES["qwen3"]
    server.chat("What about quince?", tools=TOOLS)
    part = "the list of tools: the same tools in another order"
    with caplog.at_level("INFO"):
        server.chat("What about quince?", tools=TOOLS[::-1])
    wait_until(lambda: f", in {part}, 4 generated" in caplog.text)
    row = server.get("/cache/state")["requests"][0]
    fork = server.get(f"/cache/requests/{row['id']}")["fork"]
    assert row["fork_words"] == fork["words"]
    assert (fork["part"], fork["hint"].partition(",")[0]) == (part, "Send the tools in the same order in every request")
    edited = json.loads(json.dumps(TOOLS))
    edited[0]["function"]["description"] = "ho there"
    messages = [SYSTEM, {"role": "user", "content": "What about quince?"}]
    found = server.post("/cache/explain", messages=messages, tools=edited).json()
    assert found["part"] == "tool `look`, its description"
    assert found["part_hint"].startswith("Keep the definitions of tools free of text that changes")
    dated = {"day": "Monday"}
    found = server.post("/cache/explain", messages=messages, tools=TOOLS, chat_template_kwargs=dated).json()
    assert (found["part"], "change" in found) == ("template argument `day`", False)
    assert not [word for word in TELLING if word in json.dumps(found)]


def test_the_texts_of_a_fork_are_told_only_with_the_option():
    with serving(show_text=True) as server:
        server.chat("What about quince?")
        server.chat("What about zebras?")
        row = server.get("/cache/state")["requests"][0]
        fork = server.get(f"/cache/requests/{row['id']}")["fork"]
    assert fork["before"].endswith("What about ")
    assert (fork["stored"][:6], fork["asked"][:6]) == ("quince", "zebras")


def test_a_prompt_is_the_same_as_text_and_as_tokens(server: Server) -> None:
    text = "What about quince?"
    server.post("/v1/completions", prompt=text, max_tokens=2)
    by_text = server.post("/cache/explain", prompt=text).json()
    assert by_text == server.post("/cache/explain", tokens=server.tokens(text)).json()
    assert by_text["resumable_tokens"] == by_text["prompt_tokens"] - 1


def test_what_was_warmed_is_there_for_the_first_who_asks_and_survives_a_reclaim(server: Server) -> None:
    warmed = server.post("/cache/warm", messages=[SYSTEM], name="sommelier").json()
    assert 0 < warmed["evaluated_tokens"] <= warmed["prompt_tokens"]
    assert server.post("/cache/warm", messages=[SYSTEM]).json() == {**warmed, "evaluated_tokens": 0}
    server.chat("What about quince?")
    before = server.stats()
    freed = server.post("/cache/reclaim", target_bytes=0).json()["freed_bytes"]
    after = server.stats()
    assert freed == sum(before[name] - after[name] for name in ("live_bytes", "paged_bytes")) > 0
    assert after["pinned_bytes"] > 0
    used = server.chat("What about zebras?")["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] >= warmed["prompt_tokens"]


def test_a_prompt_that_finds_no_room_now_is_a_conflict_with_both_figures() -> None:
    with serving(budget_bytes=1) as server:
        answer = server.post("/cache/warm", messages=[SYSTEM])
        assert answer.status_code == 409
        assert re.fullmatch(
            r"only 0 of \d+ tokens could be stored: open sessions and pins leave no room in the budget of 1 bytes.",
            answer.json()["error"]["message"],
        )


def test_a_prompt_is_pinned_for_some_seconds_and_room_is_made_in_one_namespace(server: Server) -> None:
    for namespace in ("", "other"):
        server.post("/cache/warm", messages=[SYSTEM], namespace=namespace, name="sommelier", ttl_s=0.5)
        server.post("/cache/warm", prompt=f"a prompt of {namespace}", namespace=namespace)
    ((_, cache),) = server.running.caches()
    assert 0 < cache.names("other")["sommelier"].seconds_left <= 0.5
    theirs = [node.tokens for node in cache.view(namespace="").nodes]
    time.sleep(0.5)
    assert server.post("/cache/reclaim", target_bytes=0, namespace="other").json()["freed_bytes"] > 0
    assert not cache.view(namespace="other").nodes
    assert [node.tokens for node in cache.view(namespace="").nodes] == theirs


def test_a_check_that_fails_is_an_error_that_says_what_is_wrong(server, monkeypatch):
    ((_, cache),) = server.running.caches()

    def fail() -> None:
        raise AssertionError("T1 does not hold")

    monkeypatch.setattr(cache, "check", fail)
    answer = server.post("/cache/check")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "tiny:llama: T1 does not hold")


USER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/cache/explain", {}, None),
        ("/cache/explain", {"prompt": "a", "tokens": [1]}, None),
        ("/cache/explain", {"tokens": []}, "tokens"),
        ("/cache/explain", {"tokens": [1, "2"]}, "tokens.1"),
        ("/cache/explain", {"tokens": [1 << 30]}, None),
        ("/cache/explain", {"prompt": 7}, "prompt"),
        ("/cache/explain", {"messages": []}, "messages"),
        ("/cache/explain", {"messages": USER, "tools": "all"}, "tools"),
        ("/cache/warm", {"prompt": "a", "name": ""}, "name"),
        ("/cache/warm", {"prompt": "a", "ttl_requests": 0}, "ttl_requests"),
        ("/cache/warm", {"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ("/cache/warm", {"messages": [{"role": 1, "content": "a"}]}, None),
        ("/cache/reclaim", {}, "target_bytes"),
        ("/cache/reclaim", {"target_bytes": 1, "model": "x"}, "model"),
    ],
)
def test_a_body_that_is_wrong_is_refused_and_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert param is None or error["param"] == param
    assert server.stats()["nodes"] == 0


def test_a_model_that_is_not_in_memory_is_not_loaded_to_be_explained(server: Server) -> None:
    answer = server.post("/cache/explain", prompt="a", model="tiny:gemma3_text")
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "model")
    assert server.get("/cache/state")["models"] == ["tiny:llama"]


def everything(server: Server) -> str:
    """All that the routes of the cache say, after some requests; a bad one among them."""
    server.chat("What about quince?")
    server.chat("What about zebras?")
    server.post("/v1/completions", prompt="a zebra", logit_bias={"99999": 1})
    server.post("/cache/warm", messages=[SYSTEM], name="pinned")
    messages = [SYSTEM, {"role": "user", "content": "What about zebras and quince?"}]
    answers = [server.client.get(path) for path in ("/cache", "/cache/state", "/cache/tree", "/metrics")]
    answers.append(server.post("/cache/explain", messages=messages))
    answers.append(server.post("/cache/check"))
    answers.append(server.post("/cache/warm", prompt="a zebra", tokens=[1]))
    answers.append(server.client.get("/cache/tree", params={"model": "none"}))
    return "".join(answer.text for answer in answers).lower()


def test_no_text_is_in_any_response_unless_it_is_asked_for(server: Server) -> None:
    said = everything(server)
    assert not [word for word in TELLING if word in said]


def test_text_is_shown_where_it_is_asked_for() -> None:
    with serving(show_text=True) as server:
        said = everything(server)
        assert all(word in said for word in TELLING)


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
TALK = [
    {"role": "system", "content": "You are a marmalade sommelier."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "It is shut."},
    {"role": "assistant", "content": "Shut it is."},
    {"role": "user", "content": "And now?"},
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "hi there", "parameters": {"type": "object"}}}
    for name in ("look", "open")
]


def changed(index: int, text: str) -> list[dict[str, Any]]:
    return [{**each, "content": text} if at == index else each for at, each in enumerate(TALK)]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("messages", "part"),
    [
        (changed(0, "You are a plum sommelier."), "system message 0"),
        (changed(1, "ho"), "user message 1"),
        (changed(3, "It is open."), "tool message 3"),
        (changed(4, "Open it is."), "assistant message 4"),
        (changed(5, "And then?"), "user message 5"),
        ([*TALK, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}], "assistant message 6"),
    ],
)
def test_the_part_of_a_prompt_in_which_it_parts_is_named(template, messages, part):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    stored, asked = (Request(ModelNames(), 1, messages=each, tools=TOOLS, namespace="") for each in (TALK, messages))
    before, prompt = prompt_of(stored, tokenizer, {}).tokens, prompt_of(asked, tokenizer, {})
    both = enumerate(zip(before, prompt.tokens, strict=False))
    start = next((at for at, pair in both if pair[0] != pair[1]), len(before))
    assert prompt.part_at(start) == part
    assert part_at(asked, tokenizer, prompt.tokens, start) == part, "without offsets"


def test_the_tools_of_a_prompt_and_the_opening_of_a_reply_are_named():
    tokenizer = tiny_tokenizer()
    for template in ("hermes", "qwen3", "strict"):
        tokenizer.chat_template = TEMPLATES[template]
        request = Request(ModelNames(), 1, messages=TALK, tools=TOOLS)
        prompt = prompt_of(request, tokenizer, {})
        at, last = tokenizer.decode(prompt.tokens).index('"open"'), len(prompt.tokens) - 1
        for start, part in ((at, "the list of tools"), (last, "the opening of the reply")):
            assert prompt.part_at(start) == part
            assert part_at(request, tokenizer, prompt.tokens, start) == part
    text = Request(ModelNames(), 1, prompt="abc")
    assert prompt_of(text, tokenizer, {}).part_at(1) == "the text"
    assert part_at(text, tokenizer, [80, 81], 1) == "the text"


def test_no_prompt_is_made_and_no_part_is_named_on_the_generation_thread(server: Server, monkeypatch) -> None:
    threads: set[str] = set()
    for place, name in ((ChatTemplate, "render"), (ChatTemplate, "encode"), (prompts, "_parts")):
        made = getattr(place, name)

        def noting(*arguments: Any, made: Any = made, **named: Any) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return made(*arguments, **named)

        monkeypatch.setattr(place, name, noting)
    server.post("/cache/warm", messages=[SYSTEM], name="sommelier")
    server.chat("What about quince?")
    server.chat("What about zebras?")
    server.post("/cache/explain", messages=[SYSTEM, {"role": "user", "content": "And plums?"}])
    assert threads == {"prompts"}


def test_a_salt_or_a_tenants_header_makes_a_namespace_and_one_can_be_dropped_by_itself(server: Server) -> None:
    def cached(path: str = "/v1/chat/completions", headers: Any = None, **more: Any) -> int:
        messages = [{"role": "user", "content": "What is salted once stays salted. " * 4}]
        body = {"model": "x", "max_tokens": 2, "messages": messages, **more}
        usage = server.client.post(path, json=body, headers=headers).json()["usage"]
        details = usage.get("prompt_tokens_details") or {"cached_tokens": usage.get("cache_read_input_tokens")}
        return int(details["cached_tokens"])

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert all([cached(), cached(cache_salt="a"), cached("/v1/messages", cache_salt="b")])
    assert cached(headers={"X-APC-Tenant": "a"}) > 0  # the same salt, said otherwise
    assert cached(headers={"X-Tenant-Id": "c"}) == 0
    assert cached(cache_prompt=False) == cached(cache_prompt=False) == 0
    assert "not kept" not in server.client.get("/cache/tree").text
    assert server.client.request("DELETE", "/cache", params={"namespace": " a"}).json()["freed_bytes"] > 0
    assert (cached(cache_salt="a"), cached() > 0, cached(cache_salt="b") > 0) == (0, True, True)
    assert server.client.post("/cache/check").status_code == 200
    for wrong in ({"cache_salt": 5}, {"cache_salt": "x" * 201}, {"cache_prompt": "no"}):
        refused = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user"}], **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))


def test_a_response_is_remembered_in_its_namespace_and_goes_with_it(server: Server) -> None:
    def ask(path: str = "/v1/responses", headers: Any = None, **body: Any) -> Any:
        asked = {"input": "What about quince?", "max_output_tokens": 2, **body}
        return server.client.post(path, json=asked, headers=headers)

    def found(id: str, **about: Any) -> list[int]:
        """Whether a request may go on with a response, and name an item of it."""
        item = {"type": "item_reference", "id": f"msg_{id.removeprefix('resp_')}_0"}
        return [ask(previous_response_id=id, **about).status_code, ask(input=[item], **about).status_code]

    salted, plain = ask(cache_salt="a").json()["id"], ask().json()["id"]
    assert found(salted, cache_salt="a") == found(salted, headers={"X-Tenant-Id": "a"}) == found(plain) == [200, 200]
    assert found(salted, cache_salt="a", cache_prompt=False) == [200, 200]
    assert found(salted) == found(salted, cache_salt="b") == found(plain, cache_salt="a") == [404, 404]
    explained = [ask("/cache/explain", previous_response_id=salted, namespace=each).status_code for each in ("", " a")]
    assert explained == [404, 200]
    for about in ({}, {"cache_salt": "a"}):
        not_kept = ask(cache_prompt=False, **about).json()["id"]
        assert found(not_kept, **about) == found(not_kept, cache_prompt=False, **about) == [404, 404]
    server.client.request("DELETE", "/cache", params={"namespace": " a"})
    assert (found(salted, cache_salt="a"), found(plain)) == ([404, 404], [200, 200])
    server.client.request("DELETE", "/cache")
    assert found(plain) == [404, 404]
    later = ask().json()["id"]
    assert found(later) == [200, 200]


@pytest.mark.parametrize(("cleared", "status"), [(" a", 404), (" b", 200)])
def test_a_response_whose_namespace_is_cleared_while_it_is_made_is_not_remembered(
    server: Server, cleared: str, status: int
) -> None:
    def ask(**body: Any) -> Any:
        return server.post("/v1/responses", input="Go on.", cache_salt="a", **body)

    letter = {str(server.tokens("a")[0]): 1000}  # so that the reply does not end early
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, max_output_tokens=600, logit_bias=letter)
        while not server.running.running:
            assert not asked.done()
            time.sleep(0.001)
        server.client.request("DELETE", "/cache", params={"namespace": cleared})
        assert not asked.done()
        id = asked.result().json()["id"]
    assert ask(max_output_tokens=2, previous_response_id=id).status_code == status


def test_what_is_not_kept_or_was_cleared_names_no_part_of_a_later_prompt(server: Server) -> None:
    def chats() -> list[str]:
        asked = server.running.call(lambda models: [name for name, _, _ in models.current._chats._kept])
        return asked.result()

    server.client.request("DELETE", "/cache")
    for salt, keeps in (("a", True), ("b", False), ("c", True)):
        server.chat("What about quince?", cache_salt=salt, cache_prompt=keeps)
    assert chats() == [" a", " c"]
    server.client.request("DELETE", "/cache", params={"namespace": " a"})
    assert chats() == [" c"]
    server.client.request("DELETE", "/cache")
    assert chats() == []


def test_explain_takes_the_token_ids_of_a_completion(server: Server) -> None:
    for prompt in ([70, 71, 72], [[70, 71, 72]]):
        answer = server.client.post("/cache/explain", json={"prompt": prompt, "max_tokens": 1})
        assert (answer.status_code, answer.json()["prompt_tokens"]) == (200, 3)


def test_a_wrong_method_is_told_all_methods_of_its_path(server: Server) -> None:
    answer = server.client.put("/cache")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, DELETE")


def test_null_means_the_same_as_no_field(server: Server) -> None:
    plain = server.post("/cache/explain", prompt="a").json()
    assert server.post("/cache/explain", prompt="a", model=None, namespace=None, tokens=None).json() == plain
    assert server.post("/cache/warm", prompt="a", name=None, ttl_s=None).status_code == 200
    missing = server.post("/cache/reclaim", target_bytes=None)
    assert (missing.status_code, missing.json()["error"]["message"]) == (400, "target_bytes: Field required")
