"""Star-shaped trees with unit sizes against libcachesim, request by request.

The package is GPL-3.0 and no dependency: the test installs it into an environment of its own under pytest's cache
folder, runs it there as a program, and compares files. Without a network it is skipped, with the reason.

Our side adds a request's key first and makes room afterwards with that key held: libcachesim looks up ghosts, and takes
the greedy-dual age of a new object, before it evicts. Capacities are 20 and more: below that its S3-FIFO has a small
queue of one object and admits nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import Belady, make_policy
from tests.policies.blocks import BlockCache, Future, replay, star_hits

PACKAGE = "libcachesim==0.3.5"
POLICIES_COMPARED = ["arc", "belady", "fifo", "gdsf", "lfu", "lru", "s3fifo", "sieve"]
TRACES = 12
REQUESTS = 1500
SCRIPT = Path(__file__).with_name("libcachesim_hits.py")


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> Path:
    """The interpreter of an environment with libcachesim."""
    assert pytestconfig.cache is not None
    tag = f"{PACKAGE.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    folder = Path(pytestconfig.cache.mkdir("libcachesim")) / tag
    interpreter = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
        try:
            installed = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{PACKAGE} cannot be installed: pip was not through after two minutes")
        if installed.returncode:
            reason = (installed.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"{PACKAGE} cannot be installed: {reason}")
        ready.touch()
    return interpreter


@pytest.mark.slow
def test_every_hit_and_every_miss_is_that_of_libcachesim(python: Path, tmp_path: Path) -> None:
    traces = [_trace(seed) for seed in range(TRACES)]
    job, result = tmp_path / "job.json", tmp_path / "hits.json"
    job.write_text(json.dumps({"policies": POLICIES_COMPARED, "traces": traces}))
    done = subprocess.run([python, SCRIPT, job, result], capture_output=True, text=True, timeout=240, check=False)
    assert result.exists(), done.stderr
    rows = json.loads(result.read_text())
    differences = [
        f"{name}, trace {seed}, request {_first_difference(theirs, ours)}: {theirs.count('1')}, {ours.count('1')} hits"
        for seed, (trace, row) in enumerate(zip(traces, rows, strict=True))
        for name, theirs in row.items()
        if (ours := _hits(name, trace["keys"], trace["capacity"])) != theirs
    ]
    assert len(rows) == TRACES
    assert differences == []


@pytest.mark.slow
def test_the_traces_tell_the_policies_apart() -> None:
    traces = [_trace(seed) for seed in range(4)]
    outcomes = {tuple(_hits(name, trace["keys"], trace["capacity"]) for trace in traces) for name in POLICIES_COMPARED}
    assert len(outcomes) == len(POLICIES_COMPARED)


def _trace(seed: int) -> dict[str, Any]:
    """Zipf and Pareto keys in turn, a new universe and capacity each; what is popular drifts in every other pair.

    Without a drift LFU and SIEVE come out the same: both end up with the same popular keys and one place for the rest.
    """
    draw = np.random.default_rng(seed)
    if seed % 2:
        keys = draw.zipf(draw.uniform(1.1, 1.5), REQUESTS) % int(draw.integers(100, 600))
    else:
        keys = (draw.pareto(draw.uniform(0.6, 1.2), REQUESTS) * 8).astype(np.int64) % 100_000
    if seed % 4 > 1:
        keys += int(draw.integers(5, 60)) * (np.arange(REQUESTS) // int(draw.integers(100, 400)))
    return {"keys": (keys + 1).tolist(), "capacity": int(draw.integers(20, 150))}


def _hits(name: str, keys: list[int], capacity: int) -> str:
    if name != "belady":
        return star_hits(make_policy(name), keys, capacity)
    requests = [[key] for key in keys]
    future = Future(requests)
    cache = BlockCache(Belady(future), capacity, adds_first=True)
    return "".join(map(str, replay(cache, requests, future)))


def _first_difference(left: str, right: str) -> int:
    return next((index for index, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), -1)
