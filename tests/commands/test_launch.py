"""`radixcache launch`: what each client is started with, that it takes this process's place, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.commands import launch
from runner.serve.app import guard
from runner.serve.http_server import HttpServer, listen
from runner.serve.options import ServeOptions
from tests.serve.scripted import ScriptedRuns
from tests.serve.scripted_app import scripted_app

Command = Callable[..., tuple[int, str, str]]

GUARD_S = 60
MODEL, CONTEXT_TOKENS = "my/model", 5000
KEY = "a-secret-of-the-server"


@contextmanager
def serving(**options: Any) -> Iterator[str]:
    """The routes of a server without a model; its address."""
    chosen = ServeOptions(model="tiny", **options)
    app = guard(scripted_app(ScriptedRuns(), chosen), chosen, lambda *_: None)
    listening = listen("127.0.0.1", 0)
    server = HttpServer(app, lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield "http://{}:{}".format(*listening.getsockname())
    finally:
        server.should_exit = True
        thread.join(GUARD_S)
        listening.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(served_model_names=(MODEL,), context=CONTEXT_TOKENS) as address:
        yield address


def put_on_path(folder: Path, program: str, script: str) -> None:
    path = folder / program
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, with every client: a script that prints its arguments and its environment."""
    for client in launch.CLIENTS.values():
        put_on_path(
            tmp_path, client.program, "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
        )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(launch.KEY_VARIABLE, raising=False)
    return tmp_path


