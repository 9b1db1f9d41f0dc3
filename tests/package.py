"""Build the wheel and the sdist, install each into a fresh environment, and use the command line there.

`python -m tests.package [--tag vX.Y.Z]`; the files stay in dist/. With a tag, the version must be that of the tag.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from radixcache import __version__

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


class Environment:
    """A fresh environment with one package in it, and a folder to work in that has none of the sources."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder = folder
        print(f"== {Path(package).name}", flush=True)
        venv.create(folder / "venv", with_pip=True)
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)

    def run(self, program: str, *arguments: str, code: int = 0, prints: str = "") -> None:
        """Run a program of the environment; it must exit with `code` and print something like `prints`."""
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RADIXCACHE_REDIS")}
        done = subprocess.run(
            [self._folder / "venv" / "bin" / program, *arguments],
            cwd=self._folder,
            env={**clean, "RADIXCACHE_HOME": str(self._folder / "home")},
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
        bare = Environment(Path(folder) / "wheel", str(*DIST.glob("*.whl")))
        bare.run("radixcache", "--version", "--verbose", prints=rf"^radixcache +{re.escape(__version__)}$")
        bare.run("radixcache", "doctor", prints=r"^missing +\[serve\]")
        bare.run("radixcache", "serve", code=2, prints=r"^error: .* pip install 'radixcache\[serve\]'\.$")
        bare.run("radixcache", "replay", "--model", "tiny", "--requests", "2", "--max-tokens", "2", prints="mlx-lm")
        served = Environment(Path(folder) / "sdist", f"{Path(*DIST.glob('*.tar.gz'))}[serve]")
        served.run("radixcache", "doctor", prints=r"^ok +\[serve\]")
        served.run("python", str(ROOT / "examples" / "serve_and_ask.py"), prints=r"Paris\? [1-9]\d* of ")


if __name__ == "__main__":
    main()
