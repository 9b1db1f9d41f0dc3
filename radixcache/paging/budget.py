"""The byte budget: check whether bytes fit, and evict to make room.

ByteBudget: checks whether bytes fit. Only this file compares a need with the budget, pins, limits and device memory.

    who asks    may take
    cache       what is free now, after all LEAVING nodes are paged out
    eviction    also what eviction can free
    rows        also free device memory beyond the budget
    request     the same, up to `max_request_bytes`
    alone       the same, as if no other request were running

The Evictor frees bytes, and the Ledger counts them. Callers hold the lock.

Evictor: makes room under the byte budget, in a fixed order that loses as little as possible.

    1  snapshots of LIVE nodes         duplicates, as the buffers hold the same; not if a row reads them in place
    2  spare capacity of live buffers  buffer room that no token uses
    3  window tokens                   those that no checkpoint needs, before each later step; then interval
                                       checkpoints that are not worth their bytes
    4  a path over the budget          an idle live path that alone exceeds the budget is paged out, if that takes
                                       fewer bytes; else it is cut back to a checkpoint
    5  the policy's victims            the tail of a leaf, 256 tokens at a time; the checkpoint of a single-child node
    6  an idle slot among several      frees its copy of a prefix that another slot holds; its own nodes become PAGED
    7  the tail of an idle live path   its nodes are cut and its buffers shrink; or it is paged out, as in 4
    8  other caches on the same ledger

An idle slot that was used less recently than the policy's victim goes before that victim: slots must not protect unused
state from the policy. State that is pinned or used by an open session is never evicted. LEAVING nodes count as paged
out, so a node that would be evicted at once is dropped without a copy.

GuardedPolicy: wraps a user's eviction policy, so that its errors do not break the bookkeeping. LRU takes over all
entries after the first hook that raises, or the first victim that must not be evicted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from policies import LRU, OFFLINE_POLICIES, POLICIES, Entry, EvictionPolicy
from radixcache.adapters.contract import Checkpoint
from radixcache.errors import PolicyError, RequestTooLargeError, describe
from radixcache.layers.layout import NATIVE_ERRORS, LiveStateError
from radixcache.layers.sizes import AnyLayout
from radixcache.ledger import Lock
from radixcache.paging.pins import Pins
from radixcache.paging.resume import LivePath, Slots
from radixcache.tree.state_tree import StateNode, StateTree

#: Who asks. Not an Enum: looking up its members takes longer than the rest of `ByteBudget.fits`.
Who = Literal["cache", "eviction", "rows", "request", "alone"]


class Fit(NamedTuple):
    """How many bytes are left, negative if bytes are missing. `refusal`: then the error, if a request asked."""

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
    """The bytes that one cache may hold, next to the other caches on its ledger."""

    def __init__(self, layout: AnyLayout, states: StateTree, slots: Slots, most_bytes: int | None) -> None:
        """`most_bytes`: the most that the live state of one request may take; None: no limit."""
        self.layout, self._states, self._slots = layout, states, slots
        self._account, self._ledger = states.account, states.account.ledger
        self._most_bytes = most_bytes

    def fits(self, need_bytes: int, held_bytes: int = 0, who: Who = "cache") -> Fit:
        """Whether `need_bytes` fit, of which `held_bytes` are held already. Evict nothing."""
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
            return _short(need_bytes, self.layout.device_bytes() + ledger.total_bytes - ledger.pinned_bytes)
        if (free_bytes := ledger.budget_bytes - ledger.held_bytes - more_bytes) >= 0 or more_bytes <= 0:
            return Fit(max(0, free_bytes))
        available_bytes = self.layout.device_bytes()
        if more_bytes > available_bytes:
            available_bytes += max(0, self._account.total_bytes - self.fixed_bytes())
        return _short(need_bytes, held_bytes + available_bytes)

    def over_bytes(self, need_bytes: int = 0) -> int:
        """Bytes to evict so that `need_bytes` more, and the snapshots of all LEAVING nodes, fit the budget."""
        ledger = self._ledger  # called very often, so this is `fits` for "cache" without a Fit
        over_bytes = ledger.total_bytes + need_bytes + self._states.leaving_bytes - ledger.budget_bytes
        return over_bytes if over_bytes > 0 else 0

    def can_keep(self, nbytes: int) -> bool:
        """Whether `nbytes` of one request fit the budget if everything else is evicted."""
        return nbytes <= self._ledger.budget_bytes

    def kept_tokens(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt fit the budget, with a checkpoint at their end; 0: all, or unknown."""
        token_bytes = self.layout.token_bytes
        if not token_bytes:
            return 0
        point_bytes = self.layout.request_bytes(prompt_tokens) - prompt_tokens * token_bytes
        # Point state counts twice: in the checkpoint and live. Buffers have room for one more token.
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
            while node.parent is not None and id(node) not in counted:  # nodes above a kept node stay too
                counted.add(id(node))
                state = node.payload
                if state.readers or not state.live_mask & ~in_idle:  # else buffers of an open session hold it
                    stored_bytes = (node.end - node.start) * self.layout.stored_token_bytes
                    nbytes += stored_bytes if state.spans is None else state.spans.nbytes
                node = node.parent
        return nbytes


