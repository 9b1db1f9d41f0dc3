"""Build the wheel and the sdist, install each into a fresh environment, and use the command line there.

The wheel also runs without an installation, as `uvx radixcache serve` and `uvx radixcache replay` do. `pipx run` does
the same: it installs the package without extras into an environment of its own and starts the program with the name of
the package.

`python -m tests.package [--tag vX.Y.Z]`; the files stay in dist/. With a tag, the version must be that of the tag.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from urllib.request import Request, urlopen

from radixcache import __version__

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


UVX = [sys.executable, "-m", "uv", "--quiet", "tool", "run", "--isolated", "--python", sys.executable]
UVX += ["--refresh-package", "radixcache", "--from"]


def replay_with_uvx(wheel: Path) -> None:
    """Replay a request on the demo model, which uv fetches: the environment of uvx has no pip."""
    print(f"== uvx {wheel.name}", flush=True)
    replay = ["radixcache", "replay", "--requests", "1", "--max-tokens", "1"]
    with tempfile.TemporaryDirectory(prefix="radixcache-") as folder:
        done = subprocess.run([*UVX, wheel, *replay], cwd=folder, env=clean_environment(Path(folder)), text=True,
                              stdout=subprocess.PIPE, check=True)  # fmt: skip
    assert "Every answer is the same as without a cache." in done.stdout, done.stdout
    print("   ok    ", *replay, flush=True)


def serve_with_uvx(wheel: Path) -> None:
    """Start the server of the wheel with uvx, and ask the tiny model one request."""
    serve = ["radixcache", "serve", "--model", "tiny", "--port", "0", "--log-level", "ERROR"]
    with (
        tempfile.TemporaryDirectory(prefix="radixcache-") as folder,
        subprocess.Popen(
            [*UVX, wheel, *serve],
            cwd=folder, env=clean_environment(Path(folder)), stdout=subprocess.PIPE, text=True,
        ) as server,
    ):  # fmt: skip
        assert server.stdout is not None
        try:
            url = server.stdout.readline().rpartition(" ")[2].strip()
            body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}).encode()
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(f"{url}/v1/chat/completions", body, headers), timeout=60) as response:
                usage = json.load(response)["usage"]
        finally:
            server.terminate()
    print("   ok    ", *serve, f"({usage['completion_tokens']} tokens)", flush=True)


def clean_environment(home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RADIXCACHE_REDIS")}
    return {**clean, "RADIXCACHE_HOME": str(home)}


class Environment:
    """A fresh environment with one package in it, and a folder to work in that has none of the sources."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder = folder
        print(f"== {Path(package).name}", flush=True)
        venv.create(folder / "venv", with_pip=True)
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)

    def run(self, program: str, *arguments: str, code: int = 0, prints: str = "") -> None:
        """Run a program of the environment; it must exit with `code` and print something like `prints`."""
        done = subprocess.run(
            [self._folder / "venv" / "bin" / program, *arguments],
            cwd=self._folder,
            env=clean_environment(self._folder / "home"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        is_right = done.returncode == code and re.search(prints, done.stdout, re.MULTILINE)
        print("  ", "ok    " if is_right else "FAILED", program, *arguments, flush=True)
        if not is_right:
            sys.exit(f"exit code {done.returncode}, wanted {code}, and {prints!r} in:\n{done.stdout}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", default=f"v{__version__}", help="the tag of the release")
    tag = parser.parse_args().tag
    if tag != f"v{__version__}":
        sys.exit(f"the tag is {tag}; wanted v{__version__}, the version in radixcache/__init__.py.")
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    with tempfile.TemporaryDirectory(prefix="radixcache-") as folder:
        wheel, sdist = Path(*DIST.glob("*.whl")), Path(*DIST.glob("*.tar.gz"))
        bare = Environment(Path(folder) / "wheel", str(wheel))
        bare.run("radixcache", "--version", "--verbose", prints=rf"^radixcache +{re.escape(__version__)}$")
        bare.run("radixcache", "doctor", prints=r"^missing +\[redis\]")
        bare.run("radixcache", "replay", "--model", "tiny", "--requests", "2", "--max-tokens", "2", prints="mlx-lm")
        bare.run("python", str(ROOT / "examples" / "serve_and_ask.py"), prints=r"Paris\? [1-9]\d* of ")
        # The extra is empty, but an installation that names it must not fail.
        named = Environment(Path(folder) / "sdist", f"{sdist}[serve]")
        named.run("radixcache", "doctor", prints=r"^missing +\[redis\]")
        named.run("python", str(ROOT / "examples" / "serve_and_ask.py"), prints=r"Paris\? [1-9]\d* of ")
    replay_with_uvx(wheel)
    serve_with_uvx(wheel)


if __name__ == "__main__":
    main()
