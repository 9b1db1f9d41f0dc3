"""Events and History: what happens to stored state, for a listener now and for `explain` later. Never imports MLX.

    stored       tokens [start, end) became a stored prefix; with `state` "checkpoint", point state at `end` did
    resumed      a request resumes at `end`; every request makes one such event, also with end 0
    evicted      the tokens, or the checkpoint at `end`, are gone
    split        a node was cut at offset `at`
    merged       a node was joined with its only child at offset `at`
    paged_out    spans were copied out of the live buffers
    paged_in     spans were copied into the live buffers
    quarantined  state was found wrong; events `evicted` with `was_wrong` come first, for the removed tokens

Events reach the listener in order, after the call that caused them has released the lock. So a listener may call the
cache. An Exception in the listener is counted and never reaches the caller; the first one gives a warning.

History holds recently evicted pieces and recent prompts. A piece has the edges of its path, shared with the tree, and
the tick at which each part was evicted. If a leaf goes in steps, and its parent after it, both make one piece:

    root ── a [0, 40) ── b [40, 100)      b loses [80, 100) at tick 5, the rest at 6; a goes at 7
    piece   edges a, b    parts [80, 100) 5, [40, 80) 6, [0, 40) 7

Keys are compared in `explain`, not at an eviction: `evicted` is O(depth of the node), `asked` O(1).

Invariants; `History.check` asserts H1 and H2:

  E1  At most MAX_WAITING events wait; `dropped` counts the events beyond.
  E2  Without a listener no Event is made.
  H1  Pieces, the keys on their paths, prompts and their keys stay within bounds; the oldest go first.
  H2  The parts of a piece are adjacent, the deepest first. The deepest part ends where the last edge ends.

Not thread-safe: PrefixCache holds the only lock.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from radixcache.errors import describe
from radixcache.ledger import Lock
from radixcache.tokens import Keys, common_length
from radixcache.tree.radix_tree import Node

#: Most events that wait, and most that one call of the cache hands over.
MAX_WAITING = 4096
#: Most evicted pieces, and most keys on their paths. A key takes 8 bytes, or less if pieces share its edge.
MAX_PIECES = 1024
MAX_PIECE_KEYS = 1 << 22
#: Most prompts of a namespace, most keys of all prompts (8 bytes each), and most namespaces with prompts.
MAX_PROMPTS = 8
MAX_PROMPT_KEYS = 1 << 20
MAX_NAMESPACES = 1024

Detail = Mapping[str, Any]


class EventKind(StrEnum):
    """What happened to stored state; see the attributes of Event."""

    STORED = "stored"
    RESUMED = "resumed"
    EVICTED = "evicted"
    SPLIT = "split"
    MERGED = "merged"
    PAGED_OUT = "paged_out"
    PAGED_IN = "paged_in"
    QUARANTINED = "quarantined"


# In Python 3.11, looking up a member on the class takes a call.
STORED, RESUMED, EVICTED, SPLIT, MERGED, PAGED_OUT, PAGED_IN, QUARANTINED = EventKind


class Event(NamedTuple):
    """Something that happened to the tokens [start, end) of one namespace.

    Attributes:
        tick: number of the request, or the tick of the cache's clock.
        start, end: offsets in tokens; equal for a checkpoint.
        nbytes: bytes of the state; 0 where no state was moved, made or dropped.
        detail: by kind. stored, evicted: `state`, "tokens" or "checkpoint"; evicted tokens also `was_wrong`, whether
            verification found them wrong. split, merged: `at`. resumed: `prompt_tokens`, `matched_tokens`, `reason`
            (None or a Reason), `by` ("begin", "begin_many" or "fetch"). quarantined: `mismatch`, a Mismatch; the
            range is on the request's own path.
    """

    kind: EventKind
    tick: int
    namespace: str
    start: int
    end: int
    nbytes: int
    detail: Detail


OnEvent = Callable[[Event], object]
#: The fields of a waiting Event.
_Fields = tuple[EventKind, int, str, int, int, int, Detail]


class Events:
    """The events of one cache on their way to its listener. Callers of `emit` hold the lock.

    The methods that run for each request check `is_on` first: without a listener, they build no `detail`.

    Attributes:
        history: evictions and prompts; recorded if `remembers`, with or without a listener.
        tick: the current tick, set by the cache.
        failures, dropped: calls of the listener that raised; events dropped because too many waited.
    """

    def __init__(self, on_event: OnEvent | None = None, lock: Lock | None = None, *, remembers: bool = True) -> None:
        if on_event is not None and not callable(on_event):
            raise ValueError(f"on_event is a {type(on_event).__name__}; wanted a callable that takes an Event.")
        self._on_event, self._lock = on_event, lock or Lock()
        self._waiting: deque[_Fields] = deque()
        self._handing_over = threading.Lock()
        self._hand_over = self.hand_over
        self.is_on = on_event is not None
        self.history, self.remembers = History(), remembers
        self.tick = self.failures = self.dropped = 0

    def stored(self, node: Node[Any], start: int, nbytes: int, state: str = "tokens") -> None:
        """The tokens [start, node.end), or with `state` "checkpoint" point state at the end, became a stored prefix."""
        if self.is_on:
            self.emit(STORED, node.namespace, start, node.end, nbytes, {"state": state})

    def asked(self, keys: Keys, namespace: str, taken: int, nbytes: int, detail: Detail) -> None:
        """A request resumes after the first `taken` tokens of its prompt."""
        if self.remembers:
            self.history.asked(namespace, keys)
        if self.is_on:
            self.emit(RESUMED, namespace, 0, taken, nbytes, {"prompt_tokens": len(keys), **detail})

    def evicted_checkpoint(self, node: Node[Any], nbytes: int) -> None:
        if self.remembers:
            self.history.evicted_checkpoint(node, self.tick)
        self.emit(EVICTED, node.namespace, node.end, node.end, nbytes, {"state": "checkpoint"})

    def paged_in(self, node: Node[Any], start: int, end: int, token_bytes: int) -> None:
        self.emit(PAGED_IN, node.namespace, start, end, token_bytes * (end - start), {})

    def emit(self, kind: EventKind, namespace: str, start: int, end: int, nbytes: int, detail: Detail) -> None:
        """Hand an event to the listener, if there is one, once the lock is released."""
        if not self.is_on:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((kind, self.tick, namespace, start, end, nbytes, detail))
        else:
            self.dropped += 1
        after = self._lock.afterwards
        if self._hand_over not in after:
            after.append(self._hand_over)

    def hand_over(self) -> None:
        """Call the listener with the waiting events, unless another thread is doing so."""
        waiting, listener, left = self._waiting, self._on_event, MAX_WAITING
        assert listener is not None
        while waiting and left > 0 and self._handing_over.acquire(False):
            try:
                while waiting and left > 0:
                    left -= 1
                    # Event's own constructor takes twice as long.
                    event = tuple.__new__(Event, waiting.popleft())
                    try:
                        listener(event)
                    except Exception as error:
                        self._note_failure(event, error)
            finally:
                self._handing_over.release()

    def _note_failure(self, event: Event, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            with contextlib.suppress(Exception):  # where warnings are errors
                text = f"on_event raised {describe(error)} for {event.kind}."
                warnings.warn(text, RuntimeWarning, stacklevel=2)


class Loss(NamedTuple):
    """The tokens [start, end), or the checkpoint at start == end, that were evicted or found wrong at a tick."""

    start: int
    end: int
    tick: int
    was_wrong: bool = False


class History:
    """Evicted pieces and recent prompts of one cache, bounded."""

    def __init__(self, max_pieces: int = MAX_PIECES, max_piece_keys: int = MAX_PIECE_KEYS) -> None:
        self._max_pieces, self._max_piece_keys = max_pieces, max_piece_keys
        self._pieces: deque[_Piece] = deque()
        self._prompts: dict[str, deque[Keys]] = {}
        self._piece_keys = self._prompt_keys = 0

    def evicted(self, node: Node[Any], start: int, tick: int, was_wrong: bool = False) -> None:
        """Record that the tokens [start, node.end) of a node's edge are about to be evicted."""
        last = self._pieces[-1] if self._pieces else None
        if last is None or last.below is not node:
            last = self._add(_Piece(node, start, tick, was_wrong))
        elif last.parts[-1][2:] == (tick, was_wrong):
            last.parts[-1] = last.parts[-1]._replace(start=start)
        else:
            last.parts.append(Loss(start, node.end, tick, was_wrong))
        last.start, last.below = start, node.parent if start == node.start else node

    def evicted_checkpoint(self, node: Node[Any], tick: int) -> None:
        """Record that the checkpoint at a node's end is about to be evicted; the node's tokens stay."""
        self._add(_Piece(node, node.end, tick))

    def asked(self, namespace: str, keys: Keys) -> None:
        ring = self._prompts.get(namespace)
        if ring is None:
            while len(self._prompts) >= MAX_NAMESPACES:
                self._forget_prompt()
            ring = self._prompts[namespace] = deque()
        ring.append(keys)
        self._prompt_keys += len(keys)
        if len(ring) > MAX_PROMPTS:
            self._prompt_keys -= len(ring.popleft())
        while self._prompt_keys > MAX_PROMPT_KEYS:
            self._forget_prompt()

    def prompts(self, namespace: str) -> list[Keys]:
        """The recent prompts of a namespace, the newest first."""
        return list(reversed(self._prompts.get(namespace, ())))

    def lost_tokens(self, keys: Keys, namespace: str, stored: int) -> list[Loss]:
        """The evicted parts of a prompt that follow the `stored` keys in the tree, in order and without a gap."""
        # The newest first: tokens nearer to the root are evicted later. A piece may fit only after another piece.
        pieces = [piece for piece in reversed(self._pieces) if piece.end > stored and piece.namespace == namespace]
        losses: list[Loss] = []
        while parts := _next_parts(pieces, keys, stored):
            losses += parts
            stored = parts[-1].end
            pieces = [piece for piece in pieces if piece.end > stored]
        return losses

    def lost_checkpoint(self, keys: Keys, namespace: str, start: int, end: int) -> Loss | None:
        """The deepest evicted checkpoint in (start, end] of a prompt's path, if any is known."""
        pieces = [p for p in self._pieces if start < p.end == p.start <= end and p.namespace == namespace]
        for piece in sorted(pieces, key=lambda piece: -piece.end):
            end = piece.end
            # Comparing a few keys rules out most pieces.
            is_likely = all(piece.key_at(at) == keys[at] for at in (end - 1, max(0, end - 9), end * 3 // 4, end // 2))
            if is_likely and piece.agreement(keys) == end:
                return piece.parts[0]
        return None

    def clear(self, namespace: str | None = None) -> None:
        """Forget everything; of one namespace, only its prompts."""
        if namespace is not None:
            self._prompt_keys -= sum(map(len, self._prompts.pop(namespace, ())))
            return
        self._pieces.clear()
        self._prompts.clear()
        self._piece_keys = self._prompt_keys = 0

    def check(self) -> None:
        """Assert H1 and H2."""
        assert len(self._pieces) <= self._max_pieces, len(self._pieces)
        held = sum(piece.end for piece in self._pieces)
        assert held == self._piece_keys <= self._max_piece_keys, (held, self._piece_keys)
        asked = sum(len(keys) for ring in self._prompts.values() for keys in ring)
        assert asked == self._prompt_keys <= MAX_PROMPT_KEYS, (asked, self._prompt_keys)
        assert all(0 < len(ring) <= MAX_PROMPTS for ring in self._prompts.values()), self._prompts
        for piece in self._pieces:
            for lower, upper in zip(piece.parts, piece.parts[1:], strict=False):
                assert upper.end == lower.start and upper.start < upper.end, piece.parts
            assert (piece.start, piece.end) == (piece.parts[-1].start, piece.parts[0].end), piece.parts
            assert 0 <= piece.start <= piece.end == sum(map(len, piece.edges)), piece.parts

    def _add(self, piece: _Piece) -> _Piece:
        pieces = self._pieces
        if pieces:
            pieces[-1].below = None
        pieces.append(piece)
        self._piece_keys += piece.end
        while len(pieces) > self._max_pieces or self._piece_keys > self._max_piece_keys:
            self._piece_keys -= pieces.popleft().end
        return piece

    def _forget_prompt(self) -> None:
        namespace, ring = next(iter(self._prompts.items()))
        self._prompt_keys -= len(ring.popleft())
        if not ring:
            del self._prompts[namespace]


class _Piece:
    """An evicted stretch [start, end) of one path; its last edge begins at `last_start`.

    `below` is the node whose eviction would extend this piece; None once there is a newer piece.
    """

    __slots__ = ("below", "edges", "end", "last_start", "namespace", "parts", "start")

    def __init__(self, node: Node[Any], start: int, tick: int, was_wrong: bool = False) -> None:
        self.namespace = node.namespace
        self.edges = [each.edge for each in node.path()]
        self.last_start = node.start
        self.parts = [Loss(start, node.end, tick, was_wrong)]
        self.start, self.end = start, node.end
        self.below: Node[Any] | None = None

    def key_at(self, offset: int) -> int:
        """The key of the path at an offset below `end`."""
        if offset >= self.last_start:
            return int(self.edges[-1].item(offset - self.last_start))
        for edge in self.edges:
            if offset < len(edge):
                break
            offset -= len(edge)
        return int(edge.item(offset))

    def agreement(self, keys: Keys) -> int:
        """How many keys the path and a prompt have in common."""
        offset = 0
        for edge in self.edges:
            common = common_length(edge, keys[offset : offset + len(edge)])
            offset += common
            if common < len(edge):
                break
        return offset


def _next_parts(pieces: list[_Piece], keys: Keys, start: int) -> list[Loss]:
    """The parts of the first piece that has the prompt's keys from `start` on, in order; empty if there is none."""
    for piece in pieces if start < len(keys) else ():
        if piece.start <= start < piece.end and piece.key_at(start) == keys[start]:
            agreed, parts = piece.agreement(keys), reversed(piece.parts)
            if agreed > start:
                cut = (part._replace(start=max(part.start, start), end=min(part.end, agreed)) for part in parts)
                return [part for part in cut if part.start < part.end]
    return []
