"""`.ci/install.py` installs with uv, and with pip where uv cannot; what fails is shown, and nothing else.

Scripts that write down how they were called stand for uv and for the interpreter of .venv.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).resolve().parents[2] / ".ci" / "install.py"
WARNING = "WARNING: Location '/nowhere' is ignored"


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", f'echo "{path.name} $*" >> "$CALLS"', *lines, ""]))
    path.chmod(0o755)


def install(root: Path, extra: str) -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and the calls that install something."""
    (root / ".ci").mkdir()
    shutil.copy(INSTALL, root / ".ci")
    calls = root / "calls"
    environment = {"PATH": f"{root / 'path'}:/usr/bin:/bin", "CALLS": str(calls), "HOME": str(root)}
    command = [sys.executable, "-S", str(root / ".ci" / "install.py"), extra]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    made = [line.replace(str(root), "") for line in calls.read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, [each for each in made if " install " in each]


FAILS = ('echo "error: no route to the index" >&2', "exit 2")
PIP = "python -m pip install -qq --disable-pip-version-check"


@pytest.mark.parametrize(("extra", "package"), [("runtime", "."), ("test", ".[test]")])
def test_uv_installs_what_a_target_needs_and_pip_is_not_asked(tmp_path: Path, extra: str, package: str) -> None:
    script(tmp_path / ".venv" / "bin" / "python")
    script(tmp_path / "path" / "uv", f'echo "{WARNING}"')
    code, printed, calls = install(tmp_path, extra)
    assert (code, calls) == (0, [f"uv pip install --quiet --python=/.venv/bin/python -e {package}"])
    assert printed == f"Installing radixcache into .venv, with what `{extra}` needs\n"


def test_pip_installs_where_uv_fails_and_one_line_says_so(tmp_path: Path) -> None:
    script(tmp_path / ".venv" / "bin" / "python")
    script(tmp_path / "path" / "uv", f'echo "{WARNING}"', *FAILS)
    code, printed, calls = install(tmp_path, "runtime")
    assert (code, calls[1:]) == (0, [f"{PIP} -e ."])
    assert "uv cannot install it: error: no route to the index. Trying pip, with its own configuration.\n" in printed
    assert WARNING not in printed


@pytest.mark.skipif(os.path.exists("/usr/bin/uv"), reason="uv is among the system's programs")
def test_without_uv_pip_fetches_it_first_and_installs_without_it_if_that_fails(tmp_path: Path) -> None:
    script(tmp_path / ".venv" / "bin" / "python", 'case "$*" in *uv*) exit 1;; esac')
    code, printed, calls = install(tmp_path, "runtime")
    assert (code, calls) == (0, [f"{PIP} uv>=0.8,<1", f"{PIP} -e ."])
    assert printed.count("\n") == 3


def test_what_fails_is_shown_and_the_exit_code_says_so(tmp_path: Path) -> None:
    script(tmp_path / ".venv" / "bin" / "python", 'case "$*" in *install*) echo "ERROR: no such index"; exit 1;; esac')
    script(tmp_path / "path" / "uv", *FAILS)
    code, printed, _ = install(tmp_path, "runtime")
    assert code == 1
    assert printed.endswith("ERROR: no such index\n")
