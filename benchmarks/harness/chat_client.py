"""Chat client that records when the pieces of a reply arrive, and the usage that the server reports."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

#: Timeout, so that a benchmark never hangs.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Reply:
    """The result of one request.

    Attributes:
        gaps_s: seconds between each piece of the reply and the next.
    """

    ttft_s: float
    gaps_s: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def ask(
    url: str,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    on_piece: Callable[[], object] = lambda: None,
) -> Reply:
    """Send a chat request and read the stream to the end. `on_piece` is called at each piece."""
    body = {"messages": messages, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    if tools:
        body["tools"] = tools
    began_s = time.perf_counter()
    pieces_s: list[float] = []
    usage: dict[str, Any] = {}
    for line in _lines(url, json.dumps(body)):
        if line.startswith(b"data: {"):
            pieces_s.append(time.perf_counter())
            on_piece()
            usage = json.loads(line[6:]).get("usage") or usage
    assert pieces_s, "the reply has no pieces"
    gaps_s = [later_s - earlier_s for earlier_s, later_s in pairwise(pieces_s)]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(pieces_s[0] - began_s, gaps_s, usage["prompt_tokens"], cached, usage["completion_tokens"])


def _lines(url: str, body: str) -> Iterator[bytes]:
    """Yield the lines of a response as they arrive.

    mlx_lm.server queues five connections and resets some of the others. This client then retries, as usual clients do.
    """
    address = urlsplit(url)
    while True:
        with closing(
            http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
        ) as connection:
            try:
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
            except ConnectionResetError:
                continue
            yield from response
            return
