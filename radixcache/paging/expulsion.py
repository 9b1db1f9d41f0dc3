"""Expulsion: takes a path whose state is wrong out of the tree, whoever holds it.

    root ── a ── b ── c        keys end on b, start lies inside it: b is cut there, its lower part and all below go
                  └── d        pins on them are void; live paths and sessions that stand on them step back to the rest

The session in which it was found out leaves its path altogether: its caches are emptied, what is right of it is paged
out first. An idle slot that held any of it is emptied likewise. Another open session keeps its caches, which are ahead
of the path from then on; at its close only what was in front of the wrong state is stored, whether that is quarantined
still or not.
"""

from __future__ import annotations

from radixcache.layers.evaluation import NATIVE_ERRORS
from radixcache.layers.layout import Layout
from radixcache.paging.evictor import Evictor
from radixcache.paging.live_path import LivePath
from radixcache.paging.pager import Pager
from radixcache.paging.pins import Pins
from radixcache.paging.slots import Slots
from radixcache.tree.radix_tree import Keys, below
from radixcache.tree.state_tree import StateNode, StateTree, state_of


class Expulsion:
    """Removing wrong state, for one cache."""

    def __init__(
        self, layout: Layout, states: StateTree, evictor: Evictor, pager: Pager, slots: Slots, pins: Pins
    ) -> None:
        self._layout = layout
        self._states = states
        self._evictor = evictor
        self._pager = pager
        self._slots = slots
        self._pins = pins

    def start_of(self, keys: Keys, namespace: str) -> int:
        """Where the node begins on which `keys` end; 0 when they are not stored."""
        match = self._states.match(keys, namespace)
        return match.node.start if match.offset == len(keys) else 0

    def expel(self, live: LivePath, keys: Keys, start: int, namespace: str) -> None:
        """Take out what begins with `keys` from offset `start` on, and empty the live path it was found on.

        What other prompts share with it stays.
        """
        match = self._states.match(keys, namespace)
        guarded = live.guarded
        live.hold(None)
        chain = match.node.path()
        if match.offset == len(keys):
            chain = self._cut_off(match.node, start)
        self._empty(live)
        for node in reversed(chain):
            if node.payload is None or node.end <= start or not node.is_leaf:
                break
            if state_of(node).live or state_of(node).held:
                break
            self._states.remove(node, was_wrong=True)
        for left in ([] if guarded is None else [guarded]) + chain[::-1]:
            if left.payload is not None:
                self._evictor.let_go(left)

    def _cut_off(self, node: StateNode, start: int) -> list[StateNode]:
        """Remove a node from `start` on, and all below it; returns the path that is left."""
        if node.start < start:
            try:
                self._states.split(node, start)
            except NATIVE_ERRORS:
                self._layout.release()  # there is not even room to cut it: all of it goes
        rest = None if node.parent is None or node.parent.is_root else node.parent
        gone = [node, *below(node)]
        touched = [path for path in self._slots.paths if self._step_back(path, gone, rest)]
        for each in gone:
            self._pins.void(each)
        self._states.remove_subtree(node, was_wrong=True)
        for path in touched:
            if not path.is_open:
                self._evictor.give_up(path, self._evictor.over_bytes)
        return [] if rest is None else rest.path()

    def _step_back(self, path: LivePath, gone: list[StateNode], rest: StateNode | None) -> bool:
        """Make a live path end at `rest` if it goes on into `gone`; whether it did."""
        went_on = False
        for node in gone:
            if path.guarded is node:
                path.guarded = rest
            if state_of(node).live_mask >> path.slot & 1:
                self._states.set_live(node, path.slot, False)
                went_on = True
        if went_on:
            path.tip = rest
            path.right_tokens = path.offset
        return went_on

    def _empty(self, live: LivePath) -> None:
        """Leave the path that a session stands on, keeping what is right of it, and empty its caches in place."""
        nodes = live.nodes()
        try:
            self._pager.retreat(live, 0)
        except NATIVE_ERRORS:
            self._evictor.lose(live)
        live.right_tokens = None
        self._layout.empty(live.caches)
        live.measure()
        self._states.coalesce_all(nodes)
