"""Windows: what the nodes of a tree have of layers with sliding windows: keys and values of some of their tokens.

    root ──[0, 900)── a ──[900, 1400)── b        checkpoints at 900 and 1,400, a window of 512
           ....######         ##########         #: kept, [388, 900) and [900, 1400): each token once

A checkpoint needs the last tokens in front of it. Within a node that is its end, from where the nearest checkpoint at
its end or below it needs it (`nearest`): so it is known for each node by itself, however many share it. What lies
before that nobody needs; it lets requests resume there all the same, and goes first when room is short.

Each operation is O(pieces of state in the nodes concerned); keeping `nearest` right is O(children) of a node without a
checkpoint, for as many nodes up as it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radixcache.adapters.contract import NEVER, Range, Spans, Window, common, missing, tokens_in, widened
from radixcache.layers.layout import Layout
from radixcache.tree.entries import StateNode

#: Runs a copy that says how many bytes it copied, again where it fails; with True it may fail for good: None.
Copied = Callable[[Callable[[], tuple[Any, int]], bool], tuple[Any, ...] | None]


class Windows:
    """State of windows on the nodes of one tree.

    Args:
        copied: runs what copies.
        changed: is told of a node how many bytes more it has.
    """

    def __init__(self, layout: Layout, copied: Copied, changed: Callable[[StateNode, int], None]) -> None:
        self._layout = layout
        self._copied = copied
        self._changed = changed
        #: Bytes of all of it.
        self.nbytes = 0
        #: Nodes that have more than checkpoints need, by id().
        self._unneeded: dict[int, StateNode] = {}

    # State of a node

    def set(self, node: StateNode, spans: Spans | None) -> None:
        """Give a node state for some of its tokens, in place of what it has, or take it away."""
        state = node.payload
        before = 0 if state.windows is None else state.windows.nbytes
        after = 0 if spans is None else spans.nbytes
        state.windows = spans if after else None
        self.nbytes += after - before
        if after or before:
            self._changed(node, after - before)
            self._file(node)

    def joined(self, node: StateNode, child: StateNode) -> Spans | None:
        """What a node and its child have, as that of one node."""
        upper, lower = node.payload.windows, child.payload.windows
        if upper is None or lower is None:
            found = upper or lower
            return None if found is None else widened(found, node.start, child.end)
        merged = self._copied(lambda: self._layout.merge(upper, lower), False)
        return None if merged is None else merged[0]

    def renear(self, node: StateNode) -> None:
        """A node got a checkpoint, or lost it: work out which one is the nearest, for it and those above."""
        nearest = self._nearest(node) if self._layout.windows else node.payload.nearest
        above: StateNode | None = node
        while above is not None and above.payload is not None and nearest != above.payload.nearest:
            before, above.payload.nearest = above.payload.nearest, nearest
            self._file(above)
            above = above.parent
            if above is None or above.payload is None or above.payload.checkpoint is not None:
                return
            # Only where the nearest one went all children are asked.
            is_gone = before == above.payload.nearest < nearest
            nearest = self._nearest(above) if is_gone else min(nearest, above.payload.nearest)

    # A path

    def store(self, tip: StateNode, spans: Spans) -> None:
        """Give the path to `tip` what of this it does not have yet."""
        for node in tip.path():
            if node.start < spans.end and node.end > spans.start:
                own = node.payload.windows
                wanted = {window: self._new(node, spans, window) for window in self._layout.windows}
                if any(wanted.values()):
                    found = self._copied(lambda its=wanted: self._layout.within(spans, its), False)  # type: ignore[misc]
                    assert found is not None, node
                    more = widened(found[0], node.start, node.end)
                    self.set(node, more if own is None else self._layout.with_more(own, more))

    def stored(self, path: Sequence[StateNode]) -> list[Spans]:
        """What the nodes of a path have, in order."""
        return [node.payload.windows for node in path if node.payload.windows is not None]

    def lacking(self, path: Sequence[StateNode], offset: int, more: Sequence[Spans] = ()) -> dict[Window, list[Range]]:
        """What a checkpoint at `offset` needs, and is neither on the path nor among more; empty: nothing."""
        found = {}
        for window in self._layout.windows if offset else ():
            needs = window.needs(offset)
            near = [each for each in (*self.stored(path), *more) if each.end > needs[-1][0] or each.start < window.keep]
            lacking = missing(needs, sorted(its for spans in near for its in self._layout.stored(spans, window)))
            if lacking:
                found[window] = lacking
        return found

    def new(self, wanted: Mapping[Window, Sequence[Range]], held: Sequence[Spans]) -> dict[Window, list[Range]]:
        """What of these tokens is not among what is held."""
        return {
            window: missing(its, sorted(each for spans in held for each in self._layout.stored(spans, window)))
            for window, its in wanted.items()
        }

    # Bytes

    def needed_bytes(self, node: StateNode) -> int:
        """Bytes of what a node has that checkpoints need."""
        return self._bytes(node, node.payload.nearest)

    def bytes_only_for(self, node: StateNode) -> int:
        """Bytes that the checkpoint at a node's end needs and no other does."""
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
        """Drop what no checkpoint needs while `over()` says so; whether there was any."""
        dropped = False
        for node in sorted(self._unneeded.values(), key=lambda each: (each.payload.entry.last_used, -each.end)):
            if not over():
                break
            spans, needed = node.payload.windows, self._needed(node)
            assert spans is not None, node
            cut = self._copied(lambda its=spans, only=needed: self._layout.within(its, only), True)  # type: ignore[misc]
            if cut is not None:
                self.set(node, cut[0])
                dropped = True
        return dropped

    def check(self, node: StateNode) -> None:
        """Assert that a node's state is inside it, and all there that its checkpoint needs."""
        state = node.payload
        if not self._layout.windows:
            assert state.windows is None, node
            return
        assert state.nearest == self._nearest(node), (node, state.nearest)
        is_unneeded = False
        for window, needed in self._needed(node).items():
            held = [] if state.windows is None else self._layout.stored(state.windows, window)
            assert held == common(held, [(node.start, node.end)]), (node, held)
            is_unneeded |= bool(missing(held, needed))
        assert is_unneeded == (id(node) in self._unneeded), node
        assert state.checkpoint is None or not self.lacking(node.path(), node.end), node

    # Private

    def _nearest(self, node: StateNode) -> int:
        if node.payload.checkpoint is not None:
            return node.end
        return min((child.payload.nearest for child in node.children.values()), default=NEVER)

    def _needed(self, node: StateNode) -> dict[Window, list[Range]]:
        """The tokens of a node that checkpoints need."""
        nearest, bounds = node.payload.nearest, [(node.start, node.end)]
        return {
            window: [] if nearest == NEVER else common(window.needs(nearest), bounds) for window in self._layout.windows
        }

    def _new(self, node: StateNode, spans: Spans, window: Window) -> list[Range]:
        """The tokens of a node that these have and it has not."""
        own = node.payload.windows
        held = [] if own is None else self._layout.stored(own, window)
        return missing(common(self._layout.stored(spans, window), [(node.start, node.end)]), held)

    def _bytes(self, node: StateNode, nearest: int) -> int:
        """Bytes of what a node has that is needed where this is the nearest checkpoint."""
        spans, nbytes = node.payload.windows, 0
        for window in () if spans is None or nearest == NEVER else self._layout.windows:
            held = [] if spans is None else self._layout.stored(spans, window)
            nbytes += tokens_in(common(held, window.needs(nearest))) * self._layout.window_bytes(window)
        return nbytes

    def _file(self, node: StateNode) -> None:
        spans = node.payload.windows
        needed = {} if spans is None else self._needed(node)
        if any(missing(self._layout.stored(spans, window), its) for window, its in needed.items() if spans):
            self._unneeded[id(node)] = node
        else:
            self._unneeded.pop(id(node), None)
