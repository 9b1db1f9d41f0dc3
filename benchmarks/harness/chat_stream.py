"""Send one streamed chat request to any server of OpenAI's API; record TTFT, text and usage."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 180.0


@dataclass(frozen=True)
class Answer:
    """The result of one request.

    Attributes:
        ttft_s: seconds to the first piece of text; the total if there was none.
        decode_s: seconds from the first piece of text to the end of the reply: some servers keep its last words back.
        text: content and reasoning together.
        prompt_tokens, cached_tokens, completion_tokens: as the server reports them; None: not reported.
        error: one line if the request failed.
    """

    ttft_s: float = 0.0
    total_s: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    decode_s: float = 0.0


def ask_stream(url: str, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Answer:
    """Send a chat request at temperature 0 and read its stream to the end. A failure is an Answer with an error."""
    body = {
        **{"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0, "stream": True},
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    address = urlsplit(url)
    began_s = time.perf_counter()
    while True:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
        with closing(connection):
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                response = connection.getresponse()
                if response.status != 200:
                    return Answer(error=f"HTTP {response.status}: {response.read(200).decode(errors='replace')}")
                return read_stream(response, began_s)
            except ConnectionResetError:
                # The server's connection queue is full. Retry, as clients do.
                if time.perf_counter() - began_s > PATIENCE_S:
                    return Answer(error="the server resets the connection")
                time.sleep(0.01)
            except (OSError, http.client.HTTPException) as error:
                return Answer(error=f"{type(error).__name__}: the connection broke or timed out")


def read_stream(lines: Iterable[bytes], began_s: float) -> Answer:
    """Read the server-sent events of a reply as they arrive."""
    first_s: float | None = None
    last_s = 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    for line in lines:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            return Answer(error=str(event["error"])[:160])
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            said = "".join(delta.get(name) or "" for name in ("reasoning_content", "content"))
            said = said or delta.get("reasoning") or ""
            if said or choice.get("finish_reason"):
                last_s = time.perf_counter()
            if said:
                first_s = first_s or last_s
                parts.append(said)
    now_s = time.perf_counter()
    return Answer(
        (first_s or now_s) - began_s,
        now_s - began_s,
        "".join(parts),
        usage.get("prompt_tokens", usage.get("input_tokens")),
        cached_tokens(usage),
        usage.get("completion_tokens", usage.get("output_tokens")),
        decode_s=last_s - first_s if first_s else 0.0,
    )


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """Return the cached prompt tokens of a usage, in any known field; None: not reported."""
    for holder, name in (
        (usage.get("prompt_tokens_details"), "cached_tokens"),
        (usage.get("input_tokens_details"), "cached_tokens"),
        (usage, "cached_tokens"),
        (usage, "prompt_cache_hit_tokens"),
    ):
        if isinstance(holder, Mapping) and isinstance(value := holder.get(name), int):
            return value
    return None
