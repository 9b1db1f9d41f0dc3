"""Eviction policies: which entry goes first. They use numbers only: no arrays, no clock, no MLX."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

from policies.arc import ARC
from policies.belady import Belady, BeladyBypass
from policies.benefit import Benefit
from policies.cost import CostModel as CostModel
from policies.entry import Entry as Entry
from policies.gdsf import GDSF, LFUDA
from policies.marconi import Marconi
from policies.ordered import OrderedPolicy as OrderedPolicy
from policies.protocol import EvictionPolicy as EvictionPolicy
from policies.random_choice import Random
from policies.s3fifo import S3FIFO
from policies.sieve import SIEVE
from policies.slru import SLRU
from policies.static import FIFO, LFU, Priority
from policies.static import LRU as LRU
from policies.t_lru import TLRU
from policies.ttl import TTL
from policies.turn import Turn

#: The policies by name.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "arc": ARC,
    "benefit": Benefit,
    "fifo": FIFO,
    "gdsf": GDSF,
    "lfu": LFU,
    "lfuda": LFUDA,
    "lru": LRU,
    "marconi": Marconi,
    "priority": Priority,
    "random": Random,
    "s3fifo": S3FIFO,
    "sieve": SIEVE,
    "slru": SLRU,
    "t_lru": TLRU,
    "ttl": TTL,
    "turn": Turn,
}

#: Upper bounds for a simulator. Each takes a function that tells when an entry's last key is used next.
OFFLINE_POLICIES: dict[str, Callable[[Callable[[Entry], float]], EvictionPolicy]] = {
    "belady": Belady,
    "belady-bypass": BeladyBypass,
}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return a policy from its name in POLICIES, from "my.module:Class", or the object itself.

    Python searches the module as usual, then in the working directory; the class takes no arguments.

    Raises:
        ValueError: the name is unknown, the class cannot be made, or a method of EvictionPolicy is missing.
    """
    if isinstance(policy, str):
        if ":" in policy:
            return _imported(policy)
        if policy not in POLICIES:
            raise ValueError(
                f"policy {policy!r} is not known. Known: {', '.join(sorted(POLICIES))}, and my.module:Class."
            )
        return POLICIES[policy]()
    missing = _missing(policy)
    if isinstance(policy, type) or missing == list(HOOKS):
        raise ValueError(f"policy is {policy!r}; wanted a name in POLICIES or an EvictionPolicy object.")
    if missing:
        raise ValueError(
            f"policy {policy!r} does not follow the EvictionPolicy protocol: it has no {', '.join(missing)}."
        )
    return policy


def _imported(path: str) -> EvictionPolicy:
    module_name, _, class_name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ValueError(f"policy {path!r} is not of the form my.module:Class.")
    try:
        made: EvictionPolicy = getattr(_module(module_name), class_name)()
    except Exception as error:  # The user's module may raise anything, and the user can repair it.
        reason = " ".join(str(error).split()) or "no message"
        raise ValueError(f"policy {path!r} cannot be made: {type(error).__name__}: {reason}") from error
    if missing := _missing(made):
        raise ValueError(
            f"policy {path!r} does not follow the EvictionPolicy protocol: it has no {', '.join(missing)}."
        )
    return made


def _module(name: str) -> ModuleType:
    """Import a module. An installed program does not search the working directory, so search it as well."""
    top = name.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None and PathFinder.find_spec(top, [os.getcwd()]) is not None:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _missing(policy: object) -> list[str]:
    missing = [hook for hook in HOOKS if not callable(getattr(policy, hook, None))]
    leaves_key = isinstance(policy, OrderedPolicy) and type(policy).key is OrderedPolicy.key
    return [*missing, "key"] if leaves_key else missing


HOOKS = ("inserted", "touched", "split", "merged", "evicted", "evictable_changed", "victim")
