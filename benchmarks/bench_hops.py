"""Count the files that a call crosses, and the hops between files.

A hop is a call or a return that ends in another file than it started in. A profile hook counts hops and files, so the
results are the same on every machine. The table also shows the counts from before small files were merged.

    begin, close, begin_many    files of radixcache/, for a request that leaves the live path of another conversation
    chat request                files of runner/, from the ASGI application to the cache
    simulate                    files of all packages, for a trace of two requests

    python -m benchmarks.bench_hops
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import runner  # noqa: F401  loads OpenBLAS before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from fastapi.testclient import TestClient
from mlx_lm.models import llama

from benchmarks.harness.record import arguments, publish
from radixcache import PrefixCache
from runner.serve.app import make_app
from runner.serve.metrics import Watch
from runner.serve.options import ServeOptions
from runner.serve.scheduler import Scheduler
from runner.simulate.simulator import simulate
from runner.traces.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[1]
#: Hops and files of each call at commit 892053ce.
BEFORE: dict[str, tuple[int | None, int]] = {
    "begin": (292, 35),
    "close": (198, 26),
    "begin_many of two rows": (692, 41),
    "chat request": (None, 27),
    "simulate": (736, 45),
}


class Hops:
    """A profile hook that counts hops between files of some packages while `is_counting`.

    Args:
        until: stop at the first call of a function with this qualified name.
    """

    def __init__(self, *packages: str, until: str = "") -> None:
        self.count = 0
        self.files: set[str] = set()
        self.is_counting = True
        self._until = until
        self._folders = tuple(str(ROOT / package) for package in packages)
        self._stacks = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if not self.is_counting or event not in ("call", "return"):
            return
        if self._until and frame.f_code.co_qualname == self._until:
            self.is_counting = False
        if not name.startswith(self._folders):
            return
        stack = self._stacks.__dict__.setdefault("names", [])
        if event == "call":
            self.count += bool(stack) and stack[-1] != name
            stack.append(name)
            self.files.add(name)
        elif stack:
            stack.pop()
            self.count += bool(stack) and stack[-1] != name

    def figures(self) -> dict[str, int]:
        return {"hops": self.count, "files": len(self.files)}


def counted(work: Callable[[], Any], *packages: str) -> tuple[dict[str, int], Any]:
    hops = Hops(*packages)
    sys.setprofile(hops)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return hops.figures(), result


def cache_calls() -> dict[str, dict[str, int]]:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=512,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    cache = PrefixCache(model, budget_bytes=1 << 26)
    shared = list(range(100))
    conversations = [shared + list(range(start, start + 60)) for start in (200, 300)]
    for tokens in conversations:
        with cache.begin(tokens) as session:
            session.prefill(model)
            mx.eval(session.step(model, tokens[-1:]))
    leaving = conversations[0] + list(range(400, 430))
    found = {}
    found["begin"], session = counted(lambda: cache.begin(leaving), "radixcache")
    session.prefill(model)
    mx.eval(session.step(model, leaving[-1:]))
    found["close"], _ = counted(session.close, "radixcache")
    rows = [leaving, conversations[1]]
    found["begin_many of two rows"], group = counted(lambda: cache.begin_many(rows, capacity=1024), "radixcache")
    group.close()
    cache.check()
    return found


def chat_request() -> dict[str, int | None]:
    """Count files only: the hops of threads depend on timing."""
    hops = Hops("runner", until="Group.admit")
    hops.is_counting = False
    threading.setprofile(hops)
    options, watch = ServeOptions(model="tiny", budget_bytes=1 << 26), Watch()
    scheduler = Scheduler(options, watch.on_record, watch.on_event)
    scheduler.start()
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    try:
        with TestClient(make_app(options, scheduler, watch), base_url="http://127.0.0.1") as client:
            for is_counting in (False, True):
                hops.is_counting = is_counting
                client.post("/v1/chat/completions", json=body).raise_for_status()
    finally:
        threading.setprofile(None)
        scheduler.stop(0)
    return {**hops.figures(), "hops": None}


def measure() -> dict[str, Mapping[str, int | None]]:
    """Return the hops and files of each call."""
    requests = [TraceRequest(np.array([1, 2, 3]), 192, 10, time_ms) for time_ms in (0, 1000)]
    trace = Trace("two requests", 64, requests, False, "")
    simulated, _ = counted(lambda: simulate(trace, "lru", 100), "policies", "radixcache", "runner")
    return {**cache_calls(), "chat request": chat_request(), "simulate": simulated}


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    rows = []
    for name, figures in measure().items():
        hops, files = BEFORE[name]
        rows.append({"call": name, **figures, "hops before": hops, "files before": files})
    question = "Files that a call crosses"
    publish("hops", question, rows, folder=options.results, repeats=1)


if __name__ == "__main__":
    main()
