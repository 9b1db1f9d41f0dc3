"""expel: takes state that was found wrong out of the tree, whoever stands on it.

root ── a ── b ── c        the keys end on b, start lies inside it: b is cut there, its lower part and all below
              └── d        go; pins on them are void; live paths that stand on them step back
"""

from __future__ import annotations

from radixcache.layers.evaluation import NATIVE_ERRORS
from radixcache.paging.core import Core
from radixcache.paging.grid import floor
from radixcache.paging.live_path import LivePath
from radixcache.tokens.keys import Keys
from radixcache.tree.node_state import StateNode


def expel(core: Core, live: LivePath, keys: Keys, start: int | None, namespace: str, *, is_branch: bool = False) -> int:
    """Quarantine what begins with `keys` from offset `start` on, take it out of the tree, and empty `live`.

    What other prompts share with it stays. An idle slot that had any of it is emptied as well. Another open
    session keeps its caches, ahead of its path from then on; at its close only what was in front is stored.

    Args:
        start: None: where they are quarantined already, by a check of another session on the same path, or else
            where the node begins on which they end. In exact mode it moves to the multiple of step_size below.

        is_branch: it moves to where the branch begins of which the keys are a part.

    Returns:
        The start.
    """
    match = core.states.match(keys, namespace)
    if is_branch and match.offset == len(keys):
        start = _branch(match.node).start
    if start is None:
        start = core.quarantine.offset(keys, namespace)
    if start is None:
        start = match.node.start if match.offset == len(keys) else 0
    start = floor(start, core.states.grid_tokens)
    core.quarantine.add(keys, start, namespace)
    if core.tier is not None:
        core.tier.distrust(keys, start, namespace)
    for _, reference in core.bookings:
        owner = reference()
        if owner is not None:
            owner.distrust(keys, start, namespace)
    guarded = [] if live.guarded is None else [live.guarded]
    live.guard(None)
    chain = match.node.path()
    if match.offset == len(keys):
        chain = _cut_off(core, match.node, start)
    _empty(core, live)
    for node in reversed(chain):
        if node.payload is None or node.end <= start or not node.is_leaf:
            break
        if node.payload.live or node.payload.is_kept:
            break
        core.states.remove(node, was_wrong=True)
    for left in guarded + chain[::-1]:
        if left.payload is not None:
            core.evictor.tidy(left)
    core.keep_budget()
    return start


def _branch(node: StateNode) -> StateNode:
    """The first of the nodes up to this one behind which the tree does not fork."""
    while node.parent is not None and not node.parent.is_root and len(node.parent.children) == 1:
        node = node.parent
    return node


def _cut_off(core: Core, node: StateNode, start: int) -> list[StateNode]:
    """Remove a node from `start` on, and all below it; returns the path that is left."""
    if node.start < start:
        try:
            core.states.split(node, start)
        except NATIVE_ERRORS:
            core.layout.release()  # there is not even room to cut it: all of it goes
    rest = [] if node.parent is None else node.parent.path()
    for path in core.slots.remove_branch(node, was_wrong=True):
        if not path.is_open:
            core.evictor.empty_slot(path, core.evictor.over_bytes)
    return rest


def _empty(core: Core, live: LivePath) -> None:
    """Leave the path that a session stands on, keeping what is right of it, and empty its caches in place."""
    nodes = live.nodes()
    try:
        core.pager.retreat(live, 0)
    except NATIVE_ERRORS:
        core.slots.lose(live)
    live.empty()
    core.states.coalesce_all(nodes)
