"""Pins: stored prefixes that eviction must not take, until they are unpinned or their time is up.

A pinned sequence holds the node at which its tokens end, and so the nodes above stay too. In models with point layers,
if this node has no checkpoint, the sequence also holds the nearest node above that has one. A sequence is held while it
has any pin: it may have several unnamed pins, and one pin per name.

Invariants, asserted by `check`:

  I1  A node's `pins` count is the number of pinned sequences that hold it.
  I2  A pinned sequence has at least one pin; a name stands for exactly one pin of its namespace.
  I3  No pin stays after its last request. A pin with a time limit ends when a public call begins: the clock is read
      only then, and only if there is such a pin.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from radixcache.adapters.contract import Checkpoint
from radixcache.settings import Settings
from radixcache.tokens import Keys, Quarantine
from radixcache.tree.state_tree import StateNode, StateTree, Use

#: A namespace and the bytes of the keys that are pinned in it.
Pinned = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class NamedPin:
    """What a named pin keeps.

    Attributes:
        namespace: the namespace of the prefix.
        tokens: length of the pinned prefix.
        kept_bytes: bytes of spans and checkpoints on its path, also those that other pins keep too.
        requests_left, seconds_left: the pin ends after this many requests or seconds, whichever comes first; both None:
            the pin stays until unpin().
    """

    namespace: str
    tokens: int
    kept_bytes: int
    requests_left: int | None
    seconds_left: float | None = None


@dataclass(slots=True, eq=False)
class Pin:
    """One pin: the bytes of its keys, its name, and the request number and clock second at which it ends.

    In exact mode `asked` may have more keys than the pinned sequence, which has only whole chunks.
    """

    asked: bytes
    name: str | None = None
    last_request: int | None = None
    ends_s: float | None = None

    def has_ended(self, requests: int, now_s: float | None = None) -> bool:
        if self.ends_s is not None and now_s is not None and self.ends_s <= now_s:
            return True
        return self.last_request is not None and self.last_request <= requests


@dataclass(slots=True)
class PinnedPath:
    """A pinned sequence: its length, the nodes that it holds, and its pins, oldest first."""

    length: int
    nodes: list[StateNode]
    pins: list[Pin]


class Pins:
    """The pinned sequences of one cache."""

    def __init__(self, settings: Settings, states: StateTree, quarantine: Quarantine) -> None:
        self._settings, self._states, self._quarantine = settings, states, quarantine
        self._layout = states.layout
        self.budget_bytes = states.account.ledger.budget_bytes
        self._pinned: dict[Pinned, PinnedPath] = {}
        self._named: dict[tuple[str, str], tuple[Pinned, Pin]] = {}
        self.requests = 0  # how many requests have passed
        #: The request and the second at which the next pin ends; and nodes whose pins have ended, mostly none.
        self.next_end: int | None = None
        self.next_end_s: float | None = None
        self.unpinned: list[StateNode] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the pins hold: spans and checkpoints on the paths of pinned sequences."""
        return sum(self._cost(node, node.end) for node in self._held().values())

    def count(self, namespace: str | None = None, named: bool = False) -> int:
        """Pins of one namespace (None: of all); `named`: only those with a name."""
        paths = [each for (space, _), each in self._pinned.items() if namespace in (None, space)]
        return sum(1 for each in paths for pin in each.pins if pin.name is not None or not named)

    def named(self, namespace: str) -> dict[str, NamedPin]:
        """The named pins of one namespace, in the order they were made."""
        found = {}
        for (space, name), (sequence, pin) in self._named.items():
            if space == namespace:
                path = self._pinned[sequence]
                nbytes = sum(self._cost(node, node.end) for node in path.nodes[0].path())
                left = None if pin.last_request is None else pin.last_request - self.requests
                left_s = None if pin.ends_s is None else pin.ends_s - self._settings.seconds()
                found[name] = NamedPin(namespace, path.length, nbytes, left, left_s)
        return found

    def names_at(self) -> dict[int, list[str]]:
        """Names of the pins that end at a node, by the node's id()."""
        found: dict[int, list[str]] = {}
        for (_, name), (sequence, _) in self._named.items():
            found.setdefault(id(self._pinned[sequence].nodes[0]), []).append(name)
        return found

    def whole_chunks(self, keys: Keys, length: int | None = None) -> Keys:
        """The first `length` keys (None: all), in exact mode cut to whole chunks."""
        end = len(keys) if length is None else length
        end -= end % self._settings.grid_tokens
        if end == 0:
            raise ValueError(f"{len(keys)} tokens; wanted at least a whole chunk of {self._settings.step_size}.")
        return keys[:end]

    def stored_tokens(self, keys: Keys, namespace: str) -> int:
        return self._states.match(keys, namespace).offset

    def require_allowed(self, keys: Keys, namespace: str) -> None:
        start = self._quarantine.limit(keys, namespace)
        if start < len(keys):
            raise ValueError(
                f"only {self.stored_tokens(keys, namespace)} of {len(keys)} tokens are stored; from offset {start} on"
                " they are quarantined, as verify found wrong state. clear_quarantine() ends that."
            )

    def require_room(
        self, keys: Keys, namespace: str, name: str | None, checkpoint_bytes: int, requests: int = 0
    ) -> None:
        """Raise ValueError if a pin of a sequence that is not stored yet will not fit the budget.

        Args:
            requests: how many requests will pass before the pin is made; pins that end meanwhile do not count.
        """
        replaced = None if name is None else self._named.get((namespace, name))
        if (namespace, keys.tobytes()) not in self._pinned:
            self._require_fit(keys, namespace, replaced, checkpoint_bytes, requests)

    def add(
        self, keys: Keys, namespace: str, name: str | None, ttl_requests: int | None, ttl_s: float | None = None
    ) -> None:
        """Add a pin to a stored sequence, which may have pins already. A name that is in use moves to this sequence.

        In exact mode only whole chunks are pinned, and the last chunk only if it is stored.

        Raises:
            ValueError: the sequence is not stored whole or is quarantined, or the pins would not fit the budget.
                Nothing was changed.
        """
        pinned = self.whole_chunks(keys)
        if self._settings.exact and self.stored_tokens(pinned, namespace) < len(pinned):
            # A prefill of exactly these tokens stores only the chunks before the last chunk.
            pinned = self.whole_chunks(keys, len(keys) - 1)
        self.require_allowed(pinned, namespace)
        match = self._states.match(pinned, namespace)
        if match.offset < len(pinned):
            raise ValueError(f"only {match.offset} of {len(pinned)} tokens are stored; prefill them before pinning.")
        sequence = (namespace, pinned.tobytes())
        replaced = None if name is None else self._named.get((namespace, name))
        if sequence not in self._pinned:
            self._require_fit(pinned, namespace, replaced, 0)
            self._pinned[sequence] = PinnedPath(len(pinned), self._nodes_to_hold(match.node, match.offset), [])
            for each in self._pinned[sequence].nodes:
                self._states.pin(each, 1)
        last_request = None if ttl_requests is None else self.requests + ttl_requests
        pin = Pin(keys.tobytes(), name, last_request, None if ttl_s is None else self._settings.seconds() + ttl_s)
        self._pinned[sequence].pins.append(pin)
        if replaced is not None:
            self._end(*replaced)
        if name is not None:
            self._named[namespace, name] = (sequence, pin)
        self._note_next_end()
        self._book()

    def remove(self, keys: Keys, namespace: str) -> None:
        """End one pin that was made for these keys: the newest unnamed pin or, if there is none, the newest pin.

        Raises:
            ValueError: the sequence is not pinned.
        """
        asked = keys.tobytes()
        here = [(sequence, path) for sequence, path in self._pinned.items() if sequence[0] == namespace]
        pins = [(sequence, pin) for sequence, path in here for pin in path.pins if pin.asked == asked]
        if not pins:
            raise ValueError(f"these {len(keys)} tokens are not pinned in namespace {namespace!r}.")
        # In exact mode a newer pin for the same keys may hold a longer sequence.
        pins.sort(key=lambda each: len(each[0][1]))
        self._end(*next((each for each in reversed(pins) if each[1].name is None), pins[-1]))
        self._book()

    def remove_named(self, name: str, namespace: str) -> None:
        """End the pin of that name.

        Raises:
            ValueError: the namespace has no pin of that name.
        """
        if (namespace, name) not in self._named:
            known = ", ".join(repr(each) for space, each in self._named if space == namespace) or "none"
            raise ValueError(f"no pin is named {name!r} in namespace {namespace!r}; named pins there: {known}.")
        self._end(*self._named[namespace, name])
        self._book()

    def end_passed(self) -> None:
        """End the pins whose last request has passed."""
        if self.next_end is not None and self.requests >= self.next_end:
            self._end_all(None)

    def end_expired(self) -> None:
        """End the pins whose time is over."""
        if self.next_end_s is not None and (now_s := self._settings.seconds()) >= self.next_end_s:
            self._end_all(now_s)

    def _end_all(self, now_s: float | None) -> None:
        for sequence, path in list(self._pinned.items()):
            for pin in [pin for pin in path.pins if pin.has_ended(self.requests, now_s)]:
                self._end(sequence, pin)
        self._note_next_end()
        self._book()

    def _note_next_end(self) -> None:
        pins = [pin for path in self._pinned.values() for pin in path.pins]
        self.next_end = min((pin.last_request for pin in pins if pin.last_request is not None), default=None)
        self.next_end_s = min((pin.ends_s for pin in pins if pin.ends_s is not None), default=None)

    def void(self, node: StateNode) -> None:
        """Drop the pins of all sequences that hold this node, whose state was lost."""
        lost = [sequence for sequence, path in self._pinned.items() if any(each is node for each in path.nodes)]
        for sequence in lost:
            for pin in self._pinned[sequence].pins:
                if pin.name is not None:
                    del self._named[sequence[0], pin.name]
            for each in self._pinned.pop(sequence).nodes:
                self._states.pin(each, -1)
        if lost:
            self._book()

    def clear(self, namespace: str | None = None) -> None:
        """End the pins of one namespace (None: of all)."""
        for sequence, path in list(self._pinned.items()):
            if namespace not in (None, sequence[0]):
                continue
            for pin in list(path.pins):
                self._end(sequence, pin)
        self._book()

    def take_unpinned(self) -> list[StateNode]:
        """The nodes whose pins have ended since the last call."""
        nodes, self.unpinned = self.unpinned, []
        return nodes

    def check(self) -> None:
        """Assert I1 to I3."""
        counts: dict[int, int] = {}
        for path in self._pinned.values():
            for node in path.nodes:
                counts[id(node)] = counts.get(id(node), 0) + 1
            assert path.pins and path.nodes[0].end == path.length, (path.length, path.nodes, path.pins)
            assert not any(pin.has_ended(self.requests) for pin in path.pins), path.pins
        found = {id(node): node.payload.pins for node in self._states.tree.nodes() if node.payload.pins}
        assert found == counts, (found, counts)
        named = {(sequence[0], pin.name) for sequence, path in self._pinned.items() for pin in path.pins if pin.name}
        assert named == set(self._named), (named, set(self._named))
        for (_, name), (sequence, pin) in self._named.items():
            assert pin.name == name and any(each is pin for each in self._pinned[sequence].pins), name

    def _nodes_to_hold(self, node: StateNode, end: int) -> list[StateNode]:
        if node.end > end:
            node = self._states.split(node, end)
        nodes = [node]
        is_bare = self._layout.windows and not self._layout.has_states and node.payload.checkpoint is None
        if is_bare and not self._states.windows.lacking(node.path(), node.end):
            # Without a checkpoint, eviction would take the window tokens for this offset first.
            use = Use(node.payload.entry.last_used)
            self._states.set_checkpoint(node, Checkpoint(node.end, [], 0, "mark"), use)
        if self._layout.has_points and node.payload.checkpoint is None:
            nodes += [each for each in node.path()[:-1] if each.payload.checkpoint is not None][-1:]
        return nodes

    def _require_fit(
        self, keys: Keys, namespace: str, replaced: tuple[Pinned, Pin] | None, checkpoint_bytes: int, requests: int = 0
    ) -> None:
        """Raise ValueError if a sequence, perhaps not stored whole yet, does not fit next to the pins that stay."""
        last = self.requests + requests

        def ends(sequence: Pinned, pin: Pin) -> bool:
            return (sequence, pin) == replaced or pin.has_ended(last)

        gone = {sequence for sequence, path in self._pinned.items() if all(ends(sequence, pin) for pin in path.pins)}
        held = self._held(without=gone)
        match = self._states.match(keys, namespace)
        wanted = sum(self._cost(node, node.end) for node in held.values())
        wanted += sum(self._cost(node, match.offset) for node in match.node.path() if id(node) not in held)
        wanted += (len(keys) - match.offset) * self._layout.stored_token_bytes + checkpoint_bytes
        account = self._states.account
        elsewhere = account.ledger.pinned_bytes - account.pinned_bytes
        if wanted + elsewhere > self.budget_bytes:
            others = f", {elsewhere} of them for caches that share the budget" if elsewhere else ""
            raise ValueError(
                f"pins would keep {wanted + elsewhere} bytes{others}; the budget is {self.budget_bytes} bytes."
            )

    def _end(self, sequence: Pinned, pin: Pin) -> None:
        path = self._pinned[sequence]
        path.pins.remove(pin)
        if pin.name is not None:
            del self._named[sequence[0], pin.name]
        if path.pins:
            return
        del self._pinned[sequence]
        for node in path.nodes:
            self._states.pin(node, -1)
        self.unpinned += path.nodes

    def _held(self, without: Collection[Pinned] = ()) -> dict[int, StateNode]:
        """All nodes that pins hold, by id()."""
        paths = [each for sequence, each in self._pinned.items() if sequence not in without]
        return {id(each): each for path in paths for node in path.nodes for each in node.path()}

    def _cost(self, node: StateNode, end: int) -> int:
        checkpoint = node.payload.checkpoint if node.end <= end else None
        tokens = min(node.end, end) - node.start
        nbytes = tokens * self._layout.stored_token_bytes + self._states.windows.needed_bytes(node)
        return nbytes + (0 if checkpoint is None else checkpoint.nbytes)

    def _book(self) -> None:
        """Tell the ledger the pinned bytes, so that caches on it do not pin the same budget twice."""
        self._states.account.pinned_bytes = self.nbytes
