"""Replicas, part by part, without Ray's processes: news, places, relayed replies, combined routes."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from radixcache.observe.hints import Edge
from runner.engine.token import Token
from runner.routing import BLOCK_TOKENS, Ask, chain_digests, root_digest
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError, ModelNames, OpenRequest, PrefillProgress, ReplyEvent, Request, RequestRecord
from tests.commands.conftest import command  # noqa: F401
from tests.serve.jobs import application, local_client
from tests.serve.watched import record

pytest.importorskip("ray.serve", reason="Ray has no build for this Python")

from ray.exceptions import ActorDiedError

from runner.serve.replicas.fleet import RoutedPrompts, replica_options
from runner.serve.replicas.pages import Scrape, replica_routes
from runner.serve.replicas.ray_border import RETRIES, Relay
from runner.serve.replicas.switchboard import (
    AdminReply,
    AdminRequest,
    DigestChanges,
    ReplicaNews,
    RoutedRequest,
    Switchboard,
    call_app,
)
from runner.serve.responses import ResponseMemory

SECRET = b"a secret"


def keys(*stretches: range) -> Any:
    return np.concatenate([np.asarray(each, np.int64) for each in stretches])


def digests(tokens: Any, namespace: str = "") -> list[int]:
    return chain_digests(tokens, root_digest("tiny", namespace, SECRET))


def test_what_is_told_is_what_prompts_are_looked_up_by_wherever_edges_part() -> None:
    shared, one, other = range(300), range(1000, 1700), range(5000, 5400)
    edges = [Edge("", -1, keys(shared)), Edge("", 0, keys(one)), Edge("", 0, keys(other))]
    added, removed = DigestChanges("tiny", SECRET).update(edges)
    wanted = [*digests(keys(shared, one)), *digests(keys(shared, other))]
    assert len(wanted) == 1000 // BLOCK_TOKENS + 700 // BLOCK_TOKENS
    assert set(added) == set(wanted)
    assert len(added) == len(set(added))
    assert removed == []


def test_changes_alone_are_told_and_no_more_digests_than_may_be() -> None:
    telling = DigestChanges("tiny", SECRET)
    first, second = Edge("", -1, keys(range(600))), Edge("", -1, keys(range(700, 1300)))
    telling.update([first])
    assert telling.update([first]) == ([], [])
    assert telling.update([first, second]) == (digests(second.keys), [])
    assert telling.update([second]) == ([], digests(first.keys))
    # Shorter prefixes before longer ones.
    edge = Edge("", -1, keys(range(5000)))
    assert DigestChanges("tiny", SECRET, max_digests=7).update([edge])[0] == digests(edge.keys)[:7]


def two_replicas() -> Switchboard:
    """Two replicas, `a` and `b`, behind the prefix router."""
    board = Switchboard("prefix", lambda names: None, lambda: 0.0)
    board.set_names({"a", "b"})
    return board


@pytest.fixture
def board() -> Switchboard:
    return two_replicas()


def routed(number: int, tokens: Any) -> RoutedRequest:
    return RoutedRequest(f"request {number}", Ask(digests(tokens), len(tokens)))


def test_a_request_goes_where_its_prefix_was_told_to_be_and_follows_the_one_before() -> None:
    for name in ("a", "b"):
        board = two_replicas()
        told, new = keys(range(2000)), keys(range(9000, 9600))
        board.learn(name, ReplicaNews(digests(told)))
        assert board.place(routed(1, told), {"a", "b"}) == name
        board.end("request 1")
        first = board.place(routed(2, new), {"a", "b"})
        board.end("request 2")
        assert board.place(routed(3, new), {"a", "b"}) == first


def test_a_replica_that_is_gone_is_forgotten_and_its_requests_go_elsewhere(board: Switchboard) -> None:
    tokens = keys(range(2000))
    board.learn("a", ReplicaNews(digests(tokens)))
    board.learn("b", ReplicaNews(digests(tokens)))
    board.learn("b", ReplicaNews((), digests(tokens)))
    assert board.counts()["b"].known_digests == 0
    assert board.place(routed(1, tokens), {"a", "b"}) == "a"
    board.set_names({"b"})
    board.learn("a", ReplicaNews(digests(tokens)))  # told before it died
    assert board.place(routed(1, tokens), {"a", "b"}) == "b"
    board.set_names({"a", "b"})
    lines = board.counts()
    assert (lines["a"].known_digests, lines["a"].open_requests, lines["b"].open_requests) == (0, 0, 1)


def test_a_call_of_one_replica_goes_there_or_nowhere(board: Switchboard) -> None:
    assert board.place("b", {"a", "b"}) == "b"
    assert board.place("b", {"a"}) is None
    assert board.place(routed(1, keys(range(10))), set()) is None


def test_who_listens_is_told_of_replicas_once_when_they_come_or_go() -> None:
    heard: list[set[str]] = []
    board = Switchboard("prefix", heard.append)
    for names in ({"a"}, {"a"}, {"a", "b"}, {"b"}):
        board.set_names(names)
    assert heard == [{"a"}, {"a", "b"}, {"b"}]


def test_a_slow_model_measured_makes_a_free_replica_worth_less_than_a_stored_prefix() -> None:
    tokens, places = keys(range(4000)), []
    for prefill_ms in (4.0, 4e6):
        board = two_replicas()
        board.learn("a", ReplicaNews(digests(tokens)))
        about = {"prompt_tokens": 4000, "cached_tokens": 0, "queue_ms": 0.0, "ttft_ms": prefill_ms, "gaps_ms": (1e3,)}
        board.learn("a", ReplicaNews(records=[record(**about, completion_tokens=2)] * 100))
        assert board.place(routed(1, tokens), {"a", "b"}) == "a"
        places.append(board.place(routed(2, tokens), {"a", "b"}))
    assert places == ["b", "a"]


def test_a_reply_that_was_short_is_not_held_against_the_replica_that_gave_it() -> None:
    places = []
    for completion_tokens in (1, 400):
        board = two_replicas()
        first = board.place(routed(1, keys(range(10))), {"a", "b"})
        board.end("request 1", record(prompt_tokens=10, cached_tokens=10, completion_tokens=completion_tokens))
        other = ({"a", "b"} - {first}).pop()
        board.place(routed(2, keys(range(50, 60))), {other})
        board.end("request 2", record(prompt_tokens=10, cached_tokens=10, completion_tokens=100))
        places.append(board.place(routed(3, keys(range(70, 80))), {"a", "b"}) == first)
    assert places == [True, False]


ASKED = Request(ModelNames(), 5, prompt="A river")
STARTED, STEP = PrefillProgress(0, 7, "a reader"), Token("x", 5, -0.1, (), None)
ENDED = record()


class Stream:
    """What a replica answers, list by list; it dies behind the last one if it has not ended."""

    def __init__(self, *batches: list[ReplyEvent]) -> None:
        self.batches, self.is_cancelled = batches, False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[list[ReplyEvent]]:
        for batch in self.batches:
            yield batch
        if not self.batches or batch[-1] is not ENDED:
            raise ActorDiedError


async def ask_of(asked: Request) -> Ask:
    return Ask((), 0)


def relayed(board: Switchboard, *streams: Stream) -> list[ReplyEvent]:
    """The events of a request whose calls get these streams, one after the other."""
    answers: list[ReplyEvent] = []
    coming = iter(streams)

    def call(asked: Request, to: RoutedRequest) -> Stream:
        assert board.place(to, {"a", "b"})
        return next(coming)

    def put(answer: ReplyEvent) -> None:
        if isinstance(answer, RequestRecord | ApiError):
            assert not any(line.open_requests for line in board.counts().values())
        answers.append(answer)

    asyncio.run(Relay(call, ask_of, board).answer(OpenRequest(ASKED, put)))
    return answers


def test_a_reply_comes_through_as_it_is_and_ends_once(board: Switchboard) -> None:
    assert relayed(board, Stream([STARTED], [STEP, STEP], [ENDED])) == [STARTED, STEP, STEP, ENDED]


@pytest.mark.parametrize("heard", [(), ([STARTED],), ([STARTED, PrefillProgress(1, 7)],)])
def test_a_request_is_asked_again_where_no_token_was_handed_on(board, heard):
    answers = relayed(board, Stream(*heard), Stream([STARTED, STEP], [ENDED]))
    assert answers[-3:] == [STARTED, STEP, ENDED]
    assert sum(isinstance(each, RequestRecord | ApiError) for each in answers) == 1


def test_a_reply_that_has_begun_fails_and_so_does_one_whose_replicas_all_die(board: Switchboard) -> None:
    for streams in ([Stream([STARTED, STEP])], [Stream()] * (1 + RETRIES)):
        *before, last = relayed(board, *streams)
        assert isinstance(last, ApiError)
        assert (last.status, last.message) == (503, "the replica that answered has ended; ask again.")
        assert not any(isinstance(each, RequestRecord | ApiError) for each in before)


def test_an_error_comes_whole_from_another_process() -> None:
    error = ApiError.of_length(9, 8)
    error.record = record()
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (ApiError, error.message, vars(error))


def test_a_request_that_is_given_up_is_cancelled_at_its_replica(board: Switchboard) -> None:
    class Endless(Stream):
        async def __aiter__(self) -> AsyncIterator[list[ReplyEvent]]:
            yield [STARTED]
            await asyncio.Event().wait()

    stream, answers = Endless(), []

    async def given_up() -> None:
        started = asyncio.Event()

        def put(answer: ReplyEvent) -> None:
            answers.append(answer)
            started.set()

        task = asyncio.create_task(Relay(lambda asked, to: stream, ask_of, board).answer(OpenRequest(ASKED, put)))
        await started.wait()
        task.cancel()
        await task

    asyncio.run(given_up())
    assert stream.is_cancelled
    assert [type(each) for each in answers] == [PrefillProgress, ApiError]


def test_a_prompt_is_in_digests_before_anybody_answers_it_and_what_cannot_be_made_has_none() -> None:
    prompts = RoutedPrompts(ServeOptions(model="tiny"), SECRET)
    chat = Request(ModelNames(), 5, messages=[{"role": "user", "content": "x" * 600}], namespace="ann")
    found = asyncio.run(prompts.ask_of(chat))
    assert found.tokens == asyncio.run(prompts.count_tokens(chat)) > 600
    assert len(found.digests) == found.tokens // BLOCK_TOKENS
    for wrong in (Request(ModelNames("./another"), 5, prompt="x" * 600), Request(ModelNames(), 5, messages=[])):
        assert asyncio.run(prompts.ask_of(wrong)) == Ask((), 0)
    with pytest.raises(ApiError, match="no such folder"):
        asyncio.run(prompts.count_tokens(Request(ModelNames("./another"), 5, prompt="x")))
    prompts.close()


class Answering:
    """Replicas `a` and `b`, which answer admins from a script; `c` does not answer."""

    names = ["a", "b", "c"]  # noqa: RUF012

    def __init__(self) -> None:
        self.heard: list[tuple[str, AdminRequest]] = []

    def admin(self, name: str, request: AdminRequest) -> AdminReply:
        self.heard.append((name, request))
        if name == "c":
            raise ApiError(503, "gone")
        if request.path == "/metrics":
            return AdminReply(200, "text/plain", f'# TYPE x counter\nx_total{{m="y"}} {ord(name)}\n'.encode())
        if request.path == "/cache/state":
            row = {"model": "tiny", "time_s": ord(name)}
            state = {
                "models": ["tiny"], "model": "tiny", "stats": {"tiny": {}}, "running": 1, "waiting": 2, "disk": [name],
                "points": [], "requests": [row], "tree": {"of": name} if "tree=True" in request.query else None,
            }  # fmt: skip
            return AdminReply(200, "application/json", json.dumps(state).encode())
        return AdminReply(409 if name == "b" else 200, "application/json", json.dumps({"of": name}).encode())


@pytest.fixture
def asks() -> Iterator[tuple[TestClient, Answering]]:
    answering, app = Answering(), FastAPI()
    app.include_router(replica_routes(answering, Scrape(dict), ResponseMemory()))
    with TestClient(app) as client:
        yield client, answering


def test_metrics_say_which_replica_they_are_of(asks: tuple[TestClient, Answering]) -> None:
    lines = asks[0].get("/metrics").text.splitlines()
    assert [line for line in lines if line.startswith("x_")] == [
        'x_total{m="y",replica="a"} 97.0',
        'x_total{m="y",replica="b"} 98.0',
    ]


def test_the_page_shows_one_tree_and_the_requests_of_all(asks: tuple[TestClient, Answering]) -> None:
    for model, shown in (("", "a"), ("b: tiny", "b"), ("gone: tiny", "a")):
        state = asks[0].get("/cache/state", params={"model": model}).json()
        assert (state["model"], state["tree"], state["disk"]) == (f"{shown}: tiny", {"of": shown}, [shown])
        assert state["models"] == list(state["stats"]) == ["a: tiny", "b: tiny"]
        assert (state["running"], state["waiting"]) == (2, 4)
        assert [row["model"] for row in state["requests"]] == ["b: tiny", "a: tiny"]


def test_an_admin_asks_one_replica_or_all(asks: tuple[TestClient, Answering]) -> None:
    client, answering = asks
    assert client.post("/cache/warm?replica=a", json={"prompt": "x"}).json() == {"of": "a"}
    assert answering.heard == [("a", AdminRequest("POST", "/cache/warm", "replica=a", b'{"prompt":"x"}'))]
    everywhere = client.delete("/cache")
    assert everywhere.json() == {"replicas": {"a": {"of": "a"}, "b": {"of": "b"}}}
    assert everywhere.status_code == 409
    with pytest.raises(ApiError, match="no replica 'z'; there are: a, b, c"):
        client.get("/cache/tree?replica=z")


class Applications:
    """Whole servers in this process, each asked as a replica is."""

    def __init__(self, apps: dict[str, FastAPI]) -> None:
        self._apps, self.names = apps, [*apps]

    def admin(self, name: str, request: AdminRequest) -> AdminReply:
        return asyncio.run(call_app(self._apps[name], request))


def test_a_namespace_is_dropped_in_every_replica_and_nothing_else() -> None:
    prompt: dict[str, Any] = {"prompt": "What about quince? " * 4, "max_tokens": 2}
    with application() as (first, _), application() as (second, _):
        front, memory = FastAPI(), ResponseMemory()
        front.include_router(replica_routes(Applications({"a": first, "b": second}), Scrape(dict), memory))
        for namespace in (" x", " y"):
            memory.put(("", namespace), "resp_1", (b"[]",))

        def cached(app: FastAPI, salt: str) -> int:
            usage = local_client(app).post("/v1/completions", json={**prompt, "cache_salt": salt}).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        for app in (first, second):
            assert [cached(app, "x"), cached(app, "y")] == [0, 0]
        with TestClient(front) as client:
            found = client.delete("/cache", params={"namespace": " x"})
            with pytest.raises(ApiError):
                memory.get(("", " x"), "resp_1")
            assert [each["freed_bytes"] > 0 for each in found.json()["replicas"].values()] == [True, True]
            for app in (first, second):
                assert (cached(app, "x"), cached(app, "y") > 0) == (0, True)
            freed = client.delete("/cache", params={"namespace": " x", "replica": "b"}).json()
            assert freed["freed_bytes"] > 0
            client.delete("/cache", params={"namespace": " y", "replica": "b"})
            assert memory.get(("", " y"), "resp_1") == (b"[]",), "one replica alone has no responses"
            assert (cached(first, "x") > 0, cached(second, "x")) == (True, 0)
            asked = client.get("/cache/state").json()["requests"][0]["id"]
            assert client.get(f"/cache/requests/{asked}").json()["id"] == asked
            assert client.get("/cache/requests/unknown").status_code == 404


def test_an_application_is_called_without_a_server() -> None:
    app = FastAPI()

    @app.post("/cache/{what}")
    def echo(what: str, body: dict[str, Any], more: int) -> dict[str, Any]:
        return {"what": what, "more": more, **body}

    reply = asyncio.run(call_app(app, AdminRequest("POST", "/cache/warm", "more=3", b'{"a": 1}')))
    assert (reply.status, reply.media_type) == (200, "application/json")
    assert json.loads(reply.body) == {"what": "warm", "more": 3, "a": 1}
    assert asyncio.run(call_app(app, AdminRequest("GET", "/nowhere"))).status == 404


def test_replicas_share_the_budget_and_know_no_keys(tmp_path: Any) -> None:
    given = ServeOptions(model="tiny", replicas=4, budget_bytes=4000, api_keys=tmp_path, namespace_by="key", port=80)
    found = replica_options(given)
    assert (found.budget_bytes, found.api_keys, found.namespace_by, found.replicas) == (1000, None, "none", None)
    whole, quarter = (replica_options(ServeOptions(model="tiny", replicas=count)).budget_bytes or 0 for count in (1, 4))
    assert 0.2 * whole < quarter < 0.3 * whole


def test_a_record_goes_to_the_server_without_the_work_that_names_its_fork() -> None:
    sent = pickle.loads(pickle.dumps(record(naming=Future(), fork_part="system message 0")))
    assert (sent.naming, sent.fork_part) == (None, "system message 0")
