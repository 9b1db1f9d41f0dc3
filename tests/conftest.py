"""Shared fixtures. `runner` is imported before anything imports MLX, so that OpenBLAS is loaded first."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import runner  # noqa: F401
from tests.own_process import OWN_PROCESS, run_alone

SHARED_DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Folder of the public traces and conversations; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("shared/data is not beside the repository")
    return SHARED_DATA


@pytest.fixture(scope="module")
def llama() -> Any:
    """The tiny llama, the same for all tests of a file."""
    from runner.models.tiny import tiny_model

    return tiny_model("llama")


@pytest.fixture
def exact_allocations() -> Iterator[None]:
    """Without MLX's pool of freed buffers, which hands out larger ones than asked for: every allocation shows."""
    import mlx.core as mx

    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def pytest_configure() -> None:
    """Have Ctrl-C raise KeyboardInterrupt also where whoever started pytest ignores it, as shells do in background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: What takes a minute or so by itself, or in one process: there a file's servers are started once.
LONGEST = (
    "test_soak",
    "test_replicas_served",
    "test_all_other_architectures",
    "test_a_conversation_of_two_contexts_still_knows",
)


#: Cases that `make test` leaves to `make test-slow`; the file says which. Those that are known to catch a mutant stay.
SLOW_CASES = Path(__file__).with_name("slow_cases.txt")
CAUGHT = Path(__file__).with_name("mutants") / "caught.json"
#: Of every test that was collected, whether it is slow.
IS_SLOW = pytest.StashKey[dict[str, bool]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, and put the longest tests first, so that no process is left alone with one at the end.

    A nightly test is a slow one, too.
    """
    slow = set(SLOW_CASES.read_text(encoding="utf-8").splitlines())
    slow -= set(json.loads(CAUGHT.read_text(encoding="utf-8")).values())
    for item in items:
        if item.nodeid in slow or item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.slow)
    config.stash[IS_SLOW] = {item.nodeid: item.get_closest_marker("slow") is not None for item in items}
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))


#: What errors say where the installed mlx-lm, older than the one that the project is made for, lacks something.
LACKS = re.compile(r"\w+ of mlx-lm \S+ differs|this mlx-lm lacks \w+[\w.]*|No module named 'mlx_lm[\w.]*'|LayerCache")
#: What mlx-lm 0.31.3 does otherwise itself, by parts of names. Its ChunkedKVCache loses tokens, its gemma3n is wrong
#: with its own caches, its loop shows processors other tokens, and `radixcache serve` does not start with it.
DIFFERS = [
    "ChunkedKVCache",
    "gemma3n",
    "/architectures/",
    "/serve/",
    "test_logits_processors_see_the_whole",
    "test_penalties_go_on_where",
    "test_a_base_that_depends_on_the_length",
    "chunked_cache",
    "afm7",
    "test_the_tiny_tokenizer_spells",
    "test_what_cannot_run_on_cells",
    "test_each_slow_case_exists",
]
IS_OLDER = Version(version("mlx-lm")) < Version("0.32.2")
#: Its model takes images, which an older mlx-lm does not.
collect_ignore = ["serve/test_images.py"] if IS_OLDER else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """With an older mlx-lm, skip tests of what it lacks."""
    report: Any = yield
    if IS_OLDER and report.failed:
        lacking = LACKS.search(report.longreprtext)
        if reasons := [lacking[0]] if lacking else [name for name in DIFFERS if name in item.nodeid]:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reasons[0]}")
    return report  # type: ignore[return-value]


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """Let the garbage collector leave alone what was there before a file: tests that measure memory call it often."""
    from radixcache.adapters.registry import ADAPTERS, OWN, difference_of

    for kind, adapter in ADAPTERS.items():
        if adapter in OWN:
            difference_of(kind, adapter)  # or else its trial would be a part of what the first test measures
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `own_process` in a process that runs nothing else.

    An evaluation that fails while it runs leaves MLX's CPU scheduler counting a task that never ends, about once in
    fifty failures. From two such tasks on any later evaluation of the process can wait forever for one of them.
    """
    if pyfuncitem.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        assert run_alone(pyfuncitem.nodeid, pyfuncitem.config.rootpath, output) == 0, output.read_text()
    return True
