"""Windows: the keys and values of sliding layers that the nodes of a tree hold, for some of their tokens.

    root ──[0, 900)── a ──[900, 1400)── b        checkpoints at 900 and 1,400, a window of 512
           ....######         ##########         # is a stored token: [388, 900) and [900, 1400)

A resume point needs the last tokens before it. If `lacking` finds a gap in them, no request can resume there.

A checkpoint needs the tokens of its window. `nearest` is the first checkpoint at the end of a node or below. The
node's tokens before the window of `nearest` are unneeded. Requests may still resume on unneeded tokens, but these are
dropped first when bytes are short.

Each operation is O(pieces of state in the nodes concerned). `renear` is O(children) for each node up the path whose
`nearest` changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radixcache.adapters.contract import NEVER, Range, Spans, Window, common, missing, tokens_in, widen
from radixcache.layers.sizes import AnyLayout
from radixcache.ledger import Account
from radixcache.tree.radix_tree import Node

#: A node of a StateTree; its payload is a NodeState.
StateNode = Node[Any]


class Windows:
    """The window tokens on the nodes of one tree."""

    def __init__(self, layout: AnyLayout, copied: Callable[..., tuple[Any, ...] | None], account: Account) -> None:
        self._layout, self._copied, self._account = layout, copied, account
        self.nbytes = 0
        # Nodes with more tokens than checkpoints need, by id().
        self._unneeded: dict[int, StateNode] = {}

    def set(self, node: StateNode, spans: Spans | None) -> None:
        state = node.payload
        if spans is state.windows:
            return
        before = 0 if state.windows is None else state.windows.nbytes
        after = 0 if spans is None else spans.nbytes
        state.windows = spans if after else None
        self.nbytes += after - before
        if after or before:
            self._account.add("checkpoint_bytes", after - before)
            state.reweigh()
            self._file(node)

    def joined(self, node: StateNode, child: StateNode) -> Spans | None:
        upper, lower = node.payload.windows, child.payload.windows
        if upper is None or lower is None:
            found = upper or lower
            return None if found is None else widen(found, node.start, child.end)
        merged = self._copied(self._layout.merge, upper, lower)
        return None if merged is None else merged[0]

    def renear(self, node: StateNode) -> None:
        """Update `nearest` of a node that got or lost a checkpoint, and of the nodes above."""
        nearest = self._nearest(node) if self._layout.windows else node.payload.nearest
        above: StateNode | None = node
        while above is not None and above.payload is not None and nearest != above.payload.nearest:
            before, above.payload.nearest = above.payload.nearest, nearest
            self._file(above)
            above = above.parent
            if above is None or above.payload is None or above.payload.checkpoint is not None:
                return
            # Look at all children only if the nearest checkpoint is gone.
            is_gone = before == above.payload.nearest < nearest
            nearest = self._nearest(above) if is_gone else min(nearest, above.payload.nearest)

    def store(self, tip: StateNode, spans: Spans) -> None:
        """Store those tokens of `spans` that the path to `tip` lacks."""
        for node in tip.path():
            if node.start < spans.end and node.end > spans.start:
                own, bounds = node.payload.windows, [(node.start, node.end)]
                inside = {each: common(self._layout.stored(spans, each), bounds) for each in self._layout.windows}
                wanted = self.new(inside, [] if own is None else [own])
                if any(wanted.values()):
                    found = self._copied(self._layout.within, spans, wanted)
                    assert found is not None, node
                    more = widen(found[0], node.start, node.end)
                    self.set(node, more if own is None else self._layout.with_more(own, more))

    def stored(self, path: Sequence[StateNode]) -> list[Spans]:
        """The state on the nodes of a path, in order."""
        return [node.payload.windows for node in path if node.payload.windows is not None]

    def lacking(self, path: Sequence[StateNode], offset: int, more: Sequence[Spans] = ()) -> dict[Window, list[Range]]:
        """The tokens that a resume point at `offset` needs and that neither the path nor `more` has."""
        found = {}
        for window in self._layout.windows if offset else ():
            needs = window.needs(offset)
            near = [each for each in (*self.stored(path), *more) if each.end > needs[-1][0] or each.start < window.keep]
            if lacking := self.new({window: needs}, near)[window]:
                found[window] = lacking
        return found

    def new(self, wanted: Mapping[Window, Sequence[Range]], held: Sequence[Spans]) -> dict[Window, list[Range]]:
        """The wanted tokens that are not held."""
        return {
            window: missing(its, sorted(each for spans in held for each in self._layout.stored(spans, window)))
            for window, its in wanted.items()
        }

    def needed_bytes(self, node: StateNode) -> int:
        """Bytes of a node's state that checkpoints need."""
        return self._bytes(node, node.payload.nearest)

    def bytes_only_for(self, node: StateNode) -> int:
        """Bytes that only the checkpoint at a node's end needs."""
        nbytes, without = 0, NEVER
        below: StateNode | None = None
        for each in reversed(node.path()) if self._layout.windows else ():
            nearest = each.payload.nearest
            if each is not node and each.payload.checkpoint is not None:
                break
            for child in each.children.values():
                if child is not below and child.payload.nearest < without:
                    without = child.payload.nearest
                    if without <= nearest:
                        return nbytes
            nbytes += self.needed_bytes(each) - self._bytes(each, without)
            below = each
        return nbytes

    def drop_unneeded(self, over: Callable[[], int]) -> bool:
        """While `over()` is not 0, drop unneeded state, least recently used first. Returns whether any was dropped."""
        dropped = False
        for node in sorted(self._unneeded.values(), key=lambda each: (each.payload.entry.last_used, -each.end)):
            if not over():
                break
            cut = self._copied(self._layout.within, node.payload.windows, self._needed(node), is_spare=True)
            if cut is not None:
                self.set(node, cut[0])
                dropped = True
        return dropped

    def check(self, node: StateNode) -> None:
        """Assert S7 of StateTree."""
        state = node.payload
        if not self._layout.windows:
            assert state.windows is None, node
            return
        assert state.nearest == self._nearest(node), (node, state.nearest)
        for window in self._layout.windows:
            held = [] if state.windows is None else self._layout.stored(state.windows, window)
            assert held == common(held, [(node.start, node.end)]), (node, held)
        assert self._has_unneeded(node) == (id(node) in self._unneeded), node
        assert state.checkpoint is None or not self.lacking(node.path(), node.end), node

    def _nearest(self, node: StateNode) -> int:
        if node.payload.checkpoint is not None:
            return node.end
        return min((child.payload.nearest for child in node.children.values()), default=NEVER)

    def _needed(self, node: StateNode) -> dict[Window, list[Range]]:
        nearest, bounds = node.payload.nearest, [(node.start, node.end)]
        return {
            window: [] if nearest == NEVER else common(window.needs(nearest), bounds) for window in self._layout.windows
        }

    def _bytes(self, node: StateNode, nearest: int) -> int:
        """Bytes of a node's state that a checkpoint at `nearest` needs."""
        spans, layout, nbytes = node.payload.windows, self._layout, 0
        if spans is not None and nearest != NEVER:
            for window in layout.windows:
                needed = common(layout.stored(spans, window), window.needs(nearest))
                nbytes += tokens_in(needed) * layout.stored_window_bytes(window)
        return nbytes

    def _file(self, node: StateNode) -> None:
        if self._has_unneeded(node):
            self._unneeded[id(node)] = node
        else:
            self._unneeded.pop(id(node), None)

    def _has_unneeded(self, node: StateNode) -> bool:
        if (spans := node.payload.windows) is None:
            return False
        return any(missing(self._layout.stored(spans, each), its) for each, its in self._needed(node).items())
