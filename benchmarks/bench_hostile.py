"""Measure what others wait beside a hostile request to radixcache serve, and what memory the request takes.

Each request goes to a server of a tiny model, in a process of its own. Beside it, another client reads the stream of a
reply and asks for `/health` all the time. Both clients have one address, as behind a proxy, which is the worst case.

    nothing           no request: what the others wait by themselves
    text              a message of 30 MB
    marks             a message of 16 MB that begins a control token at each character
    tools             200,000 tools
    field, message    28 MB of `[]` in a field that the server does not know, and in a message
    blocks            a message of Anthropic's API with 200,000 blocks
    count             30 MB whose tokens are to be counted
    warm              30 MB to be warmed
    most values       as many lists in a message as a body may have
    most tools        as many tools as a request may have
    prediction        a predicted reply of 30 MB
    references        a tool with an argument that refers to itself twenty times
    eight             eight of these requests at once

    MB                length of the body, of all bodies
    status            of the answer, of each kind of answer
    answer s          until the last answer
    health s max      the longest wait for `/health`, which is asked every 20 ms
    gap s max         from one piece of the other reply to the next
    peak MB           growth of the server's resident memory at the peak
    peak by body      the same, divided by the length of the bodies if that is 10 MB or more
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness.record import arguments, publish, say
from benchmarks.harness.server_process import radixcache_serve
from runner.models.tiny import tiny_tokenizer
from runner.serve.request import MAX_TOOLS
from runner.serve.service import CONTAINER_COST, MAX_COST

MB = 1_000_000
PING_S, SAMPLE_S, LEAST_S, PATIENCE_S = 0.02, 0.01, 1, 300
AT_ONCE, LEAST_BODY_BYTES = 8, 10 * MB
#: The aims: seconds that others wait, and peak memory by the length of the bodies.
MOST_WAIT_S, MOST_BY_BODY = 0.5, 8
CHAT, MESSAGES, COUNT, WARM = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/cache/warm"


def attacks(scale: float) -> dict[str, tuple[str, bytes]]:
    """The path and the body of each request. `scale`: 1 for the sizes above."""

    def chat(content: Any, **more: Any) -> bytes:
        message = {"role": "user", "content": content, **more.pop("message", {})}
        return json.dumps({"messages": [message], "max_tokens": 4, **more}).encode()

    def tools(count: int) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": f"t{index}"}} for index in range(count)]

    def lists(count: int) -> list[Any]:
        return [[]] * count

    itself = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 20}}}
    referring = {"type": "function", "function": {"name": "f", "parameters": itself}}
    long, many = "x" * int(30 * MB * scale), int(200_000 * scale)
    fewest = int(MAX_COST / (CONTAINER_COST + 1) * min(1, 10 * scale)) - 100
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * many
    anthropic = {"model": "tiny", "max_tokens": 4}
    return {
        "text": (CHAT, chat(long)),
        "marks": (CHAT, chat("<" * int(16 * MB * scale))),
        "tools": (CHAT, chat("Hi", tools=tools(many))),
        "field": (CHAT, chat("Hi", unknown=lists(int(7 * MB * scale)))),
        "message": (CHAT, chat("Hi", message={"unknown": lists(int(7 * MB * scale))})),
        "blocks": (MESSAGES, json.dumps({**anthropic, "messages": [{"role": "user", "content": blocks}]}).encode()),
        "count": (COUNT, json.dumps({"model": "tiny", "messages": [{"role": "user", "content": long}]}).encode()),
        "warm": (WARM, json.dumps({"messages": [{"role": "user", "content": long}]}).encode()),
        "most values": (CHAT, chat("Hi", message={"unknown": lists(fewest)})),
        "most tools": (CHAT, chat("Hi", tools=tools(int(MAX_TOOLS * min(1, 10 * scale))))),
        "prediction": (CHAT, chat("Hi", prediction={"type": "content", "content": long})),
        "references": (CHAT, chat("Hi", tools=[referring])),
    }


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    rows = measure(0.01, ("nothing", "tools")) if options.quick else measure(1)
    publish(
        "hostile",
        "Beside a hostile request",
        rows,
        folder=options.results,
        repeats=1,
        conclusion=conclusion(rows),
    )


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    wait_s = max(max(row["health s max"], row["gap s max"]) for row in rows)
    by_body = max(row["peak by body"] or 0 for row in rows)
    return (
        f"Others wait {wait_s:.2f} s at most, and memory grows by {by_body:.1f} times the body at most. "
        f"Aims: {MOST_WAIT_S} s and {MOST_BY_BODY} times."
    )


def measure(scale: float, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row for each of these requests, or for all."""
    asked = attacks(scale)
    sent = {"nothing": [], **{name: [each] for name, each in asked.items()}, "eight": [*asked.values()][:AT_ONCE]}
    found = []
    for name in names or sent:
        say(name)
        found.append(beside(name, sent[name]))
    return found


