"""Install radixcache with one of its extras into .venv: `python .ci/install.py test`. The targets of `make` call it.

uv installs: the one on PATH, or one that pip fetches into .venv. If that fails, pip installs. uv does not read pip.conf
and PIP_INDEX_URL, so pip may know an index that uv does not. The extra `runtime` stands for none. With a second
argument, a version of mlx-lm or `pre`, the environment is .venv-VERSION.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MLX_LM = sys.argv[2] if len(sys.argv) > 2 else ""
VENV = ROOT / f".venv-{MLX_LM}".removesuffix("-")
PYTHON, OWN_UV = VENV / "bin" / "python", VENV / "bin" / "uv"
PIP = [str(PYTHON), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 11))"


def main(extra: str, _: str = "") -> str:
    """Install; returns what failed, for people, or ''."""
    uv = shutil.which("uv")
    if not _succeeds(PYTHON, "-c", NEW_ENOUGH) and (failure := _make_venv(uv)):
        return failure
    if uv is None:
        if not OWN_UV.exists() and (failure := _pip("Installing uv into the environment", "uv>=0.8,<1")):
            _say(f"uv cannot be installed: {_last_line(failure)}")
        uv = str(OWN_UV) if OWN_UV.exists() else None
    package = ["-e", "." if extra == "runtime" else f".[{extra}]"]
    if MLX_LM:
        package.append("mlx-lm>=0.31.3.dev0" if MLX_LM == "pre" else f"mlx-lm=={MLX_LM}")
    title = f"Installing radixcache into {VENV.name}, with what `{extra}` needs"
    if uv is not None:
        failure = _run(title, uv, "pip", "install", "--quiet", f"--python={PYTHON}", *package)
        if not failure:
            return ""
        _say(f"uv cannot install it: {_last_line(failure)} Trying pip, with its own configuration.")
    return _pip(title, *package)


def _make_venv(uv: str | None) -> str:
    title = f"Creating the virtual environment {VENV.name} with Python {sys.version.partition(' ')[0]}"
    if uv and not _run(title, uv, "venv", "--quiet", "--clear", f"--python={sys.executable}", VENV):
        return ""
    return _run(title, sys.executable, "-m", "venv", "--clear", VENV)


def _pip(title: str, *packages: str) -> str:
    if not _succeeds(PYTHON, "-m", "pip", "--version"):  # uv makes environments without pip
        _run("Installing pip into .venv", PYTHON, "-m", "ensurepip")
    return _run(title, *PIP, *packages)


def _run(title: str, *command: str | Path) -> str:
    """Run a command, and say what it does and for how long; returns what it printed if it fails, or an empty text."""
    begin_s = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        _say(title, end="")
        while True:
            try:
                output, _ = running.communicate(timeout=1)
                break
            except subprocess.TimeoutExpired:
                _say(f"\r{title}: {time.monotonic() - begin_s:.0f} s " if sys.stderr.isatty() else ".", end="")
    _say("")
    return "" if running.returncode == 0 else output.strip() or f"{command[0]} failed without a word."


def _succeeds(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _last_line(output: str) -> str:
    return output.splitlines()[-1].strip().removesuffix(".") + "."


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]) or 0)
    except KeyboardInterrupt:
        sys.exit(130)
