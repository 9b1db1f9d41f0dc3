"""How often a request passes from one file of radixcache to another: `begin`, `close`, `begin_many` of two rows.

A hop is a call, or a return, that ends in another file of radixcache/ than it started in. The request is one that
leaves a path: two conversations share a beginning, one is live, and the other one goes on. Hops are counted with a
profile hook, and are the same on every machine. Beside them stands what the same calls took while all files of
radixcache/ lay in one folder.

    python -m benchmarks.bench_hops
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import runner  # noqa: F401  loads OpenBLAS before MLX

import mlx.core as mx  # isort: skip
from mlx_lm.models import llama

import radixcache
from benchmarks.harness.record import arguments, publish
from radixcache import PrefixCache

PACKAGE = str(Path(radixcache.__file__).parent)
#: Hops and files of each call before the files were put into rooms, at commit d2c24402f7f0.
BEFORE = {"begin": (330, 26), "close": (214, 18), "begin_many of two rows": (690, 35)}


class Hops:
    """Counts passages between files of radixcache while it is installed as profile hook."""

    def __init__(self) -> None:
        self.count = 0
        self.files: set[str] = set()
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(PACKAGE):
            return
        if event == "call":
            self.count += bool(self._stack) and self._stack[-1] != name
            self._stack.append(name)
            self.files.add(name)
        elif self._stack:
            self._stack.pop()
            self.count += bool(self._stack) and self._stack[-1] != name


def counted(work: Callable[[], Any]) -> tuple[Hops, Any]:
    hops = Hops()
    sys.setprofile(hops)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return hops, result


def measure() -> dict[str, dict[str, int]]:
    """Hops and files of each call."""
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
    hops, session = counted(lambda: cache.begin(leaving))
    found["begin"] = {"hops": hops.count, "files": len(hops.files)}
    session.prefill(model)
    mx.eval(session.step(model, leaving[-1:]))
    hops, _ = counted(session.close)
    found["close"] = {"hops": hops.count, "files": len(hops.files)}
    hops, group = counted(lambda: cache.begin_many([leaving, conversations[1]], capacity=1024))
    found["begin_many of two rows"] = {"hops": hops.count, "files": len(hops.files)}
    group.close()
    cache.check()
    return found


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    rows = []
    for name, figures in measure().items():
        hops, files = BEFORE[name]
        rows.append({"call": name, **figures, "hops before": hops, "files before": files})
    question = "How often does a request pass from one file of radixcache to another?"
    publish("hops", question, rows, folder=options.results, repeats=1)


if __name__ == "__main__":
    main()
