"""Machine: a model and a disk of given speeds, in sizes, and the clock that both of them move on.

    prefill    tokens / (tokens/s) ──►  clock  ◄── bytes / (bytes/s)    reading

By that clock the deployed `Rates` measure the two, and the deployed cache decides what is read. Writing takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixcache.layers.sizes import SizedCache, SizedModel
from radixcache.paging.disk import Disk
from radixcache.stores.block import BLOCK_TOKENS
from radixcache.stores.keys import Identity
from radixcache.stores.sized_store import SizedStore
from runner.simulate.disk import DiskPlan


class Machine(SizedModel):
    """The model is called as any other.

    Args:
        block_tokens: tokens that a key stands for.

    Attributes:
        plan: as given.
        store: what is on the disk.
        disk: what a cache takes; several may, one at a time.
        now_s: the clock.
        read_s: how much of that was reading.
    """

    def __init__(self, plan: DiskPlan, block_tokens: int) -> None:
        self.plan = plan
        self._block_tokens = block_tokens
        self.now_s = self.read_s = 0.0
        self.store = SizedStore(budget_bytes=plan.budget_bytes, write_on=plan.write_on, on_read=self._read)
        self.disk = Disk(
            self.store,
            Identity(b"simulated"),
            clock=lambda: self.now_s,
            block_tokens=max(1, BLOCK_TOKENS // block_tokens),
        )

    def __call__(self, keys: Any, cache: Sequence[SizedCache]) -> None:
        super().__call__(keys, cache)
        self.now_s += int(keys.shape[-1]) * self._block_tokens / self.plan.prefill_tokens_per_s

    def _read(self, nbytes: int) -> None:
        seconds = nbytes / self.plan.read_bytes_per_s
        self.now_s += seconds
        self.read_s += seconds
