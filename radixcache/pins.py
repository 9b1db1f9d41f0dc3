"""Pins: stored prefixes that stay whatever the pressure.

A pin holds the node at which its tokens end; everything above a node stays because the node does. A node without a
checkpoint of its own also holds the nearest one above, or a model with point layers could not resume on it.

Invariant:

  I1  A node's `pins` count is the number of pinned sequences that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixcache.evictor import Evictor
from radixcache.layout import Layout
from radixcache.state_tree import StateNode, StateTree, state_of
from radixcache.tree import Keys

Name = tuple[str, bytes]


@dataclass(slots=True)
class Pin:
    """The nodes that one pinned sequence holds, and how many times it was pinned."""

    nodes: list[StateNode]
    count: int = 1


class Pins:
    """The pinned sequences of one cache."""

    def __init__(self, layout: Layout, states: StateTree, evictor: Evictor, budget_bytes: int) -> None:
        self._layout = layout
        self._states = states
        self._evictor = evictor
        self._budget_bytes = budget_bytes
        self._pins: dict[Name, Pin] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all that the pins keep: the spans of their paths, and the checkpoints on them."""
        return sum(self._cost(node, node.end) for node in self._kept().values())

    def add(self, keys: Keys, namespace: str) -> None:
        """Pin a stored sequence, once more if it is pinned already.

        Raises:
            ValueError: it is not stored whole, or the pins would not fit the budget.
        """
        match = self._states.match(keys, namespace)
        if match.offset < len(keys):
            raise ValueError(f"only {match.offset} of {len(keys)} tokens are stored; prefill them before pinning.")
        name = (namespace, keys.tobytes())
        if name in self._pins:
            self._pins[name].count += 1
            return
        kept = self._kept()
        wanted = self.nbytes + sum(self._cost(n, match.offset) for n in match.node.path() if id(n) not in kept)
        if wanted > self._budget_bytes:
            raise ValueError(f"pins would keep {wanted} bytes; the budget is {self._budget_bytes} bytes.")
        node = match.node if match.node.end == match.offset else self._states.split(match.node, match.offset)
        nodes = [node]
        if self._layout.has_points and state_of(node).checkpoint is None:
            nodes += [each for each in node.path()[:-1] if state_of(each).checkpoint is not None][-1:]
        self._pins[name] = Pin(nodes)
        for each in nodes:
            self._states.pin(each, 1)

    def remove(self, keys: Keys, namespace: str) -> None:
        """Take one pin back; the last one lets go.

        Raises:
            ValueError: the sequence is not pinned.
        """
        name = (namespace, keys.tobytes())
        if name not in self._pins:
            raise ValueError(f"these {len(keys)} tokens are not pinned in namespace {namespace!r}.")
        self._pins[name].count -= 1
        if self._pins[name].count == 0:
            self._let_go(name)

    def void(self, node: StateNode) -> None:
        """A node's state was lost: the pins that hold it go."""
        for name in [name for name, pin in self._pins.items() if any(each is node for each in pin.nodes)]:
            for each in self._pins.pop(name).nodes:
                self._states.pin(each, -1)

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._pins):
            self._let_go(name)

    def check(self) -> None:
        """Assert I1."""
        counts: dict[int, int] = {}
        for pin in self._pins.values():
            for node in pin.nodes:
                counts[id(node)] = counts.get(id(node), 0) + 1
        found = {id(node): state_of(node).pins for node in self._states.tree.nodes() if state_of(node).pins}
        assert found == counts, (found, counts)

    def _let_go(self, name: Name) -> None:
        for node in self._pins.pop(name).nodes:
            self._states.pin(node, -1)
            if node.payload is not None:
                self._evictor.let_go(node)

    def _kept(self) -> dict[int, StateNode]:
        return {id(each): each for pin in self._pins.values() for node in pin.nodes for each in node.path()}

    def _cost(self, node: StateNode, end: int) -> int:
        checkpoint = state_of(node).checkpoint if node.end <= end else None
        tokens = min(node.end, end) - node.start
        return tokens * self._layout.token_bytes + (0 if checkpoint is None else checkpoint.nbytes)
