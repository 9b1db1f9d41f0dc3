"""The walks of prefix_cache_machine.py with a store on disk whose calls fail at random, and restarts in between.

What comes back from disk must spell the prefix that it claims as well, and no failure may come out of a call.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import precondition, rule

from radixcache import DiskStore, Explanation, PrefixCache
from radixcache.stores.block_store import WRITE_ON
from tests.restarts import Failing
from tests.restarts import reading as reading
from tests.walks.common import Told, walking
from tests.walks.common import small_steps as small_steps
from tests.walks.prefix_cache_machine import POINTS, SPANS, PrefixCacheMachine
from tests.walks.spelling import spells


class AtOnce(Failing):
    """Written is what was put, however fast the disk is: the same steps find the same there."""

    def put(self, *given: Any) -> Any:
        found = self.__getattr__("put")(*given)
        self.store.flush()
        return found


class StoreMachine(PrefixCacheMachine):
    """One folder, and one cache after the other."""

    #: What is evaluated at first for layers that are never written would be on disk before the walk begins.
    kinds_of = st.lists(st.sampled_from(sorted({*SPANS, *POINTS} - {"unused"})), min_size=1, max_size=4)

    def cache_class(self, model: Any, **more: Any) -> PrefixCache:
        self.folder = TemporaryDirectory()
        self.random = np.random.default_rng([len(model.kinds), more["budget_bytes"], more["live_slots"]])
        self.arguments: dict[str, Any] = more
        return self.opened_anew()

    def opened_anew(self) -> PrefixCache:
        write_on = WRITE_ON[int(self.random.integers(len(WRITE_ON)))]
        store = DiskStore(Path(self.folder.name, "store"), budget_bytes=1 << 30, min_free_bytes=0, write_on=write_on)
        self.store = AtOnce(store, int(self.random.integers(1 << 30)))
        return PrefixCache(self.model, store=self.store, identity="spelling", **self.arguments)  # type: ignore[arg-type]

    @precondition(lambda self: self.cache.stats.requests > 2)
    @rule(data=st.data(), closes=st.booleans())
    def restart(self, data: Any, closes: bool) -> None:
        """Another process opens the folder; what the one before had open, or in memory alone, is lost."""
        if closes:
            self.cache.close()
        self.store.store.close()
        self.opened, self.pins, self.names, self.lossless = [], [], {}, False
        self.told = self.arguments["on_event"] = Told()
        self.held = {name: set() for name in self.held}
        self.cache = self.opened_anew()
        for namespace, stored in self.stored.items():
            tokens = [*data.draw(st.sampled_from(stored)), 0] if stored else [0]
            caches, remaining = self.cache.fetch(tokens, namespace)
            spells(caches, tokens[: len(tokens) - len(remaining)], self.model.kinds)

    def explain(self, tokens: list[int], namespace: str) -> Explanation:
        self.store.share = 0  # a failure is counted, and so is a change
        try:
            return super().explain(tokens, namespace)
        finally:
            self.store.share = 0.1

    def foreseen(self, explanation: Explanation, session: Any) -> None:
        """What was explained without the disk may turn out to be more with it."""
        assert explanation.resumable_tokens <= session.cached_tokens

    def fetched(self, explanation: Explanation, cached_tokens: int) -> None:
        assert explanation.resumable_tokens <= cached_tokens

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cache"):
            self.store.store.check()
            self.store.store.close()
            self.folder.cleanup()


class StoredBitsMachine(StoreMachine):
    """The same with 8 bits or all of them, which spell as before, by the restart."""

    more: Any = {"stored_bits": 8}  # noqa: RUF012
    width = 32

    def opened_anew(self) -> PrefixCache:
        self.arguments["stored_bits"] = self.random.choice([8, None])
        return super().opened_anew()


TestStores = walking(StoreMachine, examples=6)
TestStoredBits = walking(StoredBitsMachine, examples=6)
