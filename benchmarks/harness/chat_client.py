"""Chat client that records the TTFT of a reply and the usage that the server reports."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: Timeout, so that a benchmark never hangs.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Reply:
    """The result of one request."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def ask(url: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Reply:
    """Send a chat request and read the stream to the end."""
    body = {"messages": messages, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    began_s = time.perf_counter()
    first_s: float | None = None
    usage: dict[str, Any] = {}
    for line in _lines(url, json.dumps(body)):
        if line.startswith(b"data: {"):
            if first_s is None:
                first_s = time.perf_counter()
            usage = json.loads(line[6:]).get("usage") or usage
    assert first_s is not None, "the reply has no pieces"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(first_s - began_s, usage["prompt_tokens"], cached, usage["completion_tokens"])


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
