"""Real clients and coding agents against the real server: three questions, each answered with a tool call first.

The clients are installed once, pinned, into the user's cache folder. They and the server run in a network of their own
without a way out. Where the system does not allow that, proxies point them to a closed port. The model says what a
question asks for (tests/serve/parrot.py), so the tools are called for real.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runner.models.demo import FetchError, cache_home, demo_model_folder

ROOT = Path(__file__).resolve().parents[2]
SESSIONS, MCP_SERVER = (Path(__file__).with_name(name) for name in ("client_sessions.py", "mcp_server.py"))
PIP = (
    "anthropic==2.13.0", "langchain-openai==1.7.4", "litellm==1.110.2", "ollama==0.6.3", "openai==3.57.0",
    "openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0",
)  # fmt: skip
NPM = ("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.169.0", "opencode-ai@1.18.33")
TEMPLATES = ("chatml", "hermes", "qwen3", "strict")
PORT, GUARD_S = 8801, 120
#: A command in a network of its own, with nothing but loopback.
ALONE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
#: Tokens behind which a prompt may stop being what the next prompt begins with: the opening of a reply.
OPENING = 16
WORDS = ("marmalade", "quicksand", "tambourine")
OFFLINE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}  # fmt: skip

pytestmark = pytest.mark.nightly


@contextmanager
def installed(name: str, wanted: Sequence[str], install: Callable[[Path], object]) -> Iterator[Path]:
    """The folder of installed clients, made by whoever comes first. Skips the test if that fails."""
    folder = cache_home() / "clients" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / ".installed"
        if not mark.exists() or mark.read_text() != "\n".join(wanted):
            try:
                install(folder)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"cannot be installed: {' '.join(wanted)}: {error}")
            mark.write_text("\n".join(wanted))
    yield folder


def _pip_install(folder: Path) -> None:
    venv.create(folder, clear=False, with_pip=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *PIP]
    subprocess.run(command, check=True, capture_output=True, timeout=GUARD_S * 2)


def _npm_install(folder: Path) -> None:
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *NPM]
    subprocess.run(command, check=True, capture_output=True, timeout=GUARD_S * 2)


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with installed("python", PIP, _pip_install) as folder:
        yield folder / "bin"


@pytest.fixture(scope="module")
def binaries() -> Iterator[Path]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not here")
    with installed("node", NPM, _npm_install) as folder:
        yield folder / "node_modules" / ".bin"


@dataclass
class Network:
    """The servers of all templates, and commands beside them. `is_closed`: nothing else can be reached from there."""

    servers: subprocess.Popen[bytes]
    output: Path
    is_closed: bool

    def run(self, command: Sequence[object], **options: Any) -> str:
        """Run a command; return what it prints."""
        enter = ["nsenter", "-t", self.servers.pid, "-U", "-n", "--preserve-credentials"] if self.is_closed else []
        done = subprocess.run(
            [*map(str, enter), *map(str, command)],
            capture_output=True, text=True, timeout=GUARD_S, stdin=subprocess.DEVNULL, **options,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.output.read_text()[-4000:]}"
        return str(done.stdout)

    def look(self, url: str, *, clear: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
        """The last requests of a server, oldest first, and the counts of those that it did not answer with success."""
        code = (
            "import sys, urllib.request as asked\n"
            "for each in sys.argv[1:]:\n"
            "    method, url = each.split()\n"
            "    print(asked.urlopen(asked.Request(url, method=method)).read().decode(), end='\\0')\n"
        )
        asked = [f"GET {url}/cache/state?tree=false", f"GET {url}/metrics", *([f"DELETE {url}/cache"] if clear else [])]
        state, metrics, *_ = self.run([sys.executable, "-S", "-c", code, *asked]).split("\0")
        counts = [line for line in metrics.splitlines() if "http_requests_total{" in line]
        return json.loads(state)["requests"][::-1], [line for line in counts if 'status="2' not in line]


def _can_be_closed() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, timeout=GUARD_S).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    try:
        demo_model_folder()
    except FetchError as error:
        pytest.skip(str(error))
    folder, is_closed = tmp_path_factory.mktemp("parrots"), _can_be_closed()
    command = [*(ALONE if is_closed else ()), sys.executable, "-m", "tests.serve.parrot", str(folder), str(PORT)]
    environment = {**os.environ, **OFFLINE, "OPENBLAS_NUM_THREADS": "1"}
    output = folder / "output"
    with output.open("wb") as file:
        servers = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            until_s = time.monotonic() + GUARD_S
            while output.read_text().count("serving ") < len(TEMPLATES):
                assert servers.poll() is None, output.read_text()
                assert time.monotonic() < until_s, output.read_text()
                time.sleep(0.1)
            yield Network(servers, output, is_closed)
        finally:
            os.killpg(servers.pid, signal.SIGKILL)
            servers.wait()


@dataclass(frozen=True)
class Turn:
    """What a client is asked to do."""

    network: Network
    url: str
    folder: Path  # of its files, with its home in `home`
    program: Path

    def start(self, *arguments: object, **environment: str) -> str:
        return self._run([self.program, *arguments], PATH=os.environ["PATH"], **environment)

    def launch(self, client: str, *arguments: object) -> str:
        """Start a client by `radixcache launch`, which finds it on the path."""
        command = [sys.executable, "-m", "radixcache", "launch", client, "--url", self.url, "--", *arguments]
        path = os.pathsep.join((str(self.program.parent), os.environ["PATH"]))
        return self._run(command, PATH=path, PYTHONPATH=str(ROOT), OPENBLAS_NUM_THREADS="1")

    def _run(self, command: Sequence[object], **environment: str) -> str:
        about = {"HOME": str(self.folder / "home"), **OFFLINE, **QUIET, **environment}
        return self.network.run(command, cwd=self.folder, env=about)


def agent(
    command: Sequence[str], again: Sequence[str], more: Sequence[str], tool: str, *, launched: str = "", **values: str
) -> Callable[[Turn], None]:
    """A coding agent that is asked for each of three files; the last line that it prints is what the file says.

    `again` goes on with the session before, `values` are variables. URL and FILE stand for the server and the file.
    With `launched`, `radixcache launch` starts it under that name.
    """

    def run(turn: Turn) -> None:
        for index, word in enumerate(WORDS):
            file = turn.folder / f"{word}.txt"
            file.write_text(f"[[{word}]]\n")
            question = f"Have a look. <<{tool}>>".replace("FILE", str(file))
            asked = [*command, *(again if index else ()), *(each.replace("URL", turn.url) for each in more), question]
            if launched:
                said = turn.launch(launched, *asked)
            else:
                said = turn.start(*asked, **{name: value.replace("URL", turn.url) for name, value in values.items()})
            assert said.splitlines()[-1].strip() == f"It says {word}."

    return run


def python_client(name: str) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        said = turn.start(SESSIONS, name, turn.url)
        assert said.splitlines() == ["It says Rome.", "It says Oslo.", "It says Lima."]

    return run


class Client(NamedTuple):
    """One client, and the templates that its session runs on."""

    name: str
    run: Callable[[Turn], None]
    program: str = "python"
    templates: tuple[str, ...] = ("hermes",)


CLAUDE_CODE: Any = (("-p", "--allowedTools=Read"), ("-c",), (), 'Read {"file_path": "FILE"}')
CODEX: Any = (("exec",), ("resume", "--last"))
CAT, ANYWHERE = 'exec_command {"cmd": "cat FILE"}', "--skip-git-repo-check"
PROVIDER = 'model_providers.local={name="local",base_url="URL/v1",wire_api="responses",env_key="KEY"}'
#: The tool is one of an MCP server, which Codex runs.
WITH_SERVER = (
    ANYWHERE, "--dangerously-bypass-approvals-and-sandbox", "-c",
    f"mcp_servers.files.command={json.dumps(sys.executable)}", "-c",
    f"mcp_servers.files.args={json.dumps([str(MCP_SERVER)])}",
)  # fmt: skip
CLIENTS = (
    Client("openai_chat", python_client("openai_chat"), templates=TEMPLATES),
    Client("openai_responses", python_client("openai_responses"), templates=("hermes", "strict")),
    Client("anthropic", python_client("anthropic"), templates=TEMPLATES),
    Client("openai_agents", python_client("openai_agents")),
    Client("openai_agents_chat", python_client("openai_agents_chat"), templates=("qwen3",)),
    Client("pydantic_ai", python_client("pydantic_ai"), templates=("strict",)),
    Client("langchain", python_client("langchain"), templates=("qwen3",)),
    Client("litellm", python_client("litellm")),
    Client("ollama", python_client("ollama"), templates=("hermes", "strict")),
    Client("claude_code", agent(*CLAUDE_CODE, ANTHROPIC_BASE_URL="URL", ANTHROPIC_API_KEY="dummy"), "claude",
           ("chatml", "qwen3", "strict")),
    Client("launched_claude_code", agent(*CLAUDE_CODE, launched="claude-code"), "claude"),
    Client("codex", agent(*CODEX, ("-c", PROVIDER, "-c", 'model_provider="local"', "-m", "some-model", ANYWHERE), CAT,
                          KEY="dummy"), "codex", ("strict",)),
    Client("launched_codex", agent(*CODEX, (ANYWHERE,), CAT, launched="codex"), "codex"),
    Client("launched_codex_with_a_server",
           agent(*CODEX, WITH_SERVER, 'mcp__files__look {"path": "FILE"}', launched="codex"), "codex", ("strict",)),
    Client("launched_opencode", agent(("run",), ("-c",), (), 'read {"filePath": "FILE"}', launched="opencode"),
           "opencode", ("qwen3",)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("client", "template"),
    [pytest.param(each, template, id=f"{each.name}-{template}") for each in CLIENTS for template in each.templates],
)
def test_no_request_is_refused_and_each_prompt_is_reused(
    client: Client, template: str, network: Network, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue("python" if client.program == "python" else "binaries")
    url = f"http://127.0.0.1:{PORT + TEMPLATES.index(template)}"
    (tmp_path / "home").mkdir()
    before, refused = network.look(url, clear=True)

    client.run(Turn(network, url, tmp_path, folder / client.program))

    after, refused_after = network.look(url)
    assert refused_after == refused
    ids = {row["id"] for row in before}
    rows = [row for row in after if row["id"] not in ids]
    # Titles and the like are asked for beside the session, with short prompts.
    longest = max(row["prompt_tokens"] for row in rows)
    session = [(row["prompt_tokens"], row["cached_tokens"]) for row in rows if row["prompt_tokens"] > longest / 5]
    print(client.name, template, session)
    assert len(session) == 2 * len(WORDS), rows
    for (earlier_tokens, _), (_, cached_tokens) in pairwise(session):
        assert cached_tokens >= earlier_tokens - OPENING, session
