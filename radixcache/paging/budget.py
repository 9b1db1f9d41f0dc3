"""ByteBudget: whether bytes fit. Only this file weighs a need against the budget, pins, limits and the device.

    who asks    may take
    cache       what is free now, beside all that is leaving
    eviction    also what eviction can free
    rows        also, beyond the budget, what the device can spare
    request     the same, up to `max_request_bytes`
    alone       the same, if no other request ran

The Evictor frees bytes, and the Ledger counts them. Callers hold the lock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from radixcache.errors import RequestTooLargeError
from radixcache.layers.layout import AnyLayout
from radixcache.paging.live_path import Slots
from radixcache.tree.state_tree import StateTree

#: Who asks; not an Enum, whose members take longer to look up than the rest of `ByteBudget.fits`.
Who = Literal["cache", "eviction", "rows", "request", "alone"]


class Fit(NamedTuple):
    """How many bytes are to spare, below 0: missing; and the error for a request that they are missing to."""

    spare_bytes: int
    refusal: RequestTooLargeError | None = None

    @property
    def is_ok(self) -> bool:
        return self.spare_bytes >= 0

    def require(self) -> None:
        """Raise the refusal, if there is one."""
        if self.refusal is not None:
            raise self.refusal


class ByteBudget:
    """What one cache may hold, beside the other caches on its ledger."""

    def __init__(self, layout: AnyLayout, states: StateTree, slots: Slots, most_bytes: int | None) -> None:
        """`most_bytes`: of the live state of one request."""
        self._layout, self._states, self._slots = layout, states, slots
        self._account, self._ledger = states.account, states.account.ledger
        self._most_bytes = most_bytes

    def fits(self, need_bytes: int, held_bytes: int = 0, who: Who = "cache") -> Fit:
        """Whether `need_bytes`, of which `held_bytes` are held already, fit; evicts nothing."""
        ledger, more_bytes = self._ledger, need_bytes - held_bytes
        most_bytes = self._most_bytes
        if most_bytes is not None and need_bytes > most_bytes and who in ("request", "alone"):
            return _short(need_bytes, most_bytes, is_limit=True)
        if who == "cache" or (who == "eviction" and not self.over_bytes(more_bytes)):
            free_bytes = ledger.budget_bytes - ledger.total_bytes - self._states.leaving_bytes
            return Fit(free_bytes - more_bytes)
        if who == "eviction":
            return Fit(ledger.budget_bytes - self.fixed_bytes() - more_bytes)
        if who == "alone":
            if need_bytes <= ledger.budget_bytes:
                return Fit(ledger.budget_bytes - need_bytes)
            return _short(need_bytes, self._layout.device_bytes() + ledger.total_bytes - ledger.pinned_bytes)
        if (free_bytes := ledger.budget_bytes - ledger.held_bytes - more_bytes) >= 0 or more_bytes <= 0:
            return Fit(max(0, free_bytes))
        available_bytes = self._layout.device_bytes()
        if more_bytes > available_bytes:
            available_bytes += max(0, self._account.total_bytes - self.fixed_bytes())
        return _short(need_bytes, held_bytes + available_bytes)

    def over_bytes(self, need_bytes: int = 0) -> int:
        """Bytes that must go before `need_bytes` more, and all that is leaving, fit the budget."""
        ledger = self._ledger  # called very often: `fits` for CACHE, without its Fit
        over_bytes = ledger.total_bytes + need_bytes + self._states.leaving_bytes - ledger.budget_bytes
        return over_bytes if over_bytes > 0 else 0

    def could_fit(self, need_bytes: int) -> bool:
        """Whether the bytes fit if all that is evictable goes."""
        return self.fits(need_bytes, who="eviction").is_ok

    def kept_tokens(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt the budget can keep, with a checkpoint at their end; 0: all, or not known."""
        token_bytes = self._layout.token_bytes
        if not token_bytes:
            return 0
        point_bytes = self._layout.request_bytes(prompt_tokens) - prompt_tokens * token_bytes
        # Twice the point state: it is live, too. Buffers have room for one token more.
        kept = (self._ledger.budget_bytes - 2 * point_bytes) // token_bytes - 1
        return max(kept, 0) if kept < prompt_tokens else 0

    def fixed_bytes(self) -> int:
        """Bytes that eviction cannot free: what open sessions, groups and pins hold. O(nodes)."""
        nbytes = self._account.second_bytes + self._account.booked_checkpoint_bytes
        idle = [path for path in self._slots.paths if not path.is_open]
        nbytes += self._account.live_bytes - sum(path.booking.live_bytes for path in idle)
        in_idle = sum(1 << path.slot for path in idle)
        counted: set[int] = set()
        for kept in self._states.tree.nodes():
            node, state = kept, kept.payload
            if not state.is_kept:
                continue
            nbytes += 0 if state.checkpoint is None else state.checkpoint.nbytes
            nbytes += self._states.windows.needed_bytes(kept)
            while node.parent is not None and id(node) not in counted:  # what is above it stays as well
                counted.add(id(node))
                state = node.payload
                if state.readers or not state.live_mask & ~in_idle:  # else it is in the buffers of an open session
                    stored_bytes = (node.end - node.start) * self._layout.stored_token_bytes
                    nbytes += stored_bytes if state.spans is None else state.spans.nbytes
                node = node.parent
        return nbytes


def _short(need_bytes: int, available_bytes: int, *, is_limit: bool = False) -> Fit:
    """A Fit of a request that may have so many bytes."""
    spare_bytes = available_bytes - need_bytes
    refusal = RequestTooLargeError(need_bytes, available_bytes, is_limit) if spare_bytes < 0 else None
    return Fit(spare_bytes, refusal)
