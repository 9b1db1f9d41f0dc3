"""`radixcache doctor` and `--version --verbose` say what is installed and what is missing, and never where."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import runner
from radixcache import __version__
from runner.commands import doctor
from tests.stores.redis_server import Server, redis  # noqa: F401

Command = Callable[..., tuple[int, str, str]]

INSTALLED = ("Requires-Dist: numpy>=2", "Requires-Dist: absent; sys_platform == 'nowhere'")


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without faults, whatever the machine has."""
    monkeypatch.setattr(runner, "BLAS_ADVICE", None)
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RADIXCACHE_REDIS", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30, total=16 << 30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 << 30))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Install packages of which there is nothing but metadata: a name, and lines about it."""

    def write(name: str, *lines: str, version: str = "1.0") -> None:
        folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = "\n".join(("Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines))
        (folder / "METADATA").write_text(text + "\n")
        monkeypatch.syspath_prepend(str(folder.parent))

    return write


def marks(out: str) -> dict[str, str]:
    """The mark of each subject."""
    return {line.split()[1]: line.split()[0] for line in out.splitlines()}


def test_a_sound_installation_is_ok(command: Command, install: Callable[..., None]) -> None:
    install("radixcache", *INSTALLED)
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    next_steps = dict.fromkeys(("replay", "serve"), "next")
    assert marks(out) == dict.fromkeys(("packages", "MLX", "BLAS", "memory", "disk"), "ok") | next_steps
    assert re.search(r"8.0 of 16.0 GiB available; the default budget of a cache is \d+\.\d GiB, a quarter of ", out)


def test_a_narrow_terminal_breaks_lines_between_words(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_HOME", "home")
    whole = command("doctor")[1]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = command("doctor")[1]
    assert max(map(len, whole.splitlines())) > 60 >= max(map(len, narrow.splitlines()))
    assert narrow.split() == whole.split()
    assert narrow.count("pip install '") == whole.count("pip install '")


def test_an_extra_that_is_missing_is_named_with_what_installs_it_and_is_no_failure(
    command: Command, install: Callable[..., None]
) -> None:
    offered = [f"Provides-Extra: {name}" for name in ("cuda", "redis", "plot", "dev")]
    install(
        "radixcache",
        *INSTALLED,
        *offered,
        "Requires-Dist: front[fast]>=1; extra == 'cuda'",
        "Requires-Dist: numpy>=99; extra == 'redis'",
        "Requires-Dist: front; extra == 'plot'",
        "Requires-Dist: absent; extra == 'dev'",
    )
    install("front", "Provides-Extra: fast", "Requires-Dist: rocket; extra == 'fast'")
    code, out, _ = command("doctor")
    lines = dict(zip(marks(out), out.splitlines(), strict=True))
    assert code == 0
    assert "rocket is not installed. For NVIDIA GPUs: pip install 'radixcache[cuda]'" in lines["[cuda]"]
    assert "; wanted >=99. For prefixes that machines share" in lines["[redis]"]
    assert {name: mark for name, mark in marks(out).items() if name.startswith("[")} == {
        "[cuda]": "missing",
        "[redis]": "missing",
        "[plot]": "ok",
    }


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["Requires-Dist: absent"], "absent is not installed"),
        (["Requires-Dist: numpy<1"], "; wanted <1: pip install"),
        ([], "elsewhere runs from a folder and is not installed"),
    ],
)
def test_a_requirement_that_is_not_met_is_a_problem(
    command: Command, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, lines: list[str], found: str
) -> None:
    install("elsewhere", *lines)
    monkeypatch.setattr(doctor, "PACKAGE", "elsewhere")
    code, out, _ = command("doctor")
    assert (code, marks(out)["packages"]) == (1, "problem")
    assert found in out


def test_without_mlx_doctor_and_version_say_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise ImportError(f"{Path.home()}/mlx/libmlx.so:\n no such file")

    monkeypatch.setattr(doctor, "device_name", fail)
    code, out, _ = command("doctor")
    assert (code, marks(out)["MLX"]) == (1, "problem")
    assert "memory" not in marks(out)
    assert "ImportError: ~/mlx/libmlx.so: no such file" in out
    assert "ImportError: ~/mlx/libmlx.so: no such file" in command("--version", "--verbose")[1]


@pytest.mark.parametrize(
    ("owner", "name", "value", "subject", "advice"),
    [
        (psutil, "virtual_memory", SimpleNamespace(available=1 << 28, total=1 << 30), "memory", "0.2 of 1.0 GiB"),
        (shutil, "disk_usage", SimpleNamespace(free=1 << 28), "disk", "RADIXCACHE_HOME"),
    ],
)
def test_too_little_room_for_the_demo_model_is_a_problem(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    value: SimpleNamespace,
    subject: str,
    advice: str,
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: value)
    code, out, _ = command("doctor")
    assert (code, marks(out)[subject]) == (1, "problem")
    assert advice in out


def test_what_is_slower_than_it_could_be_is_no_failure(
    command: Command, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("radixcache", *INSTALLED)
    monkeypatch.setattr(runner, "BLAS_ADVICE", "no OpenBLAS: install it")
    monkeypatch.setattr(doctor, "device_name", lambda: "CPU")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda _: "nvidia-smi")
    code, out, _ = command("doctor")
    assert (code, marks(out)["BLAS"], marks(out)["MLX"]) == (0, "missing", "missing")
    assert "no OpenBLAS: install it" in out


def test_a_redis_server_is_asked_if_the_environment_names_one(
    command: Command,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    redis: Server,  # noqa: F811
) -> None:
    install("radixcache", *INSTALLED)
    monkeypatch.setenv("RADIXCACHE_REDIS", redis.url)
    assert marks(command("doctor")[1])["Redis"] == "ok"
    for url in ("redis://:secret@localhost:1/0", "unix:///nowhere?password=secret", "no URL, but a secret"):
        monkeypatch.setenv("RADIXCACHE_REDIS", url)
        code, out, _ = command("doctor")
        assert (code, marks(out)["Redis"]) == (1, "problem")
        assert "secret" not in out


def test_redis_without_its_client_is_a_problem(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_REDIS", "redis://localhost")
    monkeypatch.setitem(sys.modules, "redis", None)
    code, out, _ = command("doctor")
    assert code == 1
    assert "pip install 'radixcache[redis]'" in out


def test_the_verbose_version_is_for_an_issue_and_names_no_folder_of_the_user(command: Command) -> None:
    assert command("--version") == (0, f"radixcache {__version__}\n", "")
    code, out, err = command("--verbose", "--version")
    assert (code, err) == (0, "")
    told = dict(line.split("  ", 1) for line in out.splitlines())
    assert set(told) == {
        *("python", "radixcache", "mlx", "mlx-lm", "numpy", "transformers", "system", "machine", "CPUs", "memory"),
        *("MLX device", "BLAS"),
    }
    assert all(value.strip() for value in told.values())
    assert str(Path.home()) not in out
    code, _, err = command("--verbose", "doctor")
    assert (code, err) == (2, "error: --verbose goes with --version.\n")
