"""The same requests to mlx_lm.server and to radixcache serve, each a process: bodies equal field by field.

mlx_lm.server is asked one after the other; radixcache serve by several clients at once, so that it decodes together.
Nothing may differ but ids, times, cached tokens, keep-alive comments and what docs/serve-differences.md lists. A greedy
text may part where the two likeliest tokens are nearer than 1e-3. Quantized caches are compared with 8 bits alone.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest

from benchmarks.harness.server_process import mlx_lm_server, radixcache_serve
from runner.models.demo import demo_model_folder
from tests.serve.scripted_app import CHAT, TEXT
from tests.serve.talking_model import CALL, CALLED, END, THINK, THOUGHT, TOOL_F, saying, write_talking_model

#: Two servers start, each of which imports MLX and transformers.
pytestmark = pytest.mark.slow
DIFFERENCES = Path(__file__).parents[2] / "docs" / "serve-differences.md"
CLIENTS, GUARD_S = 8, 120
#: How far apart log-probabilities of the same token may be, and those of two tokens between which texts may part.
TIE, QUANTIZED_TIE = 1e-3, 0.05
#: What differs from one answer to the next.
FRESH = ("created", "cached_tokens", "timings", "reasoning_content")


class Request(NamedTuple):
    path: str
    body: dict[str, Any]


def chat(text: str = "Hello there", path: str = CHAT, **fields: Any) -> Request:
    return Request(path, {"messages": [{"role": "user", "content": text}], "max_tokens": 6, **fields})


def complete(text: str = "Once upon a time", **fields: Any) -> Request:
    return Request(TEXT, {"prompt": text, "max_tokens": 6, **fields})


SYSTEM = {"role": "system", "content": "You are brief. " * 6}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TURNS = [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
THINKING, CALLING = saying(THINK, "AB", THOUGHT, "C", END), saying("A", CALL, TOOL_F, CALLED, "B", END)

REQUESTS = [
    chat(),
    chat(stream=True),
    chat(stream=True, stream_options={"include_usage": True}),
    chat(max_completion_tokens=3),
    chat(path="/chat/completions", model="default_model"),
    chat(
        messages=[*TURNS, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    ),
    chat(messages=[*TURNS, {"role": "user", "content": "more"}, {"role": "assistant", "content": None}]),
    chat(tools=[FUNCTION], logprobs=True),
    chat(**CALLING),
    chat(**CALLING, stream=True),
    chat(**THINKING),
    chat(**THINKING, stream=True, stream_options={"include_usage": True}),
    chat(logprobs=True),
    chat(top_logprobs=3),
    chat(logit_bias={"70": 100, "71": 90}),
    chat(**{**saying("ABCDE"), "stop": "CD"}),
    chat(**saying("ABCDE"), stop=["x", "DE"], stream=True),
    chat(temperature=1, seed=5),
    chat(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=6, stream=True),
    chat(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=True),
    complete(),
    complete(stream=True),
    complete(logprobs=True, temperature=1, seed=7),
    complete(**{**saying("ABCDE"), "stop": ["C"]}),
    chat(max_tokens=0),
    chat(messages=None),
    complete(prompt=None),
    chat("x" * 300),
    chat("x" * 300, stream=True),
    chat("é ü 漢字 🙂"),
    chat(messages=[SYSTEM, {"role": "user", "content": "A"}]),
    chat(messages=[SYSTEM, {"role": "user", "content": "B"}], logprobs=True),
    chat(messages=[*TURNS, {"role": "user", "content": "And then?"}], max_tokens=12, logprobs=True),
    chat(
        messages=[*TURNS, {"role": "assistant", "content": "", "tool_calls": [USED]}, {"role": "tool", "content": "3"}]
    ),
    chat(messages=[{"role": "user", "content": "A"}, {"role": "user", "content": ""}]),
    chat(chat_template_kwargs={"enable_thinking": False}),
    chat(role_mapping={"user": "U: ", "assistant": "A: "}),
    chat(**saying(THINK, "AB")),
    chat(**saying(THINK, "AB"), stream=True),
    chat(**saying("A", CALL, TOOL_F)),
    chat(**saying("A", CALL, TOOL_F), stream=True),
    chat(**saying(THINK, "A", CALL, TOOL_F, CALLED, END)),
    chat(**saying(THINK, "A", CALL, TOOL_F, CALLED, END), stream=True),
    complete(**THINKING),
    complete(**THINKING, stream=True),
    chat(**THINKING, logprobs=True),
    chat(logprobs=True, top_logprobs=10, max_tokens=4),
    chat(top_logprobs=0, logprobs=True),
    chat(**CALLING, top_logprobs=1),
    chat(temperature=1, top_k=1),
    chat(temperature=1, top_p=1e-6),
    chat(temperature=1, min_p=1.0),
    chat(temperature=1, seed=5, stream=True),
    chat(temperature=1.5, seed=2**40, xtc_probability=1.0, xtc_threshold=0.001),
    # Of its own, as mlx_lm.server leaves out of penalties what a request with a seed finds in the cache.
    chat("Of its own", temperature=1, seed=0, repetition_penalty=1.2, repetition_context_size=3),
    chat(presence_penalty=2, presence_context_size=2, max_tokens=12, logprobs=True),
    chat(frequency_penalty=-1, frequency_context_size=50, max_tokens=12, logprobs=True),
    chat(stop=[], logit_bias={}, stream_options={"include_usage": False}, stream=True),
    chat(adapters="/no/such/folder"),
    chat(model="/no/such/folder"),
    chat(temperature=-1),
    chat(top_p=2),
    chat(logprobs=1),
]


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    kind, *options = request.param.split()
    folder = tmp_path_factory.mktemp("parity")
    model = demo_model_folder() if kind == "demo" else write_talking_model(folder / "model", kind)
    with (
        mlx_lm_server(model, folder / "stock.log", *options) as stock,
        radixcache_serve(model, folder / "ours.log", *options) as ours,
    ):
        yield stock.url, ours.url


def ask(url: str, request: Request) -> tuple[int, str]:
    answer = httpx.post(url + request.path, json=request.body, timeout=GUARD_S)
    return answer.status_code, answer.text


def comparable(answer: str, tie: float) -> list[Any]:
    """The bodies of an answer, less what differs from one to the next, and from one server to the other."""
    lines = [line for line in answer.split("\n\n") if line and not line.startswith(": keepalive ")]
    is_stream = len(lines) > 1

    def less_fresh(fields: dict[str, Any]) -> dict[str, Any]:
        fields.get("delta", {}).pop("role", None)  # in every chunk of the one, in the first of the other
        if "logprob" in fields:
            own = {"id": fields["id"], "logprob": pytest.approx(fields["logprob"], abs=tie)}
            # mlx_lm.server takes one of the likeliest for the sampled token, and does not sort them.
            tops = fields.get("top_logprobs")
            return {"top_logprobs": sorted(tops, key=lambda top: top["id"])} if tops else own
        # The id of a token is a number; any other is new each time.
        return {
            name: value
            for name, value in fields.items()
            if name not in FRESH and name != "id" and not (name == "logprobs" and is_stream)
        }

    bodies = [line.removeprefix("data: ") for line in lines]
    return [body if body == "[DONE]" else json.loads(body, object_hook=less_fresh) for body in bodies]


def has_a_tie(url: str, request: Request, tie: float) -> bool:
    """Whether mlx_lm.server itself chose between two tokens that are nearly as likely."""
    _, answer = ask(url, Request(request.path, {**request.body, "stream": False, "top_logprobs": 2}))
    logprobs = json.loads(answer)["choices"][0]["logprobs"]["content"]
    pairs = [[top["logprob"] for top in token["top_logprobs"]] for token in logprobs]
    return any(math.isclose(*pair, rel_tol=0, abs_tol=tie) for pair in pairs)


def require_parity(stock_url: str, our_url: str, requests: list[Request], tie: float = TIE) -> None:
    wanted = [ask(stock_url, request) for request in requests]
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(lambda request: ask(our_url, request), requests))
    parted = 0
    for request, (status, stock), (our_status, ours) in zip(requests, wanted, found, strict=True):
        if status >= 400:
            # Ours are in OpenAI's form, and what cannot be made of a prompt is a bad request.
            assert 400 <= our_status < 500, (request, status, our_status, ours)
            assert json.loads(ours)["error"]["message"], request
            continue
        assert our_status == status, (request, ours)
        if comparable(stock, tie) != comparable(ours, tie):
            assert "seed" not in request.body, (request, stock, ours)
            assert has_a_tie(stock_url, request, tie), (request, stock, ours)
            parted += 1
    assert parted <= len(requests) / 10


@pytest.mark.parametrize("servers", ["llama", "qwen3_next"], indirect=True)
def test_all_bodies_are_those_of_mlx_lm_server(servers):
    require_parity(*servers, REQUESTS)


@pytest.mark.parametrize("servers", ["demo"], indirect=True)
def test_bodies_are_those_of_mlx_lm_server_on_the_demo_model(servers):
    # In which order mlx-lm gives the likeliest few hangs on their last bits. RADIXCACHE_PARITY=1 sends all the others.
    requests = [each for each in REQUESTS if each.body.get("top_logprobs", 0) < 2]
    require_parity(*servers, requests[:: -int(os.environ.get("RADIXCACHE_PARITY", "6"))])


@pytest.mark.parametrize("servers", ["llama --kv-bits 8 --quantized-kv-start 0 --prompt-cache-size 0"], indirect=True)
def test_bodies_are_those_of_mlx_lm_server_with_a_quantized_cache(servers):
    # What is drawn, and which tokens are the likeliest few, hangs on every bit.
    coarse = [each for each in REQUESTS if not each.body.keys() & {"seed", "top_logprobs"}]
    require_parity(*servers, coarse, QUANTIZED_TIE)


def differences() -> list[tuple[dict[str, Any], int, int]]:
    """The fields of a request that each row of the docs' table has, and the status that each server answers."""
    rows = re.findall(
        r"^\| `(\{.*?\})` \| (\d+)\b[^|]*\| (\d+)\b", DIFFERENCES.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [(json.loads(fields), int(status), int(our_status)) for fields, status, our_status in rows]


@pytest.mark.parametrize("servers", ["llama"], indirect=True)
def test_what_is_said_to_differ_does(servers):
    rows = differences()
    assert len(rows) > 10
    for fields, *statuses in rows:
        request = complete(**fields) if "prompt" in fields else chat(**fields)
        assert [ask(url, request)[0] for url in servers] == statuses, request
