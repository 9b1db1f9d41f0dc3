"""Servers with a prefix cache, radixcache and others: install, start and stop them.

A server runs on a free loopback port, in its own process group and home folder, which also holds its files on disk. It
has no network: model hubs are offline and telemetry is off. `PeerProcess` ends the whole group.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import psutil

from runner import BLAS_ADVICE

ROOT = Path(__file__).parents[2]
START_S, STOP_S, SAMPLE_S, INSTALL_S = 120.0, 20.0, 0.1, 1800.0
BUDGET_MIB = 2048
API_KEY = "none"

ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"},
    **{"RAPID_MLX_TELEMETRY": "0", "GRADIO_ANALYTICS_ENABLED": "False", "ANONYMIZED_TELEMETRY": "False"},
    **{"PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1,localhost", "TOKENIZERS_PARALLELISM": "false"},
}


class PeerError(RuntimeError):
    """A server cannot be installed or started; the message is one line without paths."""


@dataclass(frozen=True)
class Peer:
    """A server and its command line.

    Attributes:
        packages: pip packages of its environment; empty: it runs in the environment of the benchmark.
        command: arguments of the Python of its environment, or of a program beside that Python if `program` is set.
            {model}, {port}, {disk}, {root} (the checkout) and {bytes}, {mib} of the cache budget are filled in.
        on, off: more arguments, with the prefix cache and without.
        clear: path to DELETE before each cold request, if the cache cannot be off.
        disk: more arguments for state that survives a restart; None: the server has no such option.
        env_on, env_off, env_disk: the same as environment variables.
    """

    name: str
    packages: tuple[str, ...]
    command: str
    program: str = ""
    on: str = ""
    off: str = ""
    clear: str = ""
    disk: str | None = None
    env_on: Mapping[str, str] = field(default_factory=dict)
    env_off: Mapping[str, str] = field(default_factory=dict)
    env_disk: Mapping[str, str] = field(default_factory=dict)

    def words(self, python: Path, values: Mapping[str, str], *, is_cached: bool, is_on_disk: bool) -> list[str]:
        """Return the command line that starts the server."""
        options = (self.on + " " + (self.disk or "") * is_on_disk) if is_cached else self.off
        first = python.parent / self.program if self.program else python
        return [str(first), *(word.format(**values) for word in f"{self.command} {options}".split())]

    def environment(self, values: Mapping[str, str], *, is_cached: bool, is_on_disk: bool) -> dict[str, str]:
        """Return the variables that this server needs besides ENVIRONMENT."""
        own = {**self.env_on, **(self.env_disk if is_on_disk else {})} if is_cached else self.env_off
        return {name: value.format(**values) for name, value in own.items()}


_APC = {"APC_ENABLED": "1", "APC_MEMORY_MAX_GB": "2"}
_SERVE = "serve {model} --host 127.0.0.1 --port {port}"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "radixcache serve",
            (),
            "-m radixcache serve --model {model} --port {port}",
            on="--prompt-cache-bytes {bytes}",
            off="--prompt-cache-bytes {bytes}",
            clear="/cache",
            disk="--disk {disk}",
        ),
        Peer(
            "mlx_lm.server",
            (),
            "-m mlx_lm server --model {model} --host 127.0.0.1 --port {port}",
            on="--prompt-cache-bytes {bytes} --prompt-cache-size 1000",
            off="--prompt-cache-size 0 --prompt-cache-bytes 0",
        ),
        Peer(
            "vllm-mlx",
            ("vllm-mlx",),
            _SERVE,
            program="vllm-mlx",
            on="--continuous-batching --enable-prefix-cache --cache-memory-mb {mib}",
            off="--continuous-batching --disable-prefix-cache",
            disk="--ssd-cache-dir {disk}",
        ),
        Peer(
            "rapid-mlx",
            ("rapid-mlx",),
            _SERVE,
            program="rapid-mlx",
            on="--enable-prefix-cache --cache-memory-mb {mib}",
            off="--disable-prefix-cache --disable-disk-caches",
            disk="",
        ),
        Peer(
            "mlx-vlm",
            ("mlx-vlm",),
            "-m mlx_vlm.server --model {model} --host 127.0.0.1 --port {port}",
            env_on={**_APC, "APC_DISK_ENABLED": "0"},
            env_off={"APC_ENABLED": "0"},
            disk="",
            env_disk={"APC_DISK_ENABLED": "1", "APC_DISK_PATH": "{disk}"},
        ),
        Peer(
            "vmlx",
            ("vmlx", "mlx-lm==0.31.3"),
            _SERVE,
            program="vmlx",
            on="--continuous-batching --enable-prefix-cache --use-paged-cache --cache-memory-mb {mib}",
            off="--continuous-batching --disable-prefix-cache",
            disk="--enable-block-disk-cache --block-disk-cache-dir {disk}",
        ),
    )
}


def _guest(name: str, file: str) -> Peer:
    """A server with a PrefixCache in place of its own, in an environment of its own."""
    peer, script = PEERS[name], ROOT / "examples" / "guests" / file
    words = peer.command.removeprefix("-m mlx_vlm.server ")
    named = f"{name} + radixcache"
    return replace(
        peer, name=named, packages=(*peer.packages, "--editable", str(ROOT)), command=f"{script} {words}", program=""
    )


#: By the name of the server: the same one with a PrefixCache.
GUESTS = {
    name: _guest(name, file)
    for name, file in {"vllm-mlx": "vllm_mlx.py", "rapid-mlx": "rapid_mlx.py", "mlx-vlm": "mlx_vlm.py"}.items()
}


# Environments --------------------------------------------------------------------------------------------------------


def install(peer: Peer, venvs: Path) -> Path:
    """Return the Python of a server; make a missing virtual environment. PeerError: this failed."""
    if not peer.packages:
        return Path(sys.executable)
    folder = venvs / peer.name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists() or (python.exists() and peer.packages[0] in versions(python, peer)):
        return python
    backend = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    for words in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", backend, *peer.packages],
    ):
        try:
            ended = subprocess.run(words, capture_output=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            raise PeerError(f"pip did not install {peer.name} within {INSTALL_S:.0f} s") from None
        if ended.returncode:
            raise PeerError(f"pip cannot install {peer.name} on this machine")
    done.touch()
    return python


def versions(python: Path, peer: Peer) -> dict[str, str]:
    """Return the installed versions of the server's package and of the libraries it computes with."""
    names = [peer.packages[0]] if peer.packages else ["radixcache"] if peer.name.startswith("radix") else []
    code = (
        "import sys; from importlib.metadata import distributions\n"
        "found = {d.metadata['Name'].lower(): d.version for d in distributions()}\n"
        "print(*(f'{n} {found[n]}' for n in sys.argv[1:] if n in found), sep='\\n')"
    )
    words = [str(python), "-c", code, *dict.fromkeys([*names, "mlx", "mlx-lm", "transformers"])]
    printed = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT).stdout
    return dict(line.split(" ", 1) for line in printed.splitlines())


