"""open_session: how a request becomes a Session. Nothing else makes one.

take back      what vanished without closing
bring          what a store has of the prompt beyond memory
look up        what the tree holds of the prompt, the free slot that goes along with it furthest, where to resume
guard          the path, so that nothing takes it away meanwhile
move           leave the old path (page out) -> make room -> page in
count          the request, its reason where less than the match was resumed, its events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from radixcache.layers.arrays import ArrayLayout
from radixcache.paging.core import Core
from radixcache.paging.request import Request
from radixcache.sessions.session import Session
from radixcache.tree.state_tree import Use
from radixcache.verify.verifier import Check


def open_session(core: Core, request_of: Callable[[Use], Request], namespace: str, use: Sequence[Any]) -> Session:
    """Restore the longest usable prefix into the live caches, and open a session on them.

    Args:
        request_of: makes the request, once it is known when it comes.
        use: priority, turn and kind.

    Raises:
        CacheBusyError: every live slot is taken.
    """
    session = None
    try:
        with core.lock:
            core.take_back()
            core.slots.require_free(namespace)
            session = _opened(core, request_of(core.next_use(*use)))
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session


def _opened(core: Core, request: Request) -> Session:
    use, length = request.use, len(request.prompt)
    moving = core.bring(request)
    found = core.lookup(request.keys, request.namespace, request.limit, core.slots.choose)
    live, plan = found.live, found.plan
    assert live is not None, found
    live.open(found.match.node, use.tick)
    try:
        core.pager.keep_point_state(live, use)
        with moving:
            core.pager.move(live, plan, length + request.reserve, length)
        # Where the session comes back to, and others may branch off as it does.
        core.pager.keep_point_state(live, use, "branch")
    except BaseException:
        core.slots.lose(live)
        core.release(live)
        raise
    guarded = [] if live.guarded is None else live.guarded.path()
    core.states.touch(guarded, live.tip if plan.source is None else plan.source, use)
    core.counted(request, plan, "begin")
    session = Session(core, live, plan, request)
    if core.verifier.is_drawn(plan.resume) and isinstance(core.layout, ArrayLayout):
        session.verify_with(Check(core.verifier, core.layout, request.prompt, live.caches, plan.resume))
    live.seat(session)
    core.tidy_unpinned()
    core.evictor.make_room()
    return session
