"""Two machines, as network namespaces of this one with a link between them: reuse across it, and none where it is slow.

    here   redis-server, a cache that shares what it has ──── a link of limited bandwidth ──── there   another cache

Skipped where namespaces cannot be made, which takes Linux, root, iproute2 and a kernel that has them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prompts import tokens
from tests.restarts import cold, is_close
from tests.stores.redis_server import program_named
from tests.whole.test_redis import apart

HERE, THERE, LINK = (f"rc{os.getpid()}{end}" for end in ("here", "there", "l"))
URL = "redis://10.77.0.1:6379"
#: Of a server that starts on two busy cores.
PATIENCE_S = 60.0


def _run(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {line}: {done.stderr.strip()}")


def within(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[None]:
    """Two namespaces with a link between them, and a server in the one that is `HERE`."""
    program = program_named("redis-server")
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "redis-cli"))):
        pytest.skip("no root, no iproute2, or no redis-cli")
    server = None
    try:
        for namespace in (HERE, THERE):
            _run(f"ip netns add {namespace}")
            _run(f"ip -n {namespace} link set lo up")
        _run(f"ip link add {LINK}0 netns {HERE} type veth peer name {LINK}1 netns {THERE}")
        for number, namespace in enumerate((HERE, THERE)):
            _run(f"ip -n {namespace} addr add 10.77.0.{number + 1}/24 dev {LINK}{number}")
            _run(f"ip -n {namespace} link set {LINK}{number} up")
        options = ["--bind", "10.77.0.1", "--protected-mode", "no"]
        server = subprocess.Popen([*within(HERE), program, *options, "--save", ""], cwd=tmp_path)
        ends_s = time.monotonic() + PATIENCE_S
        while subprocess.run([*within(THERE), "redis-cli", "-u", URL, "ping"], capture_output=True).returncode:
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        yield
    finally:
        if server is not None:
            server.kill()
            server.wait()
        for namespace in (HERE, THERE):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@pytest.mark.slow
def test_what_one_machine_has_the_other_reuses_unless_the_link_is_slower_than_prefill(link: None, llama: Any) -> None:
    prompts = [tokens(seed, 600, first=seed + 1) for seed in range(5)]
    longer = [[*prompt, *tokens(9, 100)] for prompt in prompts]
    apart(URL, *prompts, within=within(HERE))
    found = apart(URL, longer[0], within=within(THERE))
    assert found[0]["cached"] == 600
    # Two megabits a second: 7 s for what prefill takes 60 ms for, as one prompt shows.
    _run(f"ip netns exec {HERE} tc qdisc add dev {LINK}0 root tbf rate 2mbit burst 16kb latency 400ms")
    found = apart(URL, *longer[1:], reads="measured", within=within(THERE))
    assert [each["cached"] for each in found] == [600, 0, 0, 0]
    assert found[-1]["decisions"] == {"brought": 1, "slower than prefill": 3}
    for prompt, each in zip(longer[1:], found, strict=True):
        assert is_close(np.array(each["logits"]), cold(llama, prompt)[0])
