"""Send one streamed chat request to any server of OpenAI's API; record when its pieces come, its text and usage."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

#: Timeout, so that a benchmark never hangs.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Answer:
    """The result of one request.

    Attributes:
        ttft_s: seconds to the first piece of text; the total if there was none.
        decode_s: seconds from the first piece of text to the end of the reply: some servers keep its last words back.
        pieces_s: seconds to each piece of the stream, with text or without.
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
    pieces_s: Sequence[float] = ()

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each piece of the stream and the next."""
        return [later_s - earlier_s for earlier_s, later_s in pairwise(self.pieces_s)]


def ask_stream(
    url: str,
    model: str | None,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    on_piece: Callable[[], object] = lambda: None,
) -> Answer:
    """Send a chat request at temperature 0 and read its stream to the end. A failure is an Answer with an error.

    `model` None: the served one. `on_piece` is called at each piece.
    """
    body = {
        **({} if model is None else {"model": model}),
        **{"messages": messages, "max_tokens": max_tokens, "temperature": 0.0, "stream": True},
        "stream_options": {"include_usage": True},
        **({"tools": tools} if tools else {}),
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
                return read_stream(response, began_s, on_piece)
            except ConnectionResetError:
                # mlx_lm.server queues five connections and resets some of the others. Retry, as clients do.
                if time.perf_counter() - began_s > PATIENCE_S:
                    return Answer(error="the server resets the connection")
                time.sleep(0.01)
            except (OSError, http.client.HTTPException) as error:
                return Answer(error=f"{type(error).__name__}: the connection broke or timed out")


def read_stream(lines: Iterable[bytes], began_s: float, on_piece: Callable[[], object] = lambda: None) -> Answer:
    """Read the server-sent events of a reply as they arrive."""
    first_s: float | None = None
    last_s = 0.0
    pieces_s: list[float] = []
    parts: list[str] = []
    usage: dict[str, Any] = {}
    for line in lines:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        pieces_s.append(time.perf_counter() - began_s)
        on_piece()
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
        pieces_s=pieces_s,
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
