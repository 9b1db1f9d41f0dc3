"""Slots: the live paths of one cache, side by side, and the sessions that hold them.

    slot 0   root ── system ── user A        open: a session evaluates behind user A
    slot 1   root ── system ── user B        idle: the next request of user B goes on here, without a copy

`system` is LIVE in both and is paid for twice. A request takes the free slot whose path goes along with it furthest;
what it lacks there comes from snapshots, or out of the buffers of a slot that may be read: an idle one, or one whose
session runs in the same thread. The buffers of a session in another thread change while nobody looks.

Invariants, asserted by `check`, besides those of LivePath:

  P1  A node's guards are at least the number of open slots whose guarded path it is on; equal between public calls.
  P2  A slot that is not open has no session.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from radixcache.errors import CacheBusyError
from radixcache.layers.layout import Layout
from radixcache.paging.live_path import LivePath
from radixcache.tree.state_tree import StateNode, StateTree, state_of

if TYPE_CHECKING:
    from radixcache.sessions.session import Session


class Slots:
    """The live paths of one cache."""

    def __init__(self, layout: Layout, states: StateTree, count: int) -> None:
        self._layout = layout
        self._states = states
        self.paths = [LivePath(layout, states, slot) for slot in range(count)]
        self._sessions: dict[int, weakref.ref[Session]] = {}

    def session_on(self, path: LivePath) -> Session | None:
        """The session that is open on a path; None also when it vanished without closing."""
        reference = self._sessions.get(path.slot)
        return None if reference is None else reference()

    def seat(self, path: LivePath, session: Session) -> None:
        """A session runs on a path from now on."""
        self._sessions[path.slot] = weakref.ref(session)

    def free(self, path: LivePath) -> None:
        """No session runs on a path any more."""
        self._sessions.pop(path.slot, None)
        path.is_open = False

    def vanished(self) -> list[LivePath]:
        """Paths whose session is gone without having closed: its finalizer was interrupted."""
        return [path for path in self.paths if path.is_open and self.session_on(path) is None]

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
        return next(path for path in self._holding(node) if self._is_readable(path))

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
            state = state_of(node)
            if state.spans is not None or state.live_mask & ours:
                continue
            if not any(self._is_readable(each, evaluate) for each in self._holding(node)):
                return node.start
        return None

    def spare_nbytes(self) -> int:
        """Bytes of all live buffers beyond what the live state needs."""
        return sum(self._layout.spare_nbytes(path.caches) for path in self.paths)

    def check(self) -> None:
        """Assert P1, P2 and the invariants of every path."""
        guards: dict[int, int] = {}
        for path in self.paths:
            path.check()
            assert path.is_open or path.slot not in self._sessions, path.slot
            for node in [] if path.guarded is None else path.guarded.path():
                guards[id(node)] = guards.get(id(node), 0) + 1
        found = {id(node): state_of(node).guards for node in self._states.tree.nodes() if state_of(node).guards}
        assert found == guards, (found, guards)

    def _holding(self, node: StateNode) -> list[LivePath]:
        return [path for path in self.paths if state_of(node).live_mask >> path.slot & 1]

    def _is_readable(self, path: LivePath, evaluate: bool = True) -> bool:
        if not path.is_open:
            return True
        session = self.session_on(path)
        return session is not None and (session.is_readable() if evaluate else session.is_near())

    def _holder(self, path: LivePath, namespace: str) -> str:
        session = self.session_on(path)
        if session is None:
            return f"slot {path.slot} by a request that is being opened"
        who = f"slot {path.slot} by a request in thread {session.thread.name}"
        if session.namespace != namespace:
            return who  # nothing more is told of another namespace
        use = session.use
        kind = f" of kind {use.kind}" if use.kind else ""
        turn = "" if use.turn is None else f", turn {use.turn}"
        return f"{who}{kind}{turn}, request {use.tick}, at {session.position} of {len(session.prompt)} prompt tokens"
