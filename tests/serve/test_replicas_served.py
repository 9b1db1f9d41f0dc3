"""`radixcache serve --replicas 3`: real processes on Ray Serve, asked by OpenAI's client.

The same eight conversations go to one process and to three replicas, one request after the other: so nothing depends
on how fast this machine is.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx2
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runner.models.tiny import tiny_tokenizer
from tests.serve.serving import ServedProcess, serving

pytest.importorskip("ray.serve", reason="Ray has no build for this Python")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Against hanging alone: where others keep the processors busy, a dozen processes take their time.
GUARD_S = 300
REPLICAS, CONVERSATIONS, TURNS = 3, 8, 4
ANN, BOB, ROOT = "key-of-ann", "key-of-bob", "key-of-root"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
#: Replies in letters, whichever the model likes best of them.
BIAS = {str(token): 100 for token in tiny_tokenizer().encode(LETTERS)}


class Talk(NamedTuple):
    """What came of all conversations: each reply, and how much of the prompts was reused."""

    replies: list[str]
    prompt_tokens: int
    cached_tokens: int


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=GUARD_S)


def user(conversation: int, turn: int) -> dict[str, str]:
    return {"role": "user", "content": f"{conversation}.{turn} What about number {conversation * 7 + turn}? " * 10}


def asked(asker: openai.OpenAI, messages: Any, max_tokens: int = 12, **more: Any) -> Any:
    return asker.chat.completions.create(
        model="default_model", messages=messages, max_tokens=max_tokens, temperature=0, logit_bias=BIAS, **more
    )


def talk(url: str, key: str = "none") -> Talk:
    """All conversations, turn by turn, one request at a time."""
    asker, replies, prompt_tokens, cached_tokens = client(url, key), [], 0, 0
    held: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for number, messages in enumerate(held):
            messages.append(user(number, turn))
            answer = asked(asker, messages)
            replies.append(answer.choices[0].message.content)
            messages.append({"role": "assistant", "content": replies[-1]})
            prompt_tokens += answer.usage.prompt_tokens
            cached_tokens += answer.usage.prompt_tokens_details.cached_tokens
    return Talk(replies, prompt_tokens, cached_tokens)


@contextmanager
def replicas(*arguments: object) -> Iterator[ServedProcess]:
    """Serve with replicas; in the end nothing of it is left."""
    folder = tempfile.mkdtemp(prefix="rc")  # a short path: Ray puts sockets in it
    before, os.environ["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR"), folder
    try:
        with serving("--replicas", REPLICAS, *arguments) as served:
            children = psutil.Process(served.process.pid).children(recursive=True)
            yield served
            children += psutil.Process(served.process.pid).children(recursive=True)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(GUARD_S) == 0, served.log
            _, left = psutil.wait_procs(set(children), GUARD_S)
            assert not left
            assert "Traceback" not in served.log
    finally:
        os.environ.pop("RAY_TMPDIR")
        if before is not None:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def one() -> Talk:
    """What one process makes of the conversations."""
    with serving() as served:
        return talk(served.url)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """Replicas behind the prefix router, with two tenants."""
    folder = tmp_path_factory.mktemp("keys")
    tenants, admin = folder / "tenants", folder / "admin"
    tenants.write_text(f"ann {ANN}\nbob {BOB}\n")
    admin.write_text(f"root {ROOT}\n")
    with replicas("--api-keys", tenants, "--admin-key-file", admin, "--namespace-by", "key") as served:
        yield served


def admins(served: ServedProcess, path: str) -> httpx2.Response:
    return httpx2.get(f"{served.url}{path}", headers={"x-api-key": ROOT}, timeout=GUARD_S).raise_for_status()


def routed(served: ServedProcess, name: str) -> dict[str, float]:
    """A metric of the router for each replica."""
    families = text_string_to_metric_families(admins(served, "/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {each.labels["replica"]: each.value for each in samples if each.name == f"radixcache_router_{name}"}


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + GUARD_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_prefix_router_reuses_what_one_process_would_and_replies_are_the_same(one, keyed):
    several = talk(keyed.url, ANN)
    assert several.replies == one.replies
    assert several.prompt_tokens == one.prompt_tokens
    assert several.cached_tokens >= 0.9 * one.cached_tokens > 0
    assert all(routed(keyed, "requests_total").values())  # every replica had its share


def test_what_one_tenant_asked_is_nowhere_for_another_one(keyed: ServedProcess) -> None:
    question = [user(99, 0)]
    asked(client(keyed.url, ANN), question)
    again = asked(client(keyed.url, ANN), question)
    before = routed(keyed, "matched_tokens_total")
    others = asked(client(keyed.url, BOB), question)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert others.usage.prompt_tokens_details.cached_tokens == 0
    assert others.choices[0].message.content == again.choices[0].message.content
    assert routed(keyed, "matched_tokens_total") == before


def test_both_apis_are_sent_where_a_prefix_is_and_the_page_shows_all_replicas(keyed: ServedProcess) -> None:
    body = {"model": "default_model", "messages": [user(50, 0)], "max_tokens": 4, "temperature": 0}
    told = [
        httpx2.post(f"{keyed.url}/v1/messages", json=body, headers={"x-api-key": ANN}, timeout=GUARD_S).json()
        for _ in range(2)
    ]
    prompt = "The same beginning of a text. " * 20
    texts = [
        client(keyed.url, ANN).completions.create(model="default_model", prompt=prompt, max_tokens=4) for _ in range(2)
    ]
    assert told[1]["usage"]["cache_read_input_tokens"] > 200
    assert texts[1].usage is not None
    assert texts[1].usage.prompt_tokens_details is not None
    assert (texts[1].usage.prompt_tokens_details.cached_tokens or 0) > 200
    names = list(routed(keyed, "requests_total"))
    state = admins(keyed, "/cache/state").json()
    assert state["models"] == [f"{name}: tiny" for name in names]
    assert state["tree"]
    until(lambda: min(routed(keyed, "known_digests").values()) > 0)


def test_a_client_that_goes_away_ends_its_request_at_a_replica(keyed: ServedProcess) -> None:
    stream = asked(client(keyed.url, ANN), [user(60, 0)], 100_000, stream=True)
    next(iter(stream))
    assert admins(keyed, "/cache/state").json()["running"] == 1
    stream.close()
    until(lambda: admins(keyed, "/cache/state").json()["running"] == 0)


def test_when_a_replica_is_killed_nobody_hangs_and_the_others_go_on(keyed: ServedProcess) -> None:
    names = set(routed(keyed, "requests_total"))

    def ask(number: int) -> str:
        try:
            if number % 2:
                whole = asked(client(keyed.url, ANN), [user(number, 9)], 150)
                return str(whole.choices[0].finish_reason)
            *_, last = asked(client(keyed.url, ANN), [user(number, 9)], 150, stream=True)
            return str(last.choices[0].finish_reason)
        except openai.APIError as error:
            return error.message

    with ThreadPoolExecutor(9) as together:
        endings = [together.submit(ask, number) for number in range(9)]
        until(lambda: all(routed(keyed, "open_requests").values()) or any(each.done() for each in endings))
        children = psutil.Process(keyed.process.pid).children(recursive=True)
        os.kill(next(each.pid for each in children if each.name().startswith("ray::ServeRepli")), signal.SIGKILL)
        said = [each.result(GUARD_S) for each in endings]
    failed = [each for each in said if each not in ("length", "stop")]
    assert all(each.endswith("the replica that answered has ended; ask again.") for each in failed), failed
    assert len(failed) < len(said)
    assert asked(client(keyed.url, BOB), [user(70, 0)]).choices[0].finish_reason
    # Another one comes in its place, and of the dead one nothing is left.
    until(lambda: len(routed(keyed, "requests_total")) == REPLICAS)
    assert len(names & set(routed(keyed, "requests_total"))) == REPLICAS - 1
