"""What test_killed_replays.py runs in a process of its own: `radixcache replay`, which dies.

    python -m tests.replay.killed DIES_AT KV_BITS ARGUMENT...

DIES_AT: so many requests are served, the last one as far as the fraction says. KV_BITS 0: not quantized.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

from radixcache import PrefixCache
from radixcache.paging.rates import StoreRates
from runner import cli
from runner.commands import replay
from runner.replay import caches


def quantized(kv_bits: int) -> Any:
    """What makes caches, quantized ones unless there are 0 bits."""
    return partial(PrefixCache, kv_bits=kv_bits, kv_group_size=32) if kv_bits else PrefixCache


class Unhurried(caches.RadixPrefixes):
    """Requests come no faster than the disk takes what the ones before them left."""

    def begin(self, prompt: Any) -> Any:
        self.shown.flush()
        return super().begin(prompt)


def dying_at(requests: float) -> type[replay.ReplayProgress]:
    """The progress of a replay that gets so far and no further."""

    class Deadly(replay.ReplayProgress):
        def _draw(self, cache: str, completed: float, prompt_tokens: int) -> None:
            if completed >= requests:
                os.kill(os.getpid(), signal.SIGKILL)

    return Deadly


if __name__ == "__main__":
    dies_at, kv_bits, *arguments = sys.argv[1:]
    StoreRates.is_worth_reading = lambda *_: True  # type: ignore[method-assign]  # a tiny model is faster than any disk
    caches.PrefixCache = quantized(int(kv_bits))  # type: ignore[misc]
    caches.RadixPrefixes = Unhurried  # type: ignore[misc]
    replay.ReplayProgress = dying_at(float(dies_at))  # type: ignore[misc]
    cli.main(arguments)
