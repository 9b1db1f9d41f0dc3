"""`radixcache serve` as a process: what it refuses at start in one line, and how it ends."""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx2
import mlx_lm.server
import pytest

from runner.commands.serve import _welcome, serve
from runner.serve.options import ServeOptions
from tests.commands.conftest import command  # noqa: F401
from tests.serve.serving import GUARD_S, ROOT, serving

Command = Callable[..., tuple[int, str, str]]


PASSWORD, TWO = "geheim-und-lang", ["--replicas", "2", "--model", "tiny"]


def chat(**more: Any) -> dict[str, Any]:
    """A request for a reply that goes on for minutes: the end of a reply is token 1."""
    messages = [{"role": "user", "content": "Tell me everything."}]
    return {"messages": messages, "max_tokens": 1_000_000, "logit_bias": {"1": -100}, "stream": True, **more}


def events(reply: httpx2.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8080: "),
        (["--temp", "nan"], "--temp"),
        (["--request-timeout-s", "inf"], "--request-timeout-s is inf; wanted a finite number."),
        (["--kv-bits", "7"], "--kv-bits is 7; wanted one of 2, 3, 4, 5, 6, 8."),
        (["--kv-group-size", "65"], "--kv-group-size is 65; wanted one of 32, 64, 128."),
        (["--policy", "best"], "--policy: policy 'best' is not known."),
        (["--log-level", "loud"], "--log-level is 'loud'; wanted one of DEBUG, "),
        (["--namespace-by", "ip"], "--namespace-by is 'ip'; wanted key or none."),
        (["--namespace-by", "key"], "--namespace-by key needs --api-keys."),
        (["--adapter-path", "x"], "--adapter-path needs --model."),
        (["--chat-template-args", "[]"], "--chat-template-args is []; wanted a JSON object."),
        (["--prompt-cache-bytes", "5XB"], "--prompt-cache-bytes is '5XB'; wanted a number of bytes, or"),
        (["--max-request-bytes", "5XB"], "--max-request-bytes is '5XB'; wanted a number of bytes, or"),
        (["--max-request-bytes", "0"], "--max-request-bytes is 0 bytes; wanted more than 0."),
        (["--prompt-cache-bytes", "8GB", "--budget-gib", "8"], "are the same budget. Leave one out."),
        (["--pipeline"], "--pipeline splits a model over machines"),
        (["--model", "tiny", "--context", "64", "--kv-bits", "8"], "--context does not work with --kv-bits"),
        (["--model", "tiny", "--warm", "/nowhere/warm"], "/nowhere/warm"),
        (["--model", "tiny", "--api-keys", "/nowhere/keys"], "/nowhere/keys cannot be read: No such file"),
        (["--model", "tiny", "--trace", "/nowhere/trace"], "/nowhere/trace"),
        (["--model", "tiny", "--disk", str(ROOT / "docs")], "and is no store"),
        (["--model", "tiny", "--redis", f"me:{PASSWORD}@host"], "wanted redis://, rediss:// or unix://"),
        (["--router", "hash", "--model", "tiny"], "--router needs --replicas."),
        (["--ray", "auto", "--model", "tiny"], "--ray needs --replicas."),
        (["--replicas", "2"], "--replicas needs --model"),
        ([*TWO, "--trace", "/tmp/t"], "--trace records one cache"),
        ([*TWO, "--router", "best"], "router 'best' is not known. Known: random, "),
        (["--replicas", "2", "--model", "/nowhere/model"], "/nowhere/model"),
        ([*TWO, "--warm", "/nowhere/warm"], "/nowhere/warm"),
        ([*TWO, "--api-keys", "/nowhere/keys"], "/nowhere/keys cannot be read"),
        ([*TWO, "--ray", "ray://127.0.0.1:1"], "no cluster answers (Ray's client cannot stream"),
        ([*TWO, "--ray", "nonsense:x"], "--ray nonsense:x: no cluster answers ("),
    ],
)
def test_a_mistake_is_one_line(command: Command, arguments: list[str], found: str) -> None:  # noqa: F811
    if "--replicas" in arguments:
        pytest.importorskip("ray.serve", reason="Ray has no build for this Python")
    port = [] if {"--port", "--host"} & set(arguments) else ["--port", "0"]
    code, output, errors = command("serve", *port, *arguments)
    *notes, last = errors.splitlines()
    assert (code, output) == (2, "")
    assert last.startswith("error: ")
    assert found in last
    assert PASSWORD not in errors + repr(ServeOptions(redis=PASSWORD))
    assert all(note.startswith("note: ") for note in notes)


