"""sized_cache: a PrefixCache of sizes in place of state, so that simulators run the deployed code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies import CostModel, Entry, EvictionPolicy
from radixcache.layers.sizes import SizedLayout
from radixcache.ledger import Ledger
from radixcache.observe.trace import Clock, TraceFile
from radixcache.paging.pager import OwnState
from radixcache.paging.resume import PrefixRequest
from radixcache.paging.tier import Disk
from radixcache.prefix_cache import PrefixCache, assemble
from radixcache.settings import Settings, require_about
from radixcache.tokens import Keys, TokenIds
from radixcache.tree.history import OnEvent


def sized_cache(
    layout: SizedLayout,
    *,
    budget_bytes: int | Ledger,
    policy: str | EvictionPolicy = "lru",
    cost: CostModel | None = None,
    clock: Callable[[], int] | None = None,
    trace: TraceFile | None = None,
    on_event: OnEvent | None = None,
    tokenizer: Any = None,
    disk: Disk | None = None,
    **settings: Any,
) -> PrefixCache:
    """A cache of sizes; arguments not described here are as in PrefixCache.

    Args:
        clock: the source of ticks, such as a trace's milliseconds; by default they count requests. Ticks always rise.
        disk: a SizedStore, and the clock that times reading.
        settings: checkpoint_interval, checkpoint_budget_bytes, live_slots, exact, step_size; `tail_tokens`: how far in
            front of a prompt's end a checkpoint is taken; `trim_tokens`: the step in which a leaf of a pure span model
            loses its tail; `merges`: join a node with its only child if possible. False leaves keys of different
            history apart, as for policies that are defined on blocks; `remembers`: keep what explain() tells of
            earlier prompts and evictions.

    Raises:
        ValueError: an argument out of its range.
    """
    if settings.get("verify"):
        raise ValueError("verify needs the state of a model; this cache has only sizes.")
    require_about(tokenizer, cost)
    cache = PrefixCache.__new__(PrefixCache)
    own = Settings(clock=clock, on_event=on_event, **settings)
    unit: Clock = "requests" if clock is None else "ms"
    cache._open, cache._about = assemble(
        layout, budget_bytes, policy, cost, own, trace, tokenizer, clock=unit, disk=disk
    )
    return cache


def serve_spans(cache: PrefixCache, prompt: TokenIds, keys: Keys, turn: int | None, kind: str) -> int:
    """Serve a prompt without a reply, if all layers are spans; returns how many of its keys were stored.

    Slots, tree and policy work as in begin(), prefill() and close(). There is no Session, which follows forward passes,
    and the arguments are not checked.
    """
    core = cache._core
    count = len(keys)
    with core.lock:
        request = PrefixRequest(prompt, keys, "", core.next_use(0, turn, kind))
        live, plan = core.open(request, None)
        core.evictor.make_room()
        # A live cache makes room for the whole prompt at once; policies that age depend on that order.
        core.evictor.make_room((count - plan.matched) * core.layout.token_bytes)
        live.caches[0].advance(count - plan.resume)
        core.commit(live, request, keys, count, OwnState(core.budget, live.booking))
        core.end_session(live, request, keys, plan.resume, 0)
    return plan.matched


def stored_keys(cache: PrefixCache, keys: Keys) -> int:
    """How many of a prompt's keys, from the first on, the cache has; does not count as a use."""
    return cache._core.states.match(keys, "").offset


def last_key(cache: PrefixCache, entry: Entry) -> int | None:
    """The last key on the edge that a policy's entry stands for; None: the entry is gone."""
    return cache._core.states.last_key(entry)