def started(client: str, url: str, *arguments: object) -> tuple[list[str], dict[str, str], str]:
    """The arguments and the environment that a client got, and what launch said of them."""
    command = [sys.executable, "-m", "radixcache", "launch", client, "--url", url, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    argv, environment = json.loads(done.stdout)
    return argv, {name: value for name, value in environment.items() if os.environ.get(name) != value}, done.stderr


def test_a_client_gets_the_address_the_key_the_model_and_its_own_arguments(path: Path, url: str) -> None:
    argv, environment, said = started("claude-code", url, "--", "-p", "What is  here?", "--model=x")
    assert argv == ["--exclude-dynamic-system-prompt-sections", "-p", "What is  here?", "--model=x"]
    assert environment["ANTHROPIC_BASE_URL"] == f"{url}/move-volatile"
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert {environment[f"ANTHROPIC_{kind}MODEL"] for kind in ("", "DEFAULT_HAIKU_", "DEFAULT_OPUS_")} == {MODEL}
    assert said.startswith(f"ANTHROPIC_BASE_URL={url}/move-volatile ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_API_KEY='' ")
    assert said.endswith(" claude --exclude-dynamic-system-prompt-sections -p 'What is  here?' --model=x\n")


def dry(command: Command, client: str, url: str, *more: object) -> tuple[dict[str, str], list[str]]:
    """The environment and the command that a dry run prints."""
    code, out, err = command("launch", client, "--url", url, "--dry-run", *more)
    assert (code, err) == (0, "")
    words = shlex.split(out)
    names = [word for word in words if word.split("=")[0].isupper()]
    assert words[: len(names)] == names, "assignments come first, as a shell wants them"
    return dict(word.split("=", 1) for word in names), words[len(names) :]


def test_codex_gets_the_context_of_the_model_as_values_that_are_toml(command: Command, path: Path, url: str) -> None:
    environment, words = dry(command, "codex", f"{url}/v1/", "--", "exec", "resume", "--last")
    assert environment == {"RADIXCACHE_API_KEY": "none"}
    assert (words[0], words[-3:]) == ("codex", ["exec", "resume", "--last"])
    assert words[1:-3:2] == ["-c"] * 4
    provider = {
        "name": "radixcache",
        "base_url": f"{url}/move-volatile/v1",
        "wire_api": "responses",
        "env_key": "RADIXCACHE_API_KEY",
    }
    assert tomllib.loads("\n".join(words[2:-3:2])) == {
        "model_providers": {"radixcache": provider},
        "model_provider": "radixcache",
        "model": MODEL,
        "model_context_window": CONTEXT_TOKENS,
    }


def test_opencode_gets_its_configuration_inline(command: Command, path: Path, url: str) -> None:
    environment, words = dry(command, "opencode", url, "--model", "other", "--", "run", "Hi")
    assert (list(environment), words) == (["OPENCODE_CONFIG_CONTENT"], ["opencode", "run", "Hi"])
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["radixcache"]
    assert config["model"] == config["small_model"] == "radixcache/other"
    assert provider["options"] == {"baseURL": f"{url}/move-volatile/v1", "apiKey": "none"}
    # A name that is not listed means the served model.
    assert provider["models"] == {"other": {"limit": {"context": CONTEXT_TOKENS, "output": CONTEXT_TOKENS // 4}}}


def test_qwen_code_gets_flags_and_its_key_in_the_environment(command: Command, path: Path, url: str) -> None:
    environment, words = dry(command, "qwen-code", url, "--keep-volatile")
    assert environment == {"OPENAI_API_KEY": "none"}
    assert words == ["qwen", "--auth-type", "openai", "--openai-base-url", f"{url}/v1", "-m", MODEL]


@pytest.mark.parametrize("client", launch.CLIENTS)
def test_a_key_reaches_the_client_and_is_not_shown(
    command: Command, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: runs.append(given))
    (tmp_path / "keys").write_text(f"ann {KEY}\n")
    with serving(api_keys=tmp_path / "keys") as url:
        code, out, err = command("launch", client, "--url", url)
        assert (code, out) == (1, "")
        assert err.endswith("wanted a list of models. Give its key with --api-key.\n")
        monkeypatch.setenv(launch.KEY_VARIABLE, KEY)
        assert command("launch", client, "--url", url)[0] == 0
        code, out, err = command("launch", client, "--url", url, "--api-key", KEY)
    assert (code, out) == (0, "")
    assert KEY not in err
    assert "***" in err
    (program, argv, environment), again = runs
    assert (Path(program), argv) == (path / launch.CLIENTS[client].program, again[1])
    assert KEY not in "".join(argv), "other users see arguments"
    assert any(KEY in value for value in environment.values())


def test_signals_and_the_exit_code_are_the_clients(path: Path, url: str) -> None:
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    put_on_path(path, "codex", script)
    command = [sys.executable, "-m", "radixcache", "launch", "codex", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 7


def test_a_client_that_cannot_be_run_is_one_line(command: Command, path: Path, url: str) -> None:
    (path / "codex").write_text("no program")
    code, out, err = command("launch", "codex", "--url", url)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"error: {path / 'codex'} cannot be run (Exec format error)."


def test_a_mistake_is_one_line(command: Command, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with serving(only_model=True) as url:
        mistakes = [
            (2, ["cursor"], "client 'cursor' is not known; wanted one of claude-code, codex, opencode, qwen-code."),
            (2, ["codex", "--url", "localhost:8080"], "--url is 'localhost:8080'; wanted http://HOST:PORT."),
            (1, ["codex", "--url", nowhere], f"no server answers at {nowhere} (Connection refused). Start"),
            (
                1,
                ["codex", "--url", f"{url}/x"],
                f"{url}/x/v1/models answers 404 Not Found; wanted a list of models. Is",
            ),
        ]
        for code, arguments, found in mistakes:
            found_code, out, err = command("launch", *arguments)
            assert (found_code, out, len(err.splitlines())) == (code, "", 1)
            assert err.startswith(f"error: {found}")
        monkeypatch.setenv("PATH", "/nowhere")
        code, _, err = command("launch", "qwen-code", "--url", url)
    wanted = "qwen-code is not installed: qwen is not on the PATH. Run npm install -g @qwen-code/qwen-code"
    assert (code, err) == (1, f"error: {wanted}\n")
