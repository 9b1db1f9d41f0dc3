"""Tests in processes of their own, which begin with everything imported and with nothing evaluated.

On Linux they are forked from one that has the imports behind it: MLX makes its threads with the first evaluation, so
none is missing in them. Elsewhere each of them imports everything anew.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

#: Set in such a process.
OWN_PROCESS = "RADIXCACHE_TEST_OWN_PROCESS"
OPTIONS = ["-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist"]
IMPORTS = ["runner", "pytest", "hypothesis", "radixcache.prefix_cache", "runner.models.load"]
#: Less than the limit of any test, which would take the process that waits with it.
LIMIT_S = 240


def run_alone(nodeid: str, root: Path, output: Path) -> int | None:
    """Run a test in a process that runs nothing else; gives its exit code. What it writes goes to a file."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(IMPORTS)
    process = context.Process(target=_run, args=(nodeid, root, output))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    return process.exitcode


def _run(nodeid: str, root: Path, output: Path) -> None:
    import pytest

    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ[OWN_PROCESS] = "1"
    os.chdir(root)
    sys.exit(int(pytest.main([*OPTIONS, nodeid])))
