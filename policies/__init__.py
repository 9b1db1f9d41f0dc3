"""Eviction policies: which entry goes first. Numbers in, a choice out; no arrays, no clock, no MLX."""

from __future__ import annotations

from collections.abc import Callable

from policies.cost import CostModel
from policies.entry import Entry
from policies.fifo import FIFO
from policies.lru import LRU
from policies.ordered import OrderedPolicy
from policies.protocol import EvictionPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "fifo": FIFO,
    "lru": LRU,
}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return a policy from its name in POLICIES, or the object itself.

    Raises:
        ValueError: the name is not in POLICIES, or the object does not follow the EvictionPolicy protocol.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not known. Known: {', '.join(sorted(POLICIES))}.")
        return POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, EvictionPolicy):
        raise ValueError(f"policy is {policy!r}; wanted a name in POLICIES or an EvictionPolicy object.")
    return policy


__all__ = ["FIFO", "LRU", "POLICIES", "CostModel", "Entry", "EvictionPolicy", "OrderedPolicy", "make_policy"]