def _short(need_bytes: int, available_bytes: int, *, is_limit: bool = False) -> Fit:
    """The Fit of a request that may take `available_bytes`."""
    spare_bytes = available_bytes - need_bytes
    refusal = RequestTooLargeError(need_bytes, available_bytes, is_limit) if spare_bytes < 0 else None
    return Fit(spare_bytes, refusal)


#: Policies of this project, which need no guard.
OWN: tuple[object, ...] = (*POLICIES.values(), *OFFLINE_POLICIES.values())


class Evictor:
    """Eviction for one cache. If checkpoints exceed `checkpoint_budget_bytes`, interval checkpoints are thinned.

    `evictions` counts the evictions, and `evicted_bytes` the bytes that they freed.
    """

    def __init__(
        self,
        states: StateTree,
        slots: Slots,
        pins: Pins,
        budget: ByteBudget,
        checkpoint_budget_bytes: int,
        trim_tokens: int,
    ) -> None:
        self.budget, self._over_bytes = budget, budget.over_bytes
        self._states, self._account, self._layout, self._slots = states, states.account, states.layout, slots
        self._pins = pins
        self._ledger = states.account.ledger
        self.checkpoint_budget_bytes = checkpoint_budget_bytes
        self._trim_tokens = trim_tokens
        # If the policy may rank the keys of one edge differently, a leaf loses its tail one step at a time.
        self._steps_singly = not getattr(states.policy, "ranks_whole_edges", True)
        #: Nodes that are being paged in: their snapshots stay, even if they are duplicates.
        self.spared: Sequence[StateNode] = ()
        self.evictions = self.evicted_bytes = 0

    def enforce_budget(self, *, thins: bool = True) -> None:
        """Tidy nodes that are no longer pinned; then enforce the checkpoint cap (if `thins`) and the budget."""
        self.tidy_unpinned()
        if thins and self._account.checkpoint_bytes:
            self.thin_checkpoints()
        self.make_room()

    def tidy_unpinned(self) -> None:
        """End pins whose time is over, and join or remove the nodes whose pins have ended."""
        pins = self._pins
        if pins.next_end_s is not None:
            pins.end_expired()
        for node in pins.take_unpinned() if pins.unpinned else ():
            if node.payload is not None:
                self.tidy(node)

    def make_room(self, need_bytes: int = 0) -> bool:
        """Evict until `need_bytes` more fit the budget; False: they do not fit, and nothing evictable is left."""
        if not self._over_bytes(need_bytes):
            return True
        over_bytes = self._evict_while(lambda: self._over_bytes(need_bytes))
        if over_bytes:
            self._ledger.reclaim_elsewhere(self._account, over_bytes)
            over_bytes = self._over_bytes(need_bytes)
        return over_bytes == 0

    def find_room(self, need_bytes: int) -> bool:
        """Make room as `make_room` does, but evict nothing if the bytes cannot fit."""
        return self.budget.fits(need_bytes, who="eviction").is_ok and self.make_room(need_bytes)

    def shrink_to(self, target_bytes: int, namespace: str | None = None) -> int:
        """Evict until this cache holds at most `target_bytes` or nothing evictable is left; returns the bytes freed.

        With a namespace, only state of this namespace is counted and evicted.
        """
        if namespace is not None:
            return self._shrink_namespace(namespace, target_bytes)
        before = self._held_bytes()
        self._evict_while(lambda: max(0, self._held_bytes() - target_bytes))
        return before - self._held_bytes()

    def drop_namespace(self, namespace: str) -> None:
        """Drop the state of a namespace, except kept state."""
        for path in self._idle():
            if path.tip is not None and path.tip.namespace == namespace:
                self._slots.lose(path)
        for node in reversed([*self._states.tree.nodes(namespace)]):
            if node.is_leaf and not node.is_root and not node.payload.is_kept and not node.payload.live:
                self._states.remove(node)
        for node in [*self._states.tree.nodes(namespace)]:
            if node.payload is not None:
                self.tidy(node)

    def _shrink_namespace(self, namespace: str, target_bytes: int) -> int:
        """Evict the namespace's leaves, least recently used first. The policy is not asked: it ranks all namespaces."""
        before, excess_bytes = self._held_bytes(), self._namespace_bytes(namespace) - target_bytes
        leaves: list[tuple[int, int, int, StateNode]] = []

        def over() -> int:
            return max(0, excess_bytes - (before - self._held_bytes()))

        def add(node: StateNode | None) -> None:
            if node is not None and node.payload is not None and node.is_leaf and not node.payload.is_kept:
                heappush(leaves, (node.payload.entry.last_used, -node.end, id(node), node))

        for node in self._states.tree.nodes(namespace):
            add(node)
        while leaves and over():
            leaf = heappop(leaves)[-1]
            above = leaf.parent
            if leaf.payload is None or not leaf.is_leaf or above is None:
                continue
            for path in [path for path in self._idle() if path.tip is leaf]:
                is_alone = all(node.payload.live_mask == 1 << path.slot for node in path.nodes())
                if is_alone and self._cut_tail(path, over()):
                    above = path.tip
                    break
                self.empty_slot(path, lambda: 0)
            else:
                if leaf.payload is not None and leaf.payload.live:
                    continue  # An open session uses this leaf.
                if leaf.payload is not None and over():
                    self._cut_leaf(leaf, over())
            add(leaf)
            if above is not leaf:
                add(above)
        return before - self._held_bytes()

    def _cut_leaf(self, leaf: StateNode, want_bytes: int) -> None:
        """Cut `want_bytes` off a leaf that is not live, or remove the leaf."""
        before, cuts = self._held_bytes(), self._cuts(leaf, want_bytes)
        try:
            if cuts:
                self._states.on_loss(leaf)
                self._states.truncate(leaf, cuts[-1])
            else:
                self.tidy(self._states.remove(leaf))
        except NATIVE_ERRORS:
            self.tidy(self._states.remove(leaf))  # There is no memory even for the cut, so remove the whole leaf.
        self._count(before)

    def _namespace_bytes(self, namespace: str) -> int:
        """Bytes of the namespace's nodes, and of the live buffers that hold its tokens."""
        nbytes = sum(node.payload.entry.weight_bytes for node in self._states.tree.nodes(namespace))
        for path in self._slots.paths:
            owner = path.tip if path.tenant is None else path.tenant
            nbytes += path.booking.live_bytes if owner is not None and owner.namespace == namespace else 0
        return nbytes

    def halve(self) -> None:
        self.shrink_to(self._held_bytes() // 2)

    def _evict_while(self, over: Callable[[], int]) -> int:
        """Take steps 1 to 7 while `over()` is not 0. Return the last value of `over()`."""
        if self._states.duplicate_bytes:
            self._drop_duplicates(over)
        self._drop_spare(over)
        while (over_bytes := over()) and self._give_way(over, over_bytes):
            pass
        return over_bytes

    def _give_way(self, over: Callable[[], int], over_bytes: int) -> bool:
        """Take the first of steps 3 to 7 that frees bytes; `over_bytes` is the value of `over()`. False: none does."""
        has_points, is_smaller = self._layout.has_points, self._layout.is_smaller_at_rest
        return (
            (has_points and self._states.windows.drop_unneeded(over))
            or (has_points and self._drop_checkpoint(self._states.thinning.costly(self._layout.token_bytes)))
            or (len(self._slots.paths) > 1 and self.empty_slot(self._stale_path(), over))
            or ((has_points or is_smaller) and self._shorten(over, over_bytes))
            or self.evict_one(over_bytes)
            or self.empty_slot(self._sharing_path(), over)
            or self._cut_idle_tail(over, over_bytes)
        )

    def _stale_path(self) -> LivePath | None:
        """The least recently used idle slot, if the policy's victim was used more recently."""
        idle = [path for path in self._idle() if path.tip is not None]
        victim = self._states.victim() if idle else None
        if victim is None:
            return None
        node, what = victim
        entry = node.payload.entry if what == "span" else node.payload.checkpoint_entry
        assert entry is not None, node
        return idle[0] if idle[0].used < entry.last_used else None

    def _sharing_path(self) -> LivePath | None:
        """The least recently used idle slot that holds a prefix which another slot holds too."""
        own_masks = ((path, 1 << path.slot) for path in self._idle())
        return next((path for path, own in own_masks if any(n.payload.live_mask != own for n in path.nodes())), None)

    def empty_slot(self, path: LivePath | None, over: Callable[[], int]) -> bool:
        """Empty an idle slot: page out the nodes that only it holds, unless the policy evicts them. False: no slot."""
        if path is None:
            return False
        nodes = path.nodes()
        leaving = path.leave(0)
        while over() > path.booking.live_bytes and self.evict_one(over() - path.booking.live_bytes):
            pass
        try:
            path.hand_over(leaving)
        except NATIVE_ERRORS:
            self._slots.lose(path)
        self._states.coalesce_all(nodes)
        return True

    def thin_checkpoints(self) -> None:
        """Bring checkpoints under their cap: drop interval checkpoints; keep branch points, marks and the newest."""
        while self._over_cap() and (
            self._states.windows.drop_unneeded(self._over_cap) or self._drop_checkpoint(self._states.thinning.first())
        ):
            pass

    def evict_one(self, want_bytes: int) -> bool:
        """Evict the policy's victim. A long leaf loses only as much of its tail as frees `want_bytes`."""
        victim = self._states.victim()
        if victim is None:
            return False
        node, what = victim
        if what == "checkpoint":
            return self._drop_checkpoint(node)
        before, cuts = self._held_bytes(), self._cuts(node, want_bytes)
        try:
            if cuts:
                self._states.trim(node, cuts)
            else:
                self.tidy(self._states.remove(node))
        except NATIVE_ERRORS:
            self.tidy(self._states.remove(node))  # There is no memory even for the cut, so remove the whole leaf.
        self._count(before)
        return True

    def tidy(self, node: StateNode) -> None:
        """Remove a node on which no request can resume any more. Otherwise join it with its neighbours if possible."""
        while node.parent is not None and self._states.is_useless(node):
            node = self._states.remove(node)
        self._states.coalesce_path(node)

    def _over_cap(self) -> int:
        return max(0, self._account.checkpoint_bytes - self.checkpoint_budget_bytes)

    def _cuts(self, leaf: StateNode, want_bytes: int) -> Sequence[int]:
        """Offsets at which to cut a leaf to free `want_bytes`, deepest first; empty: remove the whole leaf."""
        weight_bytes, length = leaf.payload.entry.weight_bytes, leaf.end - leaf.start
        if self._layout.has_points or weight_bytes == 0:
            return ()
        step = self._trim_tokens
        cut = (leaf.end - -(-want_bytes * length // weight_bytes)) // step * step
        if self._steps_singly:
            highest, lowest = (leaf.end - 1) // step * step, leaf.start // step * step + step
            return range(highest, max(cut, lowest) - 1, -step)
        return (cut,) if cut > leaf.start else ()

    def _drop_checkpoint(self, node: StateNode | None) -> bool:
        """Drop a node's checkpoint. False: `node` is None."""
        if node is None:
            return False
        before = self._held_bytes()
        self._states.drop_checkpoint(node)
        self._states.coalesce(node)
        self._count(before)
        return True

    def _drop_duplicates(self, over: Callable[[], int]) -> None:
        nodes = {id(node): node for path in self._slots.paths for node in path.nodes() if node not in self.spared}
        paged = [node for node in nodes.values() if node.payload.spans is not None and not node.payload.readers]
        for node in sorted(paged, key=lambda n: (n.payload.entry.last_used, -n.end)):
            if not over():
                return
            self._states.set_spans(node, None)

    def _drop_spare(self, over: Callable[[], int]) -> None:
        for path in self._idle():
            if not over():
                return
            if self._layout.spare_nbytes(path.caches) > self._layout.token_bytes or path.tip is None:
                path.shrink(path.offset)

    def _shorten(self, over: Callable[[], int], want_bytes: int) -> bool:
        """Page out or cut back an idle live path that alone exceeds the budget; no other step would help."""
        for path in self._idle():
            # Point state counts twice: a checkpoint holds it too.
            nbytes = 2 * path.booking.live_bytes - path.offset * self._layout.token_bytes
            if not self.budget.can_keep(nbytes) and self._page_out_or_cut(path, over, want_bytes):
                return True
        return False

    def _cut_idle_tail(self, over: Callable[[], int], want_bytes: int) -> bool:
        """Cut one node, or its tail, off an idle live path, or page the path out. False: no path allows it."""
        return any(self._page_out_or_cut(path, over, want_bytes) for path in self._idle())

    def _page_out_or_cut(self, path: LivePath, over: Callable[[], int], want_bytes: int) -> bool:
        """Page out an idle live path if that takes fewer bytes, or if its end must stay. Otherwise cut its tail."""
        tip, layout = path.tip, self._layout
        # Point layers have their state in a checkpoint, too.
        is_twice = tip is not None and (tip.payload.readers or (layout.has_points and tip.payload.is_kept))
        if tip is not None and (layout.is_smaller_at_rest or is_twice):
            return self.empty_slot(path, over)
        return self._cut_tail(path, want_bytes)

    def _cut_tail(self, path: LivePath, want_bytes: int) -> bool:
        tip = path.tip
        if tip is None or not tip.is_leaf or tip.payload.is_kept:
            return False
        before = self._held_bytes()
        resume, checkpoint = self._cut_target(path, tip, want_bytes)
        if resume is None:
            return False
        path.cut_back(resume)
        if resume > 0:
            if checkpoint is not None:
                stored = self._states.windows.stored(path.nodes())
                try:
                    self._layout.restore_points(path.caches, checkpoint, resume, stored)
                except (*NATIVE_ERRORS, LiveStateError):
                    self._slots.lose(path)
            path.shrink(path.offset)
        self._count(before)
        return True

    def _cut_target(self, path: LivePath, tip: StateNode, want_bytes: int) -> tuple[int | None, Checkpoint | None]:
        """The offset to cut a live path back to: a checkpoint with point layers, else any on the tip; None: no cut."""
        if not self._layout.has_points:
            tokens = -(-want_bytes // max(1, self._layout.token_bytes))
            cut = (tip.end - tokens) // self._trim_tokens * self._trim_tokens
            return max(cut, tip.start), None
        node = tip
        while node.parent is not None and not node.parent.is_root:
            node = node.parent
            state = node.payload
            if state.checkpoint is not None:
                return node.end, state.checkpoint
            if len(node.children) > 1 or state.is_kept:
                return None, None
        return 0, None

    def _idle(self) -> list[LivePath]:
        """Slots without an open session, least recently used first."""
        idle = [path for path in self._slots.paths if not path.is_open]
        return sorted(idle, key=lambda path: path.used) if len(idle) > 1 else idle

    def _held_bytes(self) -> int:
        return self._account.total_bytes + self._states.leaving_bytes

    def _count(self, before_bytes: int) -> None:
        """Count an eviction. `before_bytes`: what the cache held before it."""
        self.evictions += 1
        self.evicted_bytes += before_bytes - self._held_bytes()


def guard_policy(policy: EvictionPolicy, lock: Lock) -> EvictionPolicy:
    """Wrap a user's policy: the public call during which it fails raises the error, after the lock is released."""
    return policy if type(policy) in OWN else GuardedPolicy(policy, lock)


class GuardedPolicy:
    """Forwards every hook to a policy until the policy fails, and to LRU after that."""

    def __init__(self, policy: EvictionPolicy, lock: Lock) -> None:
        self._policy, self._lock = policy, lock
        self._entries: dict[int, Entry] = {}
        self._evictable: set[int] = set()
        self.ranks_whole_edges = getattr(policy, "ranks_whole_edges", True)

    def inserted(self, entry: Entry) -> None:
        self._entries[entry.entry_id] = entry
        self._ask("inserted", entry)

    def touched(self, entry: Entry) -> None:
        self._ask("touched", entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._entries.update({each.entry_id: each for each in (upper, lower)})
        self._ask("split", upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._forget(gone)
        self._ask("merged", gone, into)

    def evicted(self, entry: Entry) -> None:
        self._forget(entry)
        self._ask("evicted", entry)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        (self._evictable.add if evictable else self._evictable.discard)(entry.entry_id)
        self._ask("evictable_changed", entry, evictable)

    def victim(self) -> Entry | None:
        entry: Any = self._ask("victim")
        if entry is None or (isinstance(entry, Entry) and entry.entry_id in self._evictable):
            return entry
        self._replace("victim", f"gave {entry!r}, which must not be evicted")
        return self._policy.victim()

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.entry_id, None)
        self._evictable.discard(entry.entry_id)

    def _ask(self, hook: str, *arguments: Any) -> Any:
        try:
            return getattr(self._policy, hook)(*arguments)
        except Exception as error:
            self._replace(hook, f"raised {describe(error)}{_line_of(error)}", error)
        return self._policy.victim() if hook == "victim" else None

    def _replace(self, hook: str, what: str, cause: Exception | None = None) -> None:
        name, self._policy = type(self._policy).__name__, LRU()
        self.ranks_whole_edges = True
        for entry in self._entries.values():
            self._policy.inserted(entry)
            self._policy.evictable_changed(entry, entry.entry_id in self._evictable)

        def fail() -> None:
            raise PolicyError(name, hook, what) from cause

        self._lock.afterwards.append(fail)


def _line_of(error: BaseException) -> str:
    """Where an exception was raised, as text."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
