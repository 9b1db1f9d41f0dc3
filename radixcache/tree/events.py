"""Events: what happens to stored state, told to a listener while the cache serves. Never imports MLX.

    stored       tokens [start, end) became a stored prefix; or, `state` checkpoint, point state at `end`
    resumed      a request took up [0, end); also with end 0, so that each request is told once
    evicted      the tokens, or the checkpoint at `end`, are gone
    split        a node was cut at offset `at`
    merged       a node was joined with its only child at offset `at`
    paged_out    spans were copied out of the live buffers
    paged_in     spans were copied into the live buffers
    quarantined  state turned out wrong, and was taken out before (evicted, `was_wrong`)

Events are handed over in order once the call that caused them has let go of the lock, by the thread that made it, or by
another that is handing over already. So a listener may call the cache: what that causes follows in its turn. What a
listener raises never reaches the cache's caller: it is counted, and warned of once; KeyboardInterrupt and SystemExit
pass, with nothing left half done.

Invariants:

  E1  At most MAX_WAITING events wait; of those beyond, `dropped` counts how many there were.
  E2  Without a listener nothing is kept, and no Event is made.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from radixcache.errors import described
from radixcache.locking.lock import Lock
from radixcache.tokens.keys import Keys
from radixcache.tree.history import History
from radixcache.tree.radix_tree import Node

#: Events that may wait, and that are handed over at the end of one call.
MAX_WAITING = 4096

Detail = Mapping[str, Any]


class EventKind(StrEnum):
    """What happened."""

    STORED = "stored"
    RESUMED = "resumed"
    EVICTED = "evicted"
    SPLIT = "split"
    MERGED = "merged"
    PAGED_OUT = "paged_out"
    PAGED_IN = "paged_in"
    QUARANTINED = "quarantined"


# The same by their names: looked up on the class they take a call each time, in Python 3.11.
STORED, RESUMED, EVICTED, SPLIT, MERGED, PAGED_OUT, PAGED_IN, QUARANTINED = EventKind


class Event(NamedTuple):
    """Something that happened to the tokens [start, end) of one namespace. A tuple, as there are many of them.

    Attributes:
        tick: number of the request in which it did, or the tick of the cache's clock.
        start, end: offsets in tokens; equal for a checkpoint.
        nbytes: bytes of the state it happened to; 0 where no state was moved, made or dropped.
        detail: what only some kinds have. stored, evicted: `state`, "tokens" or "checkpoint"; evicted tokens also
            `was_wrong`, whether verification found them so. split, merged: `at`. resumed: `prompt_tokens`,
            `matched_tokens`, `reason` (None or a ShortReason), `by` ("begin", "begin_many" or "fetch"). quarantined:
            `mismatch`, a Mismatch; the range is that of the request's own path.
    """

    kind: EventKind
    tick: int
    namespace: str
    start: int
    end: int
    nbytes: int
    detail: Detail


OnEvent = Callable[[Event], object]

#: What an Event is made of, kept until it is told.
_Told = tuple[EventKind, int, str, int, int, int, Detail]

_new = tuple.__new__


class Events:
    """The events of one cache on their way to its listener.

    Args:
        on_event: called with each Event; None: nobody listens.
        lock: held by whoever calls `emit`.

    Attributes:
        is_on: whether somebody listens.
        history: what went and what was asked for of late; it is told of that whoever else listens.
        tick: the present tick, set by the cache.
        failures, dropped: calls of the listener that raised; events that nobody was told of, because too many waited.
    """

    def __init__(self, on_event: OnEvent | None = None, lock: Lock | None = None) -> None:
        if on_event is not None and not callable(on_event):
            raise ValueError(f"on_event is a {type(on_event).__name__}; wanted a callable that takes an Event.")
        self._on_event, self._lock = on_event, lock or Lock()
        self._waiting: deque[_Told] = deque()
        self._handing_over = threading.Lock()
        self._hand_over = self.hand_over
        self.is_on = on_event is not None
        self.history = History()
        self.tick = self.failures = self.dropped = 0

    # What happened, called before it is done where something goes

    def stored(self, node: Node[Any], start: int, nbytes: int, state: str = "tokens") -> None:
        """The tokens [start, node.end), or with `state` "checkpoint" point state at the end, became a stored prefix."""
        self.emit(STORED, node.namespace, start, node.end, nbytes, {"state": state})

    def asked(self, keys: Keys, namespace: str, taken: int, nbytes: int, detail: Detail) -> None:
        """A request took up the first `taken` tokens of its prompt."""
        self.history.asked(namespace, keys)
        self.emit(RESUMED, namespace, 0, taken, nbytes, {"prompt_tokens": len(keys), **detail})

    def evicted(self, leaf: Node[Any], start: int, nbytes: int, was_wrong: bool) -> None:
        """The tokens [start, leaf.end) are about to go."""
        self.history.evicted(leaf, start, self.tick, was_wrong)
        self.emit(EVICTED, leaf.namespace, start, leaf.end, nbytes, {"state": "tokens", "was_wrong": was_wrong})

    def evicted_checkpoint(self, node: Node[Any], nbytes: int) -> None:
        """The checkpoint at a node's end is about to go."""
        self.history.dropped_checkpoint(node, self.tick)
        self.emit(EVICTED, node.namespace, node.end, node.end, nbytes, {"state": "checkpoint"})

    def split(self, upper: Node[Any], lower: Node[Any]) -> None:
        """A node became these two."""
        self.emit(SPLIT, lower.namespace, upper.start, lower.end, 0, {"at": lower.start})

    def merged(self, node: Node[Any], at: int) -> None:
        """A node and its only child became this one, joined at offset `at`."""
        self.emit(MERGED, node.namespace, node.start, node.end, 0, {"at": at})

    def paged_out(self, node: Node[Any], nbytes: int) -> None:
        """A node's spans were copied out of the live buffers."""
        self.emit(PAGED_OUT, node.namespace, node.start, node.end, nbytes, {})

    def paged_in(self, node: Node[Any], start: int, end: int, token_bytes: int) -> None:
        """The spans [start, end) of a node were copied into the live buffers."""
        self.emit(PAGED_IN, node.namespace, start, end, token_bytes * (end - start), {})

    # Telling the listener

    def emit(self, kind: EventKind, namespace: str, start: int, end: int, nbytes: int, detail: Detail) -> None:
        """Tell the listener, if there is one, when the lock is free again."""
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
        """Call the listener with what waits, unless somebody is at it: then that one goes on with it."""
        waiting, listener, left = self._waiting, self._on_event, MAX_WAITING
        assert listener is not None
        while waiting and left > 0 and self._handing_over.acquire(False):
            try:
                while waiting and left > 0:
                    left -= 1
                    # Past Event's own constructor, which takes twice as long.
                    event = _new(Event, waiting.popleft())
                    try:
                        listener(event)
                    except Exception as error:
                        self._note_failure(event, error)
            finally:
                self._handing_over.release()

    def _note_failure(self, event: Event, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            # Suppressed where warnings are made errors: whoever called the cache asked for something else.
            with contextlib.suppress(Exception):
                text = f"on_event raised {described(error)} for {event.kind}."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