# Processes -----------------------------------------------------------------------------------------------------------


class PeerProcess:
    """A server that runs inside a `with` block. The end of the block ends the process group.

    Args:
        peer: the server. python: of its environment. model: folder of the model.
        home: its home folder, with its stored files and log; a later process may use the same folder.
        is_cached, is_on_disk: use its prefix cache; use its option for state that survives a restart.

    Attributes:
        url: http://127.0.0.1:PORT.
        peak_bytes: peak resident memory of the process tree in the last `measured` block.

    Raises:
        PeerError: the server ended, or did not answer GET /v1/models in time.
    """

    def __init__(
        self,
        peer: Peer,
        python: Path,
        model: Path,
        home: Path,
        *,
        is_cached: bool = True,
        is_on_disk: bool = False,
    ) -> None:
        self.peer, self._home = peer, home
        (home / "disk").mkdir(parents=True, exist_ok=True)
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        values = {
            **{"model": str(model), "port": str(self._port), "disk": str(home / "disk")},
            **{"bytes": str(BUDGET_MIB << 20), "mib": str(BUDGET_MIB), "root": str(ROOT)},
        }
        self._words = peer.words(python, values, is_cached=is_cached, is_on_disk=is_on_disk)
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            **{"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(home)},
            **peer.environment(values, is_cached=is_cached, is_on_disk=is_on_disk),
        }
        if sys.platform == "linux" and BLAS_ADVICE is None:
            # MLX's own BLAS is 70 times slower. radixcache loads OpenBLAS itself; give it to the other servers too.
            self._environment["LD_PRELOAD"] = "libopenblas.so.0"
        if not peer.packages:
            self._environment["PYTHONPATH"] = str(ROOT)
        self.peak_bytes = 0

    def __enter__(self) -> PeerProcess:
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_until_up()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_error(self) -> str:
        """Return the last line of the log that names an error, without paths; empty if there is none."""
        text = (self._home / "log").read_text(encoding="utf-8", errors="replace")
        lines = re.findall(r"^\s*(?:\w+\.)*\w*(?:Error|Exception)\b.*|^.*\berror: .*", text, re.MULTILINE)
        return re.sub(r"(/[\w.+-]+){2,}/?", "PATH", lines[-1].strip())[:160] if lines else ""

    def clear_cache(self) -> None:
        """Clear the cache of a server whose cache cannot be off."""
        if self.peer.clear:
            self._status("DELETE", self.peer.clear)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Sample the memory of the process tree while the block runs."""
        self.peak_bytes = self._resident_bytes()
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(SAMPLE_S):
                self.peak_bytes = max(self.peak_bytes, self._resident_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
        finally:
            is_over.set()
            sampler.join()

    def _wait_until_up(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.has_ended:
                raise PeerError(f"the server ended while it started: {self.last_error or 'no error was printed'}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._status("GET", "/v1/models") == 200:
                    return
            time.sleep(0.1)
        raise PeerError(f"the server did not answer within {START_S:.0f} s")

    def _status(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        with contextlib.closing(connection):
            connection.request(method, path, headers={"Authorization": f"Bearer {API_KEY}"})
            response = connection.getresponse()
            response.read()
            return response.status

    def _resident_bytes(self) -> int:
        total = 0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
        return total

    def _end(self) -> None:
        """End the group by SIGTERM, then by SIGINT, then by SIGKILL. The first two let the server write its state."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