def beside(name: str, sent: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """Send requests at once to a new server, beside a stream and requests for its health. Return the row."""
    with (
        tempfile.TemporaryDirectory() as folder,
        radixcache_serve(Path("tiny"), Path(folder) / "log") as server,
        ThreadPoolExecutor(AT_ONCE + 2) as pool,
        _over() as is_over,
    ):
        _post(server.url, CHAT, json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode())
        has_begun = Event()
        others = [pool.submit(_stream, server.url, has_begun, is_over), pool.submit(_ping, server.url, is_over)]
        has_begun.wait(PATIENCE_S)
        before_bytes = peak_bytes = server.resident_bytes
        began_s = time.perf_counter()
        answers = [pool.submit(_post, server.url, *each) for each in sent]
        waiting: set[Future[int]] = set(answers)
        answer_s = 0.0
        while waiting or time.perf_counter() < began_s + LEAST_S:
            if waiting:
                waiting = wait(waiting, SAMPLE_S).not_done
                answer_s = time.perf_counter() - began_s
            else:
                time.sleep(SAMPLE_S)
            peak_bytes = max(peak_bytes, server.resident_bytes)
        is_over.set()
        gap_s, health_s = (each.result() for each in others)
        body_bytes = sum(len(body) for _, body in sent)
        statuses = sorted({answer.result() for answer in answers})
        return {
            "request": name,
            "MB": body_bytes / MB,
            "status": ", ".join(map(str, statuses)),
            "answer s": answer_s if sent else None,
            "health s max": health_s,
            "gap s max": gap_s,
            "peak MB": (peak_bytes - before_bytes) / MB,
            "peak by body": (peak_bytes - before_bytes) / body_bytes if body_bytes >= LEAST_BODY_BYTES else None,
        }


@contextmanager
def _over() -> Iterator[Event]:
    """An event that is set at the end of the block, so that the other client ends."""
    event = Event()
    try:
        yield event
    finally:
        event.set()


def _connection(url: str) -> http.client.HTTPConnection:
    address = urlsplit(url)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)


def _post(url: str, path: str, body: bytes) -> int:
    with closing(_connection(url)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


def _stream(url: str, has_begun: Event, is_over: Event) -> float:
    """Read streams until the end; return the longest time between two pieces of one."""
    letter = tiny_tokenizer().encode("a")[0]  # else the model may write what is held back, such as half a character
    asked = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 20_000, "logit_bias": {letter: 1000}}
    body = json.dumps({**asked, "stream": True})
    longest_s = 0.0
    while not is_over.is_set():
        with closing(_connection(url)) as connection:
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            last_s: float | None = None
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    now_s = time.perf_counter()
                    longest_s = max(longest_s, now_s - (now_s if last_s is None else last_s))
                    last_s = now_s
                    has_begun.set()
                if is_over.is_set():
                    break
    return longest_s


def _ping(url: str, is_over: Event) -> float:
    """Ask for the server's health until the end; return the longest wait."""
    longest_s = 0.0
    with closing(_connection(url)) as connection:
        while not is_over.wait(PING_S):
            began_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            longest_s = max(longest_s, time.perf_counter() - began_s)
    return longest_s


if __name__ == "__main__":
    main()
