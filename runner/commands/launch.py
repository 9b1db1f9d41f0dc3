"""`radixcache launch`: start a coding agent with the settings of a running server.

The agent gets environment variables and flags. Its own configuration is neither read nor written. The agent takes the
place of this process, so the terminal, the signals and the exit code are the agent's. docs/clients.md has the same
settings as recipes.
"""

import http.client
import json
import os
import shlex
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, NoReturn

import typer
from typer import Argument, Option

from runner.commands.outputs import EXIT_CHECK_FAILED, require, say
from runner.serve.options import ServeOptions
from runner.serve.volatile import PREFIX

NO_KEY, HIDDEN_KEY = "none", "***"
KEY_VARIABLE = "RADIXCACHE_API_KEY"
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Server:
    """A running server, as an agent has to know it. `context_tokens`: of the model; None: no bound, or not known."""

    url: str
    key: str
    model: str
    context_tokens: int | None


#: Environment variables and flags of a client.
ClientSettings = tuple[dict[str, str], list[str]]


def _claude_code(server: Server) -> ClientSettings:
    kinds = ("ANTHROPIC_DEFAULT_OPUS", "ANTHROPIC_DEFAULT_SONNET", "ANTHROPIC_DEFAULT_HAIKU", "CLAUDE_CODE_SUBAGENT")
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        # With a token, Claude Code does not ask whether to use the key.
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": server.model,
        **{f"{kind}_MODEL": server.model for kind in kinds},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Without it, Claude Code takes a model that it does not know for one of 1,000,000 tokens.
        **({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context_tokens)} if server.context_tokens else {}),
    }
    return environment, ["--exclude-dynamic-system-prompt-sections"]


def _codex(server: Server) -> ClientSettings:
    provider = {"name": "radixcache", "base_url": f"{server.url}/v1", "wire_api": "responses", "env_key": KEY_VARIABLE}
    table = ",".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    values = {
        "model_providers.radixcache": f"{{{table}}}",
        "model_provider": '"radixcache"',
        "model": json.dumps(server.model),
        # Codex compacts a session before the context is full.
        **({"model_context_window": server.context_tokens} if server.context_tokens else {}),
    }
    flags = [part for name, value in values.items() for part in ("-c", f"{name}={value}")]
    return {KEY_VARIABLE: server.key}, flags


def _opencode(server: Server) -> ClientSettings:
    # opencode keeps room for a reply of `output` tokens.
    limit = {"context": server.context_tokens, "output": server.context_tokens // 4} if server.context_tokens else None
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"limit": limit} if limit else {}},
    }
    model = f"radixcache/{server.model}"
    config = {"provider": {"radixcache": provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


def _qwen_code(server: Server) -> ClientSettings:
    flags = ["--auth-type", "openai", "--openai-base-url", f"{server.url}/v1", "-m", server.model]
    return {"OPENAI_API_KEY": server.key}, flags


class Client(NamedTuple):
    program: str
    package: str  # of npm
    settings: Callable[[Server], ClientSettings]


CLIENTS = {
    "claude-code": Client("claude", "@anthropic-ai/claude-code", _claude_code),
    "codex": Client("codex", "@openai/codex", _codex),
    "opencode": Client("opencode", "opencode-ai", _opencode),
    "qwen-code": Client("qwen", "@qwen-code/qwen-code", _qwen_code),
}


def launch(
    client: Annotated[str, Argument(help=f"One of {', '.join(CLIENTS)}.", metavar="CLIENT")],
    arguments: Annotated[list[str] | None, Argument(help="Arguments of the client, after --.", metavar="ARGS")] = None,
    url: Annotated[str, Option(help="Address of the server.")] = f"http://{ServeOptions.host}:{ServeOptions.port}",
    api_key: Annotated[
        str, Option(help="Key of the server, if it has keys.", envvar=KEY_VARIABLE, show_default=False)
    ] = NO_KEY,
    model: Annotated[
        str | None, Option(help="Model that the client names.  [default: the first one of GET /v1/models]")
    ] = None,
    move_volatile: Annotated[
        bool,
        Option(
            "--move-volatile/--keep-volatile",
            help="Have the server move the folder and the date in the client's system prompt behind the tools.",
        ),
    ] = True,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be run, and run nothing.")] = False,
) -> None:
    """Start a coding agent that uses a running server.

    Sets the address, a key, the model, the length of its context, and the flags that keep the prompt's prefix. The
    client's own configuration stays as it is. Write the client's arguments behind --.
    """
    require(client in CLIENTS, f"client {client!r} is not known; wanted one of {', '.join(CLIENTS)}.")
    require(url.startswith(("http://", "https://")), f"--url is {url!r}; wanted http://HOST:PORT.")
    program, package, settings = CLIENTS[client]
    path = shutil.which(program)
    if path is None:
        _fail(f"{client} is not installed: {program} is not on the PATH. Run npm install -g {package}")
    url = url.rstrip("/").removesuffix("/v1")
    address = url + PREFIX if move_volatile else url
    server = Server(address, api_key, *_model(_models(url, api_key), model))
    environment, flags = settings(server if api_key == NO_KEY else replace(server, key=HIDDEN_KEY))
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    line = " ".join([*assignments, shlex.join([program, *flags, *(arguments or [])])])
    print(line, file=sys.stdout if dry_run else sys.stderr, flush=True)
    if not dry_run:
        environment, flags = settings(server)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the client would ignore it too
        try:
            os.execve(path, [program, *flags, *(arguments or [])], {**os.environ, **environment})
        except OSError as error:
            _fail(f"{path} cannot be run ({error.strerror}).")


def _models(url: str, key: str) -> dict[str, int | None]:
    """The names that the server lists, and the context of each in tokens. The served model comes first."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return {str(each["id"]): each.get("max_model_len") for each in json.load(answer)["data"]}
    except urllib.error.HTTPError as error:
        advice = "Give its key with --api-key." if error.code == 401 else "Is it the address of radixcache serve?"
        _fail(f"{url}/v1/models answers {error.code} {error.reason}; wanted a list of models. {advice}")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        said = getattr(reason, "strerror", None) or reason
        _fail(f"no server answers at {url} ({said}). Start one: radixcache serve --model NAME")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _fail(f"{url}/v1/models is no list of models ({type(error).__name__}). Is it the address of radixcache serve?")


def _model(listed: Mapping[str, int | None], wanted: str | None) -> tuple[str, int | None]:
    """The name of the model that the client is to use, and its context in tokens."""
    first = next(iter(listed), None)
    name = wanted or first
    if name is None:
        _fail("the server lists no model; name one with --model.")
    # A name that is not listed means the served model.
    return name, listed.get(name, listed.get(first or ""))


def _fail(message: str) -> NoReturn:
    say(f"error: {message}")
    raise typer.Exit(EXIT_CHECK_FAILED)
