"""Tier: what joins a cache to its stores: state comes from there before a request is planned, and goes there.

    bring    where the store has more of a prompt than memory, and reading it is expected to be faster than prefill:
             read -> the tree, PAGED; the request then goes on as with any other paged state
    closed   keep what a request left (write_on="close"), or what it had found (write_on="second_use")
    lost     keep what is about to go (write_on="eviction")

Several stores are asked as one (`stores/tiers.py`), and each is written at its own moment.

Nothing here raises for what a disk or a file does, or for state of a kind that cannot be stored: the answer is the cold
one. The lock is held. What waits to be written is in memory beside the budget, up to the store's own limit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from radixcache.layers.layout import Layout
from radixcache.paging.bringing import Bringing, Foreseen
from radixcache.paging.disk import Disk
from radixcache.paging.evictor import Evictor
from radixcache.paging.keeping import Keeping
from radixcache.paging.rates import Rates
from radixcache.paging.recorder import Recorder
from radixcache.paging.request import Request
from radixcache.paging.slots import Slots
from radixcache.stores.tiers import moments
from radixcache.tokens.keys import Keys
from radixcache.tree.node_state import StateNode
from radixcache.tree.state_tree import StateTree, Use

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: How often a chain is read anew after a block of it was found damaged or gone.
ATTEMPTS = 8


class Tier:
    """The stores of one cache.

    Attributes:
        store: where it leads to.
        rates: by which it is decided what is read.
        decisions: how often something was brought, or why not, in a few words.
    """

    def __init__(
        self, disk: Disk, layout: Layout, states: StateTree, evictor: Evictor, slots: Slots, recorder: Recorder
    ) -> None:
        self.store = disk.store
        self.rates = Rates(states.cost, disk.clock)
        self.decisions: Counter[str] = Counter()
        self.bringing = Bringing(disk, layout, states, evictor, recorder, self.rates)
        self._keeping = {
            moment: Keeping(disk._replace(store=store), layout, states, slots)
            for moment, store in moments(disk.store).items()
        }
        self._states = states
        if "eviction" in self._keeping:
            states.on_loss = self.lost

    @property
    def kept_blocks(self) -> int:
        """Blocks and checkpoints that were given to the stores, to several at the same moment once."""
        return sum(each.kept_blocks for each in self._keeping.values())

    def bring(self, keys: Keys, namespace: str, use: Use) -> bool:
        """Put into the tree what the store has of a prompt beyond memory, if that is worth it and there is room."""
        for _ in range(ATTEMPTS):
            decision = self._safely(lambda: self.bringing.bring(keys, namespace, use))
            if decision is not None:
                self.decisions[decision] += 1
            if decision != "damaged":
                break
        return decision == "brought"

    def foresee(self, keys: Keys, namespace: str) -> Foreseen:
        """What `bring` would do."""
        return self._safely(lambda: self.bringing.foresee(keys, namespace)) or Foreseen()

    def closed(self, keys: Keys, request: Request, used: int) -> None:
        """A request is over, and left these in the tree; the first `used` of them it had found there."""
        mark = min(request.marks, default=0)
        for moment, keeping in self._keeping.items():
            end = {"close": len(keys), "second_use": used}.get(moment, 0)
            if end:
                match = self._states.match(keys[:end], request.namespace)
                self._safely(lambda its=keeping, at=match: its.keep(at.node, at.offset, mark))  # type: ignore[misc]

    def lost(self, node: StateNode) -> None:
        """A node is about to lose state."""
        self._safely(lambda: self._keeping["eviction"].keep(node, node.end))

    def distrust(self, keys: Keys, start: int, namespace: str) -> None:
        """State of these keys was found wrong from offset `start` on."""
        self._safely(lambda: self.bringing.remove(keys, start, namespace))

    def keep_all(self) -> None:
        """Keep what a cache that writes at eviction holds as it is closed, what was used last first; waits for room."""
        keeping = self._keeping.get("eviction")
        if keeping is not None:
            leaves = [node for node in self._states.tree.nodes() if node.is_leaf]
            for leaf in sorted(leaves, key=lambda each: -each.payload.entry.last_used):
                self._safely(lambda its=leaf: keeping.keep(its, its.end, wait=True))  # type: ignore[misc]

    def _safely(self, call: Callable[[], R]) -> R | None:
        """What a call returns; None where it raised: whatever is wrong with a store is no reason not to serve."""
        try:
            return call()
        except Exception:
            self.decisions["failed"] += 1
            if self.decisions["failed"] == 1:
                logger.exception("the store cannot be used for some state; requests are served without it")
            return None