def test_a_port_in_use_is_one_line_and_exit_code_2(command: Command) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, errors = command("serve", "--model", "tiny", "--port", port)
    assert code == 2
    assert errors.splitlines()[-1].startswith(f"error: --host 127.0.0.1 --port {port}: Address already in use")


@pytest.mark.slow
def test_replicas_without_their_extra_say_how_to_install_it() -> None:
    arguments = ["serve", "--model", "tiny", "--port", "0", "--replicas", "2"]
    code = f"import sys; sys.modules['ray'] = None; from runner.cli import main; main({arguments})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: --replicas needs Ray Serve: pip install 'radixcache[ray]' (")


def test_every_option_of_mlx_lm_server_is_one_of_the_command_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    def parse(parser: argparse.ArgumentParser) -> None:
        raise ParsedError({action.dest: action.default for action in parser._actions if action.dest != "help"})

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(ParsedError) as parsed:
        mlx_lm.server.main()
    theirs: dict[str, Any] = parsed.value.args[0]
    ours = {name: each.default for name, each in inspect.signature(serve).parameters.items()}
    assert theirs.keys() <= ours.keys()
    # Two have no effect; the last cannot be honoured, as what is shared is quantized from the start.
    assert {name for name in theirs if ours[name] != theirs[name]} == {
        "max_tokens",
        "prompt_cache_size",
        "prompt_concurrency",
        "quantized_kv_start",
    }


def test_without_a_model_the_first_lines_say_how_to_name_one_and_offer_the_demo_model() -> None:
    url = "http://127.0.0.1:8080"
    first, second = _welcome(ServeOptions(), url).split("\n")
    assert first == f"serving at {url}"
    assert '"model"' in second
    assert "--model OWNER/NAME" in second
    assert "--model demo" in second
    assert "--model" not in _welcome(ServeOptions(model="tiny"), url)


def test_a_signal_ends_running_replies_well_formed_and_the_process_with_exit_code_0() -> None:
    message = {key: value for key, value in chat(model="claude-any").items() if key != "logit_bias"}
    long = {key: value for key, value in chat().items() if key not in ("messages", "max_tokens")}
    with ExitStack() as stack:
        served = stack.enter_context(serving("--drain-s", 0, "--prompt-cache-size", 3, "--prompt-concurrency", 4))
        client = stack.enter_context(httpx2.Client(base_url=served.url, timeout=GUARD_S))
        streams = [
            stack.enter_context(client.stream("POST", path, json=body))
            for path, body in [
                ("/v1/chat/completions", chat()),
                ("/v1/chat/completions", chat(stream_options={"include_usage": True})),
                ("/v1/messages", message),
                ("/v1/completions", {"prompt": "?", **long}),
                ("/v1/responses", {"input": "?", **long}),
            ]
        ]
        assert [stream.status_code for stream in streams] == [200] * 5
        served.process.send_signal(signal.SIGTERM)
        plain, usage, messages, text, response = map(events, streams)
        assert served.wait() == 0
        assert "note: --prompt-cache-size has no effect" in served.log
        assert "note: --prompt-concurrency has no effect" in served.log
        assert "Traceback" not in served.log
    assert (plain[-1], usage[-1], text[-1]) == ("[DONE]",) * 3
    assert json.loads(text[-2])["choices"][0]["finish_reason"] == "length"
    assert json.loads(response[-1])["type"] == "response.incomplete"
    assert json.loads(plain[-2])["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage[-2])["usage"]["completion_tokens"] >= 0
    assert [json.loads(event)["type"] for event in messages[-2:]] == ["message_delta", "message_stop"]


@pytest.mark.slow
def test_after_one_signal_requests_are_refused_and_a_second_ends_the_process_at_once() -> None:
    with serving("--drain-s", 10_000) as served, httpx2.Client(base_url=served.url, timeout=GUARD_S) as client:
        with client.stream("POST", "/v1/chat/completions", json=chat()) as reply:
            assert client.get("/health").status_code == 200
            served.process.send_signal(signal.SIGINT)
            while client.get("/health").status_code != 503:
                pass  # the first signal is not heard yet; the connection is one from before, as there are no new ones
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, set(refused.json())) == (503, {"error"})
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.RemoteProtocolError):
                events(reply)
        assert served.wait() == -signal.SIGTERM


def test_the_first_request_waits_for_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving() as served:
        ready = len(served.log)
        url = f"{served.url}/v1/chat/completions"
        assert httpx2.post(url, json=chat(max_tokens=2), timeout=GUARD_S).status_code == 200
        lines = [line for line in served.log[ready:].splitlines() if line.startswith("import time:")]
    # A few lines of the standard library may still come.
    assert {line.rpartition("|")[2].strip() for line in lines} <= {"encodings.unicode_escape"}
