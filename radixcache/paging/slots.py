"""Slots: the live paths of one cache, side by side.

    slot 0   root ── system ── user A        open: a session evaluates behind user A
    slot 1   root ── system ── user B        idle: the next request of user B goes on here, without a copy

`system` is LIVE in both and is paid for twice. A request takes the free slot whose path goes along with it furthest;
what it lacks there comes from snapshots, or out of the buffers of a slot that may be read: an idle one, or one whose
session runs in the same thread. The buffers of a session in another thread change while nobody looks.

Invariants, asserted by `check`, besides those of LivePath:

  P1  A node's guards are at least the number of open slots whose guarded path it is on; equal between public calls.
"""

from __future__ import annotations

from radixcache.errors import CacheBusyError
from radixcache.layers.layout import Layout
from radixcache.paging.live_path import LivePath
from radixcache.paging.pins import Pins
from radixcache.tree.node_state import StateNode
from radixcache.tree.radix_tree import below
from radixcache.tree.state_tree import StateTree


class Slots:
    """The live paths of one cache."""

    def __init__(self, layout: Layout, states: StateTree, pins: Pins, count: int) -> None:
        self._layout = layout
        self._states = states
        self._pins = pins
        self.paths = [LivePath(layout, states, slot) for slot in range(count)]

    def vanished(self) -> list[LivePath]:
        """Paths whose session is gone without having closed: its finalizer was interrupted."""
        return [path for path in self.paths if path.is_open and path.tenant is None]

    def require_free(self, namespace: str) -> None:
        """Raise CacheBusyError, with who holds the slots, unless one is free."""
        if all(path.is_open for path in self.paths):
            holders = tuple(self._holder(path, namespace) for path in self.paths)
            slots = "the live slot is" if len(holders) == 1 else f"all {len(holders)} live slots are"
            raise CacheBusyError(
                f"{slots} taken: {'; '.join(holders)}. Close one first, or use fetch() and insert().", holders
            )

    def choose(self, path: list[StateNode], limit: int) -> LivePath:
        """The free slot that goes furthest along `path`, of which `limit` tokens count.

        Of equal ones an empty slot, else the one that was used longest ago.
        """
        free = [live for live in self.paths if not live.is_open]
        return min(free, key=lambda live: (-live.common(path, limit), live.offset > 0, live.used, live.slot))

    def source(self, node: StateNode) -> LivePath:
        """A slot whose buffers hold the node and may be read; `hidden` said that there is one."""
        return next(path for path in self._holding(node) if path.is_readable())

    def hidden(self, path: list[StateNode], live: LivePath | None, *, evaluate: bool = True) -> int | None:
        """Where the first node begins that is only in buffers that must not be read now; None: all can be read.

        Args:
            path: nodes, root side first.
            live: the slot that is about to be used: what it holds need not be read.
            evaluate: find out whether what is pending in the buffers succeeds; without, take it that it does.
        """
        if not self._layout.token_bytes:
            return None  # no span layers: checkpoints are all there is to read
        ours = 0 if live is None else 1 << live.slot
        for node in path:
            state = node.payload
            if state.spans is not None or state.live_mask & ours:
                continue
            if not any(each.is_readable(evaluate) for each in self._holding(node)):
                return node.start
        return None

    def spare_nbytes(self) -> int:
        """Bytes of all live buffers beyond what the live state needs."""
        return sum(self._layout.spare_nbytes(path.caches) for path in self.paths)

    def lose(self, live: LivePath) -> None:
        """The buffers of a slot cannot be trusted: what was only there goes, what was paged stays."""
        live.forget()
        for node in list(self._states.tree.nodes()):
            if node.payload is not None and node.payload.spans is None and not node.payload.live:
                self.remove_branch(node)

    def remove_branch(self, node: StateNode, was_wrong: bool = False) -> list[LivePath]:
        """Take a node and all below it out of the tree, whoever keeps it; returns the live paths that stood there."""
        rest = None if node.parent is None or node.parent.is_root else node.parent
        gone = [node, *below(node)]
        stood = [path for path in self.paths if path.step_back(gone, rest)]
        for each in gone:
            self._pins.void(each)
        self._states.remove_subtree(node, was_wrong)
        return stood

    def check(self) -> None:
        """Assert P1 and the invariants of every path."""
        guards: dict[int, int] = {}
        for path in self.paths:
            path.check()
            for node in [] if path.guarded is None else path.guarded.path():
                guards[id(node)] = guards.get(id(node), 0) + 1
        found = {id(node): node.payload.guards for node in self._states.tree.nodes() if node.payload.guards}
        assert found == guards, (found, guards)

    def _holding(self, node: StateNode) -> list[LivePath]:
        return [path for path in self.paths if node.payload.live_mask >> path.slot & 1]

    def _holder(self, path: LivePath, namespace: str) -> str:
        tenant = path.tenant
        if tenant is None:
            return f"slot {path.slot} by a request that is being opened"
        who = f"slot {path.slot} by a request in thread {tenant.thread.name}"
        if tenant.namespace != namespace:
            return who  # nothing more is told of another namespace
        use = tenant.use
        kind = f" of kind {use.kind}" if use.kind else ""
        turn = "" if use.turn is None else f", turn {use.turn}"
        prompt, reply = len(tenant.prompt), tenant.position - len(tenant.prompt)
        at = f"{tenant.position} of {prompt} prompt tokens" if reply <= 0 else f"token {reply} behind its {prompt}"
        return f"{who}{kind}{turn}, request {use.tick}, at {at}"
